"""The promise: five launches are one training, whatever the flags of torch and the hardware below; what may explain a
difference is written in the header as it was observed, and hardware is named first.

Cases C13, C14, C15, C55 and C60; how processes are launched (C45) is in tests/strategies/test_registration.py.
"""

import os
from dataclasses import replace

import pytest
import torch

from det_lightning.ledger.compare import header_differences
from det_lightning.ledger.store import LedgerReader
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.trainings import Network, Run, Split, train
from tests.ledger.example_runs import ENVIRONMENT, write_run

RUN = Run(split=Split(2, 4, 3), samples=58, steps=6, options={"global_batch": 24}, loader={"shuffle": True})
ON_GPUS = replace(RUN, trainer={"accelerator": "gpu"})

NCCL = [
    {"NCCL_MAX_NCHANNELS": "1"},
    {"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "16"},
    {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
    {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"},
    {"NCCL_ALGO": "ring;allreduce:tree"},
]


def train_with(rank, world_size, port, run: Run, environment: dict[str, str]):
    """A training in a process that begins with these environment variables."""
    os.environ.update(environment)
    return train(rank, world_size, port, run)


def launched(run: Run, environment: dict[str, str] | None = None):
    outcomes = on_ranks(run.split.world_size, train_with, run, environment or {})
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def test_C13_five_fresh_launches_are_one_training():
    first, *others = (launched(replace(RUN, steps=3)) for _ in range(5))
    assert others == [first] * 4


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_C13_five_fresh_launches_on_two_gpus_are_the_training_on_the_cpu():
    assert [launched(ON_GPUS) for _ in range(5)] == [launched(RUN)] * 5


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.parametrize("environment", NCCL, ids=str)
def test_C14_C15_channels_and_algorithms_of_nccl_move_no_bit(environment):
    assert launched(ON_GPUS, environment) == launched(RUN)


class Switching(Network):
    """Sets a flag when the Trainer has long been made."""

    def configure_model(self):
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")


def observed_flags(rank, world_size, port, run: Run) -> tuple[dict, list[bytes]]:
    weights = train(rank, world_size, port, run).weights
    return LedgerReader(run.ledger).environment["flags"], weights


def test_C60_flags_are_recorded_as_observed_at_step_0_and_move_no_bit(tmp_path):
    one = replace(RUN, split=Split(1, 24, 1), ledger=tmp_path / "plain")
    switched = replace(one, build=Switching, ledger=tmp_path / "switched")
    asked = replace(one, trainer={"deterministic": True}, ledger=tmp_path / "asked")
    (plain, expected), *others = (on_ranks(1, observed_flags, run)[0] for run in (one, switched, asked))
    assert plain["deterministic_algorithms"] is False
    assert [flags["deterministic_algorithms"] for flags, _ in others] == [True, True]
    assert [flags["float32_matmul_precision"] for flags, _ in others] == ["medium", "highest"]
    assert all(weights == expected for _, weights in others)


def test_C55_the_header_records_device_and_instruction_set(tmp_path):
    train(0, 1, free_port(), replace(RUN, split=Split(1, 24, 1), steps=1, ledger=tmp_path / "ledger"))
    with LedgerReader(tmp_path / "ledger") as reader:
        environment = reader.environment
    assert environment["device"] == "cpu" and environment["processor"]
    assert environment["isa"] == torch.backends.cpu.get_cpu_capability()
    assert "gpu" not in environment


def test_C55_a_comparison_names_hardware_before_versions_and_everything_else(tmp_path):
    hardware = {"device": "cuda:0", "gpu": "NVIDIA A100", "versions": {"torch": "2.13.0"}, "host": "a", "isa": "AVX2"}
    other = {"device": "cuda:1", "gpu": "NVIDIA H100", "versions": {"torch": "2.12.0"}, "host": "b", "isa": "AVX512"}
    paths = [
        write_run(tmp_path / name, 2, environment=ENVIRONMENT | environment)
        for name, environment in (("a", hardware), ("b", other))
    ]
    found = [each.name for each in header_differences(*(LedgerReader(path) for path in paths))]
    assert found == ["device", "gpu", "isa", "versions.torch", "host"]
