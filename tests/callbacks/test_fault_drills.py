"""Drills: a bit of every kind of value is flipped, and the guard names it; what nothing can see is called masked."""

import json
import warnings

import pytest
import torch
from det_lightning.callbacks.fault_drill import drill_outcome
from det_lightning.callbacks.fault_guard import FaultGuard
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Callback, Trainer

from det_lightning.distributed import transfer
from det_lightning.errors import FaultError, InputError
from det_lightning.kernels import dispatch
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import free_port, given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.callbacks.test_ledger_of_several_optimizers import ClipsByHand
from tests.claims.processes import in_new_process, on_ranks
from tests.replay.recorded import Network, build

STEP = 3
KINDS = {
    "weight": ("memory", STEP + 1, "weights first.weight"),
    "optimizer": ("memory", STEP + 1, "optimizer first.weight.momentum_buffer"),
    "gradient": ("gradient", STEP, "first.weight"),
    "product": ("product", STEP, "first.weight"),
    "gradient digits": ("gradient digits", STEP, "first.weight"),
}


def run(ledger, *, injector=None, guard=True, ranks=None, more=(), module=None, accelerator="cpu"):
    """(what the guard raised, None if nothing; the guard) of six steps."""
    quiet_lightning()
    built, loader = build()
    watcher = FaultGuard(products_every_n_steps=1, rows=None)
    rank, world, port = ranks or (0, 1, free_port())
    callbacks = [*([watcher] if guard else []), *more, *([injector] if injector else []), WeightLedger(ledger)]
    trainer = Trainer(
        accelerator=accelerator,
        devices=world,
        strategy=DetStrategy(seed=4, cluster_environment=given_ranks(rank, world, port), global_batch=12),
        max_steps=6,
        callbacks=callbacks,
        **QUIET_TRAINER,
    )
    error = None
    try:
        trainer.fit(module or built, loader)
    except FaultError as raised:
        error = raised
    finally:
        torch.distributed.destroy_process_group()
    assert dispatch.observer is None and not transfer.watchers
    return error, watcher


def told(error):
    return error and {name: getattr(error, name) for name in ("rank", "step", "layer", "kind", "verdict")}


def all_drills(folder, accelerator="cpu"):
    """(kind, lasting) -> outcome and what was told; one process for all of them."""
    found = {}
    run(folder / "clean", guard=False, accelerator=accelerator)
    for kind in KINDS:
        for lasting in (False, True):
            for guard in (False, True):
                ledger = folder / f"{kind}-{lasting}-{guard}"
                injector = FaultInjector(STEP, "first.weight", 8, 19, kind=kind, lasting=lasting)
                error, _ = run(ledger, injector=injector, guard=guard, accelerator=accelerator)
                outcome = drill_outcome(injector, error, folder / "clean", ledger)
                found[f"{kind}, {lasting}, {guard}"] = outcome, told(error), len(injector.flips)
    return found


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    return in_new_process(all_drills, tmp_path_factory.mktemp("drills"))


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_flip_is_found_named_and_judged(drills, kind, lasting):
    outcome, fault, flips = drills[f"{kind}, {lasting}, True"]
    reported, step, layer = KINDS[kind]
    computed = kind in ("product", "gradient digits")  # again; memory stays as it was flipped
    verdict = "transient" if computed and not lasting else "persistent"
    assert outcome == "found" and flips >= 1
    assert fault == {"rank": 0, "step": step, "layer": layer, "kind": reported, "verdict": verdict}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_guard_the_same_flip_goes_unseen_into_the_weights(drills, kind):
    assert drills[f"{kind}, False, False"][:2] == ("missed", None)


def drill_activations(folder):
    """Outcomes of low bits of ten activations, without and with a guard."""
    run(folder / "clean", guard=False)
    outcomes = {}
    for guard in (False, True):
        for index in range(10):
            injector = FaultInjector(STEP, "first.weight", index, 3, kind="product")
            error, _ = run(folder / f"{guard}-{index}", injector=injector, guard=guard)
            outcomes[guard, index] = drill_outcome(injector, error, folder / "clean", folder / f"{guard}-{index}")
            (name, before, after) = injector.flips[0]
            if before < 0 and not guard:  # the rectifier behind it makes it zero
                assert outcomes[guard, index] == "masked" and after < 0 and name == "product with first.weight"
    return outcomes


def test_a_flip_that_a_rectifier_hides_is_masked_and_not_missed(tmp_path):
    outcomes = in_new_process(drill_activations, tmp_path)
    assert {outcomes[False, index] for index in range(10)} == {"masked", "missed"}
    assert {outcomes[True, index] for index in range(10)} == {"found"}


def two_ranks(rank, world_size, port, ledger, injector, guard=True, accelerator="cpu"):
    ranks = rank, world_size, port
    error, watcher = run(ledger, injector=injector, guard=guard, ranks=ranks, accelerator=accelerator)
    return told(error), watcher.transfers_checked, watcher.gradients_checked, [] if injector is None else injector.flips


