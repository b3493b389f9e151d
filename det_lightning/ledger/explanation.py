"""What a difference between two records says about where to look: the first cause, in the order in which a
step computes.
"""

from __future__ import annotations

import json

from det_lightning.ledger.compare import Difference

_NAMES_SHOWN = 3


def explanation(difference: Difference) -> str:
    """One sentence that claims no more than the recorded fields show; empty if they show nothing."""
    differ = {each.name for each in (*difference.fields, *difference.roots) if not each.one_sided}
    agree = set(difference.agreeing)
    if not differ:
        return "all fields of this record agree: the runs differ in an earlier one"
    if state := _another_state(difference):
        return state
    if "sample_ids" in differ and "sample_bytes" in agree:
        return (
            "the samples of this step hold the same bytes in all, under other indices or in another order: look at the data "
            "order" + (", which moved no other recorded bit here" if differ == {"sample_ids"} else "")
        )
    if "sample_ids" in differ:
        return "other samples reached this step: look at the data order and at resume before anything else"
    if "sample_bytes" in differ:
        return "the samples held other bytes: look at the data and its augmentation before the model"
    if difference.step == 0 and "weights" in differ:
        return _start(difference)
    if "loss" in differ:
        return _loss(difference, agree)
    if "gradients" in differ:
        return _gradients(difference, agree)
    if "clip" in differ and "gradients" in agree:
        return _clip(difference)
    if "learning_rates" in differ:
        return _learning_rates(difference)
    if "optimizer" in differ or "weights" in differ:
        return _update(differ, agree) + _for_longer(difference, differ)
    if differ == {"buffers"}:
        return "only buffers differ: look at running statistics and other state beside the weights"
    return ""


def _another_state(difference: Difference) -> str:
    """Of a run that went on from a checkpoint just before this step; what both sides have alike made no difference."""
    sides = {each.side: each for each in difference.resumed if each.unlike}
    if len({each.unlike for each in sides.values()}) < len(sides):
        return ""
    for each in sides.values():
        names = ", ".join(each.unlike[:_NAMES_SHOWN]) + (", ..." if len(each.unlike) > _NAMES_SHOWN else "")
        return (
            f"the {each.side} was resumed after step {each.step} with another state than it had recorded there ({names}): "
            f"look at the checkpoint and at what was done to the state before anything else"
        )
    return ""


def _start(difference: Difference) -> str:
    weights = [each for each in difference.tensors if each.kind == "weights"]
    alone = [each for each in weights if each.reference is None or each.candidate is None]
    if alone and len(alone) == len(weights):
        side = "candidate" if alone[0].reference is None else "reference"
        return (
            f"the weights of one name agree before the first step, but only the {side} has {alone[0].name}: the models are "
            f"unlike, as with a layer more, tied weights or other names"
        )
    return "the weights differ before the first step: look at the model, its initialisation, seed and loaded checkpoint"


def _for_longer(difference: Difference, differ: set[str]) -> str:
    """What else is possible of a kind that the record before does not have, or where none was compared."""
    if difference.last_match is None and difference.step > 0:
        return "; the state before this step was not compared and may have differed"
    kinds = [kind for kind in difference.not_recorded_before if kind in differ]
    if not kinds:
        return ""
    were = "was" if kinds == ["optimizer"] else "were"
    return f"; {' and '.join(kinds)} of the step before {were} not recorded and may have differed"


def _gradients(difference: Difference, agree: set[str]) -> str:
    if "loss" not in agree:
        return (
            "the loss was not recorded: the input, the forward pass, the backward pass, the reduction or what changes "
            "gradients after it (a hook, clipping by hand) differs"
        )
    if "weights" in difference.not_recorded_before or (difference.last_match is None and difference.step > 0):
        return (
            "the loss of this step agrees, but the weights before it are not known to: they may have differed, or the "
            "input, the forward pass, the backward pass, the reduction of gradients or a hook behind it does"
        )
    if "sample_ids" in agree:
        return (
            "the loss of this step agrees: the backward pass, the reduction of gradients or a hook behind it differs, or "
            "the forward pass in a way that does not show in the loss"
        )
    return (
        "the recorded loss agrees, but not all samples were recorded, and the loss may be that of one micro-batch of rank "
        "0: the input, the forward pass, the backward pass, the reduction of gradients or a hook behind it differs"
    )


def _learning_rates(difference: Difference) -> str:
    found = next(each for each in difference.fields if each.name == "learning_rates")
    ours, theirs = json.loads(found.reference), json.loads(found.candidate)
    both = isinstance(ours, list) and isinstance(theirs, list)  # a ledger may come from anybody
    if both and sorted(map(str, ours)) == sorted(map(str, theirs)):
        return "the same learning rates stand in another order: look at the optimizer's groups of parameters"
    if difference.step <= 1:
        return "the learning rates differ from the first step on: look at the optimizer's settings and at the schedule"
    return "the learning rates differ: look at the schedule and at resume, and at the settings of further optimizers"


def _clip(difference: Difference) -> str:
    found = next(each for each in difference.fields if each.name == "clip")
    ours, theirs = json.loads(found.reference), json.loads(found.candidate)
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.get("norm") == theirs.get("norm"):
        return "gradients of this step and their norm agree: the clip coefficient differs: look at gradient_clip_val"
    return "gradients of this step agree: their norm, and so the clip coefficient, differs"


def _loss(difference: Difference, agree: set[str]) -> str:
    if not {"sample_ids", "sample_bytes"} & agree:
        return "the loss differs; samples were not recorded, so either the input or the forward pass differs"
    recorded = agree | {each.name for each in difference.roots}
    unknown = {"weights", "buffers"} & set(difference.not_recorded_before)
    if difference.last_match is None or "weights" not in recorded or unknown:
        return "the samples agree: the state before this step or the forward pass differs"
    return "the samples and the recorded state before this step agree: the forward pass differs"


def _update(differ: set[str], agree: set[str]) -> str:
    if "gradients" not in agree:
        return "gradients were not recorded: record them to tell the backward pass from the update"
    if "optimizer" in differ and "clip" not in agree:
        return "gradients of this step agree: their clipping, which was not recorded, or the optimizer's update differs"
    if "optimizer" in differ:
        return "gradients and clipping of this step agree: the optimizer's update differs"
    if "optimizer" in agree:
        return (
            "gradients and optimizer state of this step agree: the update has another setting that leaves no trace in that "
            "state (eps, decoupled weight decay), or the weights changed after it"
        )
    return "gradients of this step agree: the weights changed in the update or between it and the record"
