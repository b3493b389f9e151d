import pytest

from det_lightning.ledger.compare import record_difference
from det_lightning.ledger.explanation import explanation
from det_lightning.ledger.record import Record

AGREE = {
    "step": 3,
    "epoch": 0,
    "sample_ids": "1",
    "sample_bytes": "1",
    "loss": "1",
    "learning_rates": ["1"],
    "clip": "1",
    "roots": {"weights": "1", "gradients": "1", "optimizer": "1", "buffers": "1"},
}


def explained(*names, step=3, unrecorded=(), last_match=2):
    """The explanation of two records that differ in the named fields and kinds."""

    def record(differing):
        agree = {**AGREE, "step": step, "roots": dict(AGREE["roots"])}
        for name in differing:
            (agree["roots"] if name in agree["roots"] else agree)[name] = "2"
        for name in unrecorded:
            (agree["roots"] if name in agree["roots"] else agree)[name] = None
        return Record(step, agree, {}, {}, "")

    difference = record_difference(record(()), record(names), leaves=lambda kind: (None, None), last_match=last_match)
    return explanation(difference)


@pytest.mark.parametrize(
    ("names", "start"),
    [
        (["sample_ids", "sample_bytes", "loss", "gradients", "weights"], "other samples reached this step"),
        (["sample_bytes", "loss", "gradients", "weights"], "the samples held other bytes"),
        (
            ["loss", "gradients", "weights", "optimizer"],
            "the samples and the recorded state before this step agree",
        ),
        (
            ["gradients", "clip", "weights"],
            "the loss of this step agrees: the backward pass or the reduction",
        ),
        (["clip", "weights"], "gradients of this step agree: their norm"),
        (["learning_rates", "weights"], "the learning rates differ"),
        (["optimizer", "weights"], "gradients of this step agree: the optimizer's update differs"),
        (["weights"], "gradients and optimizer state of this step agree: the update has another setting"),
        (["buffers"], "only buffers differ"),
        ([], "all fields of this record agree"),
    ],
)
def test_the_first_cause_in_the_order_of_a_step_is_named(names, start):
    assert explained(*names).startswith(start)


def test_nothing_is_claimed_about_what_was_not_recorded():
    assert "in the update or between" in explained("weights", unrecorded=["optimizer"])
    assert "gradients were not recorded" in explained("weights", unrecorded=["gradients"])
    assert "the loss was not recorded" in explained("gradients", unrecorded=["loss"])
    assert "samples were not recorded" in explained("loss", unrecorded=["sample_ids", "sample_bytes"])
    assert "or the forward pass" in explained("loss", unrecorded=["weights"])
    assert "the state before this step or the forward pass" in explained("loss", last_match=None)


def test_a_difference_before_the_first_step_is_one_of_the_start():
    assert "before the first step" in explained("weights", step=0, last_match=None)
