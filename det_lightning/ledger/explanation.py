"""What a difference between two records says about where to look: the first cause, in the order in which a
step computes.
"""

from __future__ import annotations

from det_lightning.ledger.compare import Difference


def explanation(difference: Difference) -> str:
    """One sentence that claims no more than the recorded fields show; empty if they show nothing."""
    differ = {each.name for each in (*difference.fields, *difference.roots) if not each.one_sided}
    agree = set(difference.agreeing)
    if not differ:
        return "all fields of this record agree: the runs differ in an earlier one"
    if "sample_ids" in differ:
        return "other samples reached this step: look at the data order and at resume before anything else"
    if "sample_bytes" in differ:
        return "the samples held other bytes: look at the data and its augmentation before the model"
    if difference.step == 0 and "weights" in differ:
        return "the weights differ before the first step: look at initialisation, seed and loaded checkpoint"
    if "loss" in differ:
        return _loss(difference, agree)
    if "gradients" in differ:
        if "loss" in agree:
            return (
                "the loss of this step agrees: the backward pass or the reduction of gradients differs, or the forward "
                "pass in a way that does not show in the loss"
            )
        return "the loss was not recorded: the forward pass, the backward pass or the reduction differs"
    if "clip" in differ and "gradients" in agree:
        return "gradients of this step agree: their norm, and so the clip coefficient, differs"
    if "learning_rates" in differ:
        return "the learning rates differ: look at the schedule and at resume"
    if "optimizer" in differ or "weights" in differ:
        return _update(differ, agree)
    if differ == {"buffers"}:
        return "only buffers differ: look at running statistics and other state beside the weights"
    return ""


def _loss(difference: Difference, agree: set[str]) -> str:
    if not {"sample_ids", "sample_bytes"} & agree:
        return "the loss differs; samples were not recorded, so either the input or the forward pass differs"
    recorded = agree | {each.name for each in difference.roots}
    if difference.last_match is None or "weights" not in recorded:
        return "the samples agree: the state before this step or the forward pass differs"
    return "the samples and the recorded state before this step agree: the forward pass differs"


def _update(differ: set[str], agree: set[str]) -> str:
    if "gradients" not in agree:
        return "gradients were not recorded: record them to tell the backward pass from the update"
    if "optimizer" in differ:
        return "gradients of this step agree: the optimizer's update differs"
    if "optimizer" in agree:
        return (
            "gradients and optimizer state of this step agree: the update has another setting that leaves no trace in that "
            "state (eps, decoupled weight decay), or the weights changed after it"
        )
    return "gradients of this step agree: the weights changed in the update or between it and the record"
