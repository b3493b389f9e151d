"""One training on the CPU, on one GPU and on two over NCCL: the same bytes at every step."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from det_lightning.strategies.given_ranks import free_port
from tests.claims import test_combinations, test_logging, test_losses, test_manual, test_random
from tests.claims.processes import on_ranks
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import Outcome, Run, Split, train_each

GPUS = torch.cuda.device_count()


def runs(split: Split, accelerator: str) -> dict[str, Run]:
    """Losses, precisions, optimizers, random numbers and manual optimization."""
    found = {f"loss: {name}": test_losses.run_of(name, split) for name in test_losses.LOSSES}
    for case in test_combinations.CASES:
        if "as it is" not in case[0]:
            found[" ".join(case)] = test_combinations.run_of(*case, split)
    found["dropout"] = test_random.RUN
    found["checkpointing"] = replace(test_random.RUN, build=test_random.Checkpointed)
    found["logging"] = replace(test_logging.RUN, trainer=test_logging.TRAINER)
    if split.accumulate == 1:
        found["manual"] = test_manual.RUN
    return {name: replace(run, split=split, accelerator=accelerator) for name, run in found.items()}


@cache
def outcomes(split: Split, accelerator: str) -> dict[str, Outcome]:
    wanted = runs(split, accelerator)
    ports = [free_port() for _ in wanted]
    return dict(zip(wanted, on_ranks(split.world_size, train_each, [*wanted.values()], ports[1:])[0], strict=True))


def assert_all_same(split: Split) -> None:
    expected = outcomes(Split(1, 12, 1), "cpu")
    unlike = []
    for name, outcome in outcomes(split, "gpu").items():
        try:
            assert_same_training(outcome, expected[name])
            assert outcome.logged == expected[name].logged
        except AssertionError:
            unlike.append(name)
    assert unlike == []


@pytest.mark.cuda
@pytest.mark.parametrize("split", [Split(1, 12, 1), Split(1, 4, 3)], ids=str)
def test_one_gpu_gives_the_bytes_of_the_cpu(split):
    assert_all_same(split)


@pytest.mark.multi_gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("split", [Split(2, 6, 1), Split(2, 2, 3)], ids=str)
def test_two_gpus_over_nccl_give_the_bytes_of_the_cpu(split):
    assert_all_same(split)


@pytest.mark.multi_gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ddp_ends_elsewhere_on_two_gpus():
    run = Run(strategy="ddp", accelerator="gpu")
    ends = [
        on_ranks(split.world_size, train_each, [replace(run, split=split)], [])[0][0].weights[-1]
        for split in (Split(1, 24, 1), Split(2, 12, 1))
    ]
    assert ends[0] != ends[1]
