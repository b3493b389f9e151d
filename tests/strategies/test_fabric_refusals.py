"""What a loop of the user's own may not do under Fabric(strategy="det") is refused with a way out, and leaves nothing on."""

import lightning.pytorch as lightning
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import det_lightning
from det_lightning.errors import InputError, UncoveredError
from det_lightning.strategies.covered_tensor import CoveredTensor
from det_lightning.strategies.fabric_of_lightning import FabricDetStrategy
from det_lightning.strategies.given_ranks import free_port, given_ranks
from tests.claims.test_fabric import Layers
from tests.claims.trainings import CLASSES, FEATURES, bytes_of, spread_samples


class Loop:
    """One rank with everything set up."""

    def __init__(self, **options):
        ranks = given_ranks(0, 1, free_port())
        precision = options.pop("precision", None)
        strategy = FabricDetStrategy(cluster_environment=ranks, **options)
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
        self.fabric.launch()
        self.plain = Layers()
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.model, self.optimizer = self.fabric.setup(self.plain, optimizer)
        self.loader = self.fabric.setup_dataloaders(DataLoader(spread_samples(24), batch_size=6))

    def batches(self):
        return iter(self.loader)

    def backward(self, x, y):
        self.fabric.backward(F.cross_entropy(self.model(x), y))


@pytest.fixture
def loop():
    """(**options of the strategy) -> a Loop."""
    yield Loop
    if dist.is_initialized():
        dist.destroy_process_group()


def uncovered_loss(one, x, y):
    one.fabric.backward(torch.sigmoid(one.model(x)).mean())


def nonlinear_loss(one, x, y):
    one.fabric.backward(F.cross_entropy(one.model(x), y).sqrt())


def own_backward(one, x, y):
    F.cross_entropy(one.model(x), y).backward()


def on_another_tensor(one, x, y):
    one.fabric.backward(F.cross_entropy(one.model(torch.zeros(6, FEATURES)), torch.zeros(6, dtype=torch.long)))


def on_raw_data(one, x, y):
    one.fabric.backward(F.cross_entropy(one.model(torch.rand(6, FEATURES, generator=torch.Generator())), y))


def twice(one, x, y):
    loss = F.cross_entropy(one.model(x), y)
    one.fabric.backward(loss)
    one.fabric.backward(loss)


def noise(one, x, y):
    one.backward(x + torch.randn(x.shape), y)


def noise_like(one, x, y):
    one.backward(x + torch.randn_like(x.inner), y)


def nothing(one, x, y):
    pass


def penalty(one, x, y):
    weight = one.plain.hidden.weight
    one.fabric.backward(F.cross_entropy(one.model(x), y) + 0.1 * weight.pow(2).sum())


def by_one_norm(one, x, y):
    one.backward(x, y)
    one.fabric.clip_gradients(one.model, one.optimizer, max_norm=1.0, norm_type=1)


def with_closure(one, x, y):
    one.backward(x, y)
    one.optimizer.step(closure=lambda: None)


REFUSED = [
    (uncovered_loss, UncoveredError, "no arithmetic contract for sigmoid"),
    (nonlinear_loss, UncoveredError, "sqrt is applied to a mean over the batch"),
    (own_backward, UncoveredError, r"Write fabric\.backward\(loss\)"),
    (on_another_tensor, UncoveredError, "not computed from the batch at hand"),
    (on_raw_data, UncoveredError, "hidden.weight received a gradient that was already summed"),
    (twice, UncoveredError, "put through fabric.backward once"),
    (noise, UncoveredError, "the global generator of torch was drawn from"),
    (noise_like, UncoveredError, "the global generator of torch was drawn from"),
    (nothing, UncoveredError, r"was not put through fabric\.backward"),
    (penalty, UncoveredError, "applied to a mean over the batch .* computed in the model's forward"),
    (by_one_norm, UncoveredError, "norm of type 1"),
    (with_closure, UncoveredError, "steps without arguments"),
]


