"""Planted corruption is found, named and judged; sound runs are not accused and not changed by a bit."""

from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.fault_guard import FaultGuard
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer

from det_lightning.errors import FaultError, InputError
from det_lightning.kernels import dispatch
from det_lightning.kernels.cpu import gemm
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import in_new_process
from tests.replay.recorded import build

STEPS = 6


def plant(kernel: str, calls: range) -> None:
    """Flips the lowest bit of one result of the named kernel at these calls, counted over the whole run."""
    sound, count = getattr(gemm, kernel), [0]

    def faulty(*arguments, **options):
        result = sound(*arguments, **options)
        count[0] += 1
        if count[0] in calls and "long_accumulator" not in arguments:
            if kernel == "gemm":
                result.view(torch.int32)[-1, 0] ^= 1
            else:
                arguments[0][-1, 0, 0] ^= 1
        return result

    setattr(gemm, kernel, faulty)


def train(folder: Path, *, guard: dict | None = None, fault=None, kernel: str = "", calls: range = range(0)):
    """(final trace, products and states checked, what the guard raised as a dict)."""
    quiet_lightning()
    if kernel:
        plant(kernel, calls)
    module, loader = build()
    watcher = None if guard is None else FaultGuard(**guard)
    callbacks = [
        WeightLedger(folder / "ledger"),
        *([watcher] if watcher else []),
        *([FaultInjector(*fault)] if fault else []),
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DetStrategy(seed=4),
        max_steps=STEPS,
        callbacks=callbacks,
        **QUIET_TRAINER,
    )
    raised = None
    try:
        trainer.fit(module, loader)
    except FaultError as error:
        raised = {name: getattr(error, name) for name in ("rank", "step", "layer", "kind", "verdict")}
    assert dispatch.observer is None
    with LedgerReader(folder / "ledger") as reader:
        trace = reader.record(reader.last_step).trace
    return trace, (watcher.products_checked, watcher.states_checked) if watcher else None, raised


@pytest.mark.parametrize("rows", [1, None])
def test_a_sound_run_is_checked_and_not_changed(tmp_path, rows):
    plain, _, _ = in_new_process(train, tmp_path / "plain")
    guarded, checked, raised = in_new_process(
        train, tmp_path / "guarded", guard={"products_every_n_steps": 2, "rows": rows}
    )
    assert (guarded, raised) == (plain, None)
    # two products forward, one back to the hidden layer, two gradients; in three of the six steps
    assert checked == (3 * 5, STEPS - 1)


@pytest.mark.parametrize(
    ("kernel", "calls", "kind", "verdict"),
    [
        ("gemm", range(1, 2), "product", "transient"),
        ("gemm", range(1, 10_000), "product", "persistent"),
        ("add_gemm_digits", range(1, 2), "gradient digits", "transient"),
        ("add_gemm_digits", range(1, 10_000), "gradient digits", "persistent"),
    ],
)
def test_a_wrong_product_is_named_with_layer_and_verdict(tmp_path, kernel, calls, kind, verdict):
    guard = {"products_every_n_steps": 1, "rows": None}
    _, _, raised = in_new_process(train, tmp_path, guard=guard, kernel=kernel, calls=calls)
    assert (raised["rank"], raised["step"], raised["kind"], raised["verdict"]) == (0, 1, kind, verdict)
    if kind == "product":
        assert raised["layer"] == "first.weight"


def test_a_bit_that_flips_between_two_steps_is_named(tmp_path):
    _, _, raised = in_new_process(train, tmp_path, guard={}, fault=(3, "second.weight", 7, 30))
    assert raised == {"rank": 0, "step": 4, "layer": "weights second.weight", "kind": "memory", "verdict": "persistent"}


def test_without_the_guard_the_same_faults_go_unseen(tmp_path):
    _, _, raised = in_new_process(train, tmp_path, kernel="gemm", calls=range(1, 2))
    assert raised is None


def test_numbers_below_one_are_refused():
    for wrong in ({"rows": 0}, {"products_every_n_steps": 0}, {"rows": 1.5}):
        with pytest.raises(InputError):
            FaultGuard(**wrong)
