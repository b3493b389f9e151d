"""Trainings on GPUs have the bytes of the same trainings on the CPU, at every split."""

import traceback
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from det_lightning.strategies.given_ranks import free_port
from tests.claims import (
    test_apart,
    test_combinations,
    test_logging,
    test_losses,
    test_manual,
    test_parameters,
    test_random,
)
from tests.claims.processes import on_ranks
from tests.claims.trainings import Network, Outcome, Run, Split, train, train_each

pytestmark = pytest.mark.cuda


class Adam(Network):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), F.one_hot(y, self.output.out_features).to(x.dtype))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Dropped(Network):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.25)

    def forward(self, x):
        return self.output(self.dropout(F.relu(self.hidden(x))))


RUNS = {
    "sgd": Run(),
    "adamw": Run(build=Adam),
    "dropout": Run(build=Dropped),
    "bf16-true": Run(trainer={"precision": "bf16-true"}),
    "bf16-mixed": Run(trainer={"precision": "bf16-mixed"}),
}


# Every loss, optimizer and precision, uses of parameters, random numbers, logged values and manual optimization.
RUNS |= {f"loss: {name}": test_losses.run_of(name, Split(1, 24, 1)) for name in test_losses.LOSSES}
RUNS |= {
    " ".join(case): test_combinations.run_of(*case, Split(1, 24, 1))
    for case in test_combinations.CASES
    if "as it is" not in case[0]  # stepped by torch's own kernels
}
RUNS |= {
    "random numbers": test_random.RUN,
    "checkpointing": replace(test_random.RUN, build=test_random.Checkpointed),
    "logging": replace(test_logging.RUN, trainer=test_logging.TRAINER),
}
RUNS |= {
    f"parameters: {name}": test_parameters.run_of(name, Split(1, 24, 1), samples=60, options={})
    for name in test_parameters.USES
}
RUNS |= {"products in windows": replace(test_apart.RUN, build=test_apart.wide_apart)}
BY_HAND = {"manual": test_manual.RUN}  # without accumulation


def try_each(rank: int, world_size: int, port: int, runs: list[Run], ports: list[int]) -> list[Outcome | str]:
    """Several trainings on one rank, one after another; for one that failed, why."""
    results = []
    for other, run in zip([port, *ports], runs, strict=True):
        try:
            results.append(train(rank, world_size, other, run))
        except Exception:
            results.append(traceback.format_exc(limit=-4))
    return results


def outcomes(accelerator: str, split: Split) -> dict[str, Outcome | str]:
    """Every run on every rank of one group of processes; what rank 0 saw."""
    named = RUNS | (BY_HAND if split.accumulate == 1 else {})
    runs = [replace(run, split=split, trainer={**run.trainer, "accelerator": accelerator}) for run in named.values()]
    ranks = on_ranks(split.world_size, try_each, runs, [free_port() for _ in runs[1:]])
    return dict(zip(named, ranks[0], strict=True))


@cache
def on_cpu() -> dict[str, Outcome]:
    found = outcomes("cpu", Split(1, 24, 1))
    assert not [name for name, outcome in found.items() if isinstance(outcome, str)]
    return found


def differences(found: dict[str, Outcome], expected: dict[str, Outcome]) -> list[str]:
    """Which parts of which runs differ, and from which step on."""
    result = []
    for name, outcome in expected.items():
        if name not in found:
            continue
        if isinstance(found[name], str):
            result.append(f"{name}: {found[name]}")
            continue
        for part in ("weights", "losses"):
            pairs = zip(getattr(found[name], part), getattr(outcome, part), strict=True)
            steps = [step for step, (a, b) in enumerate(pairs) if a != b]
            result += [f"{name}: {part} from {steps[0]} on"] if steps else []
        result += [f"{name}: optimizer"] if found[name].optimizer != outcome.optimizer else []
        result += [f"{name}: logged values"] if found[name].logged != outcome.logged else []
    return result


@pytest.mark.parametrize("split", [Split(1, 24, 1), Split(1, 8, 3)], ids=str)
def test_one_gpu_has_the_bytes_of_the_cpu(split):
    assert differences(outcomes("gpu", split), on_cpu()) == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("split", [Split(2, 12, 1), Split(2, 4, 3)], ids=str)
def test_two_gpus_have_the_bytes_of_the_cpu(split):
    assert differences(outcomes("gpu", split), on_cpu()) == []


@pytest.mark.multi_gpu
def test_ddp_on_two_gpus_ends_elsewhere():
    run = replace(RUNS["sgd"], strategy="ddp", trainer={"accelerator": "gpu"})
    ends = [
        on_ranks(split.world_size, train_each, [replace(run, split=split)], [])[0][0].weights[-1]
        for split in (Split(1, 24, 1), Split(2, 12, 1))
    ]
    assert ends[0] != ends[1]