@pytest.mark.parametrize(("body", "error", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_body_of_the_loop_that_would_break_the_promise_is_refused(loop, body, error, message):
    one = loop()
    before = bytes_of(one.plain)
    with pytest.raises(error, match=message):
        for x, y in one.loader:
            body(one, x, y)
    assert bytes_of(one.plain) == before
    assert torch.sigmoid(torch.zeros(1)).item() == 0.5, "no function mode is left on"
    for x, y in one.loader:  # the next pass begins at the same step
        one.optimizer.zero_grad()
        one.backward(x, y)
        one.optimizer.step()
    assert one.fabric.strategy.steps_done >= 4


def test_a_buffer_that_every_micro_batch_changes_is_refused(loop):
    one = loop(accumulate=2)
    one.plain.register_buffer("count", torch.zeros(()))
    batches = one.batches()
    x, y = next(batches)
    one.plain.count += 1
    one.backward(x, y)
    one.backward(*next(batches))
    one.optimizer.step()
    one.optimizer.zero_grad()
    x, y = next(batches)
    one.plain.count += 1
    one.backward(x, y)
    x, y = next(batches)
    one.plain.count += 1
    with pytest.raises(UncoveredError, match="the buffer count was changed by two micro-batches of one step"):
        one.backward(x, y)


@pytest.mark.parametrize("what", ["parameter hidden.weight", "lr of SGD's parameter group 0"])
def test_state_that_changes_between_two_micro_batches_is_refused(loop, what):
    one = loop(accumulate=2)
    batches = one.batches()
    one.backward(*next(batches))
    if "lr" in what:
        one.optimizer.param_groups[0]["lr"] *= 0.5
    else:
        one.plain.hidden.weight.data.mul_(0.5)
    with pytest.raises(UncoveredError, match=f"the {what} was changed between two micro-batches of one step"):
        next(batches)


def test_steps_where_the_loop_counts_otherwise_are_refused_with_both_numbers(loop):
    one = loop(accumulate=2)
    batches = one.batches()
    one.backward(*next(batches))
    with pytest.raises(InputError, match=r"after 1 of 2 micro-batches .* FabricDetStrategy\(accumulate"):
        one.optimizer.step()
    with pytest.raises(InputError, match="after 1 of 2 micro-batches"):
        one.fabric.save("never.ckpt", {"model": one.model})
    with pytest.raises(InputError, match="micro-batch 2 of 2 ran under"), one.fabric.no_backward_sync(one.model):
        one.backward(*next(batches))


def test_gradients_that_are_still_there_are_refused(loop):
    one = loop()
    batches = one.batches()
    one.backward(*next(batches))
    one.optimizer.step()
    with pytest.raises(InputError, match=r"hidden.weight still has the gradient .*zero_grad"):
        one.backward(*next(batches))
    one.optimizer.zero_grad(set_to_none=False)
    batches = one.batches()
    one.backward(*next(batches))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulate": 0}, InputError, "accumulate must be at least 1, got 0"),
        ({"global_batch": 0}, InputError, "global_batch must be at least 1, got 0"),
        ({"precision": "64-true"}, UncoveredError, "covers precision 32-true, bf16-true, bf16-mixed, got 64-true"),
    ],
)
def test_settings_without_a_contract_are_refused(loop, options, error, message):
    with pytest.raises(error, match=message):
        loop(**options)


def test_a_second_module_optimizers_modules_and_loaders_without_a_contract_are_refused(loop):
    one = loop()
    with pytest.raises(UncoveredError, match="sets up one module"):
        one.fabric.setup(nn.Linear(2, 2))
    with pytest.raises(UncoveredError, match="Adagrad"):
        one.fabric.setup_optimizers(torch.optim.Adagrad(nn.Linear(2, 2).parameters()))
    one.backward(*next(one.batches()))
    other = one.fabric.setup_dataloaders(DataLoader(spread_samples(8), batch_size=2))
    with pytest.raises(UncoveredError, match="trains on one DataLoader"):
        next(iter(other))
    assert len(other) == 4
    dist.destroy_process_group()
    with pytest.raises(UncoveredError, match="Tanh"):
        fabric = Fabric(
            accelerator="cpu", strategy=FabricDetStrategy(cluster_environment=given_ranks(0, 1, free_port()))
        )
        fabric.launch()
        fabric.setup(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def test_a_compiled_model_is_refused():
    fabric = Fabric(accelerator="cpu", strategy=FabricDetStrategy(cluster_environment=given_ranks(0, 1, free_port())))
    fabric.launch()
    plain = Layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, _ = fabric.setup(torch.compile(plain, backend="eager"), optimizer)
    loader = fabric.setup_dataloaders(DataLoader(spread_samples(24), batch_size=6))
    with pytest.raises(UncoveredError, match=r"handed to fabric\.setup was compiled"):
        model(next(iter(loader))[0])
    dist.destroy_process_group()


def test_after_backward_a_batch_is_made_of_ordinary_tensors(loop):
    one = loop()
    for x, y in one.loader:
        output = one.model(x)
        loss = F.cross_entropy(output, y)
        assert isinstance(loss, CoveredTensor) and len(x) == 6 and loss.item() > 0
        one.fabric.backward(loss)
        assert type(torch.softmax(output, 1)) is type(loss.detach()) is torch.Tensor
        break


def test_random_numbers_of_the_loop_are_those_of_the_samples(loop):
    draws = []
    for _ in range(2):
        one = loop(seed=5)
        for x, y in one.loader:
            noisy = x + det_lightning.random.randn_like(x)
            draws.append(noisy.tolist())
            one.backward(noisy, y)
            one.optimizer.step()
            one.optimizer.zero_grad()
        dist.destroy_process_group()
    assert draws[:4] == draws[4:] and draws[0] != draws[1]


def test_a_loop_by_name_and_by_lightning_module(loop):
    class Whole(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = Layers()

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.mse_loss(self.layers(x), F.one_hot(y, CLASSES).float())

    fabric = Fabric(accelerator="cpu", devices=1, strategy="det")
    fabric.launch()
    plain = Whole()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(spread_samples(24), batch_size=6))
    before = bytes_of(plain)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        fabric.backward(model.training_step(batch, number))
        optimizer.step()
    assert bytes_of(plain) != before and fabric.strategy.steps_done == 4