def test_a_sound_run_of_two_ranks_is_checked_and_not_changed(tmp_path):
    checked = on_ranks(2, two_ranks, tmp_path / "guarded", None)
    on_ranks(1, two_ranks, tmp_path / "clean", None, guard=False)
    assert [each[0] for each in checked] == [None, None]
    assert all(each[1] >= 6 and each[2] == 6 for each in checked)
    injector = FaultInjector(1, "first.weight", 0, 0)
    injector.flips.append(("none", 0, 0))
    assert drill_outcome(injector, None, tmp_path / "clean", tmp_path / "guarded") == "masked"


@pytest.mark.parametrize("lasting", [False, True])
def test_a_flip_in_flight_is_named_with_the_rank_that_got_it_on_every_rank(tmp_path, lasting):
    injector = FaultInjector(STEP, "second.weight", 7, 11, rank=1, kind="digits in flight", lasting=lasting)
    faults = on_ranks(2, two_ranks, tmp_path / "ledger", injector)
    assert [each[0] for each in faults] == [faults[0][0]] * 2
    fault = faults[0][0]
    assert (fault["rank"], fault["step"], fault["kind"]) == (1, STEP, "digits in flight")
    assert fault["verdict"] == ("persistent" if lasting else "transient")
    assert "second.weight" in fault["layer"].split(", ")
    assert [bool(each[3]) for each in faults] == [False, True]


def test_a_reduced_gradient_that_differs_on_one_rank_is_named_with_that_rank(tmp_path):
    faults = on_ranks(3, three_ranks, tmp_path / "ledger")
    assert faults == [{"rank": 2, "step": STEP, "layer": "second.bias", "kind": "gradient", "verdict": None}] * 3


class FlipsEarly(FaultInjector):
    """Flips the gradient before the guard has seen it, as a fault within the reduction would."""


def three_ranks(rank, world_size, port, ledger):
    injector = FlipsEarly(STEP, "second.bias", 1, 22, rank=2, kind="gradient")
    quiet_lightning()
    module, loader = build()
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DetStrategy(seed=4, cluster_environment=given_ranks(rank, world_size, port), global_batch=12),
        max_steps=6,
        callbacks=[injector, FaultGuard(products_every_n_steps=1)],
        **QUIET_TRAINER,
    )
    try:
        trainer.fit(module, loader)
    except FaultError as error:
        return told(error)
    finally:
        torch.distributed.destroy_process_group()


class Scales(Callback):
    """A callback that changes gradients, as it may."""

    def on_after_backward(self, trainer, pl_module) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ScalesItself(Network):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class ClampsWeights(Network):
    """As in a Wasserstein critic."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class HalvesWeightsAfterEpochs(Callback):
    def on_train_epoch_end(self, trainer, pl_module) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)


def guarded_beside_hooks(folder):
    """What was raised and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = [
            told(run(folder / "module", module=ClampsWeights(0.25, None, ""))[0]),
            told(run(folder / "callback", more=[HalvesWeightsAfterEpochs()])[0]),
        ]
    return raised, [str(each.message) for each in caught if "FaultGuard" in str(each.message)]


def test_weights_that_a_hook_changes_between_steps_are_told_and_nobody_is_accused(tmp_path):
    raised, warned = in_new_process(guarded_beside_hooks, tmp_path)
    assert raised == [None, None]
    assert sum("ClampsWeights.on_train_batch_end may have done it" in each for each in warned) == 5
    assert sum("HalvesWeightsAfterEpochs.on_train_epoch_end may have done it" in each for each in warned) == 1


def guarded_with_changes(folder):
    return [
        told(run(folder / "callback", more=[Scales()])[0]),
        told(run(folder / "module", module=ScalesItself(0.25, None, ""))[0]),
        told(run(folder / "by hand", module=ClipsByHand())[0]),
    ]


def test_code_that_may_change_gradients_is_not_accused(tmp_path):
    assert in_new_process(guarded_with_changes, tmp_path) == [None] * 3


def test_a_drill_that_never_came_to_its_step_shows_nothing(tmp_path):
    with pytest.raises(InputError, match="never came to step 99"):
        drill_outcome(FaultInjector(99, "first.weight", 0, 0), None, tmp_path, tmp_path)


def test_an_unknown_kind_or_state_is_refused(tmp_path):
    with pytest.raises(InputError, match="kind is 'loss'; allowed: weight"):
        FaultInjector(1, "first.weight", 0, 0, kind="loss")
    assert "has no state 'exp_avg' of first.weight; it has momentum_buffer" in in_new_process(unknown_state, tmp_path)


def unknown_state(folder):
    try:
        run(folder, injector=FaultInjector(1, "first.weight", 0, 0, kind="optimizer", state="exp_avg"))
    except InputError as error:
        return json.dumps(str(error))
