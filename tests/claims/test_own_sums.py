"""Sums of floats in code of the user's own between the backward pass and the step: torch's depend on the number of threads,
which launchers choose by the number of ranks."""

import pytest
import torch

from det_lightning.optim.one_thread import one_thread
from tests.claims.processes import in_new_process
from tests.claims.test_world_size import assert_same_training, trained
from tests.claims.trainings import CLASSES, FEATURES, Network, Run, Split

WIDE = 60_000


class Wide(Network):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, WIDE)
        self.output = torch.nn.Linear(WIDE, CLASSES)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_((torch.rand(parameter.shape, generator=generator) - 0.5) / 200)


def root_mean_square(x):
    return x.pow(2).mean().sqrt()


class LayerwiseRates(torch.optim.Optimizer):
    """Steps by the gradient, in units of the weight's root mean square."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * root_mean_square(p) / root_mean_square(p.grad)))


class StepsByItself(Wide):
    def configure_optimizers(self):
        return LayerwiseRates(self.parameters())


class NormalisesInTheHook(Wide):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.div_(100 * root_mean_square(p.grad))


class ClipsItself(Wide):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for p in self.parameters():
            p.grad.mul_(0.01 / root_mean_square(p.grad))


@pytest.mark.parametrize("build", [StepsByItself, NormalisesInTheHook, ClipsItself])
def test_C56_sums_of_ones_own_do_not_depend_on_the_threads(build):
    run = Run(build=build, steps=3, options={"stock_optimizers": build is StepsByItself})
    run = run if build is NormalisesInTheHook else Run(**{**vars(run), "trainer": {"gradient_clip_val": None}})
    few = trained(run)
    assert len(set(few.weights)) == 4
    assert_same_training(trained(run, threads=4), few)
    assert_same_training(trained(Run(**{**vars(run), "split": Split(2, 12, 1)}), threads=2), few)


def sums(threads):
    x = (torch.rand(100, WIDE, generator=torch.Generator().manual_seed(1)) - 0.5) / 200
    with one_thread():
        pinned = [root_mean_square(part).item() for part in x]
    assert torch.get_num_threads() == threads, "the threads are given back"
    return [root_mean_square(part).item() for part in x], pinned


def test_stock_sums_depend_on_the_threads_and_not_on_one():
    (one, _), (four, pinned) = (in_new_process(sums, threads, threads=threads) for threads in (1, 4))
    assert one != four
    assert one == pinned
