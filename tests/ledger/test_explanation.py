from dataclasses import replace

import pytest

from det_lightning.ledger.compare import ResumedState, record_difference
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


def explained(*names, step=3, unrecorded=(), last_match=2, resumed=(), before=()):
    """The explanation of two records that differ in the named fields and kinds."""

    def record(differing):
        agree = {**AGREE, "step": step, "roots": dict(AGREE["roots"])}
        for name in differing:
            (agree["roots"] if name in agree["roots"] else agree)[name] = "2"
        for name in unrecorded:
            (agree["roots"] if name in agree["roots"] else agree)[name] = None
        return Record(step, agree, {}, {}, "")

    difference = record_difference(
        record(()),
        record(names),
        leaves=lambda kind: (None, None),
        last_match=last_match,
        resumed=resumed,
        before=before,
    )
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
            "the loss of this step agrees: the backward pass, the reduction",
        ),
        (["clip", "weights"], "gradients of this step agree: their norm"),
        (["learning_rates", "weights"], "the learning rates differ"),
        (["optimizer", "weights"], "gradients and clipping of this step agree: the optimizer's update differs"),
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


STOCK = ["sample_ids", "sample_bytes"]


def test_without_samples_an_equal_loss_accuses_nobody():
    """A stock strategy records no samples, and the loss of one micro-batch of rank 0: the others may have had other data."""
    meaning = explained("gradients", "weights", unrecorded=STOCK)
    assert "the input" in meaning and "not all samples were recorded" in meaning
    assert "the input" in explained(
        "gradients", unrecorded=["sample_ids"]
    )  # a loop of one's own knows its rank's samples
    assert "the input" in explained("gradients", unrecorded=[*STOCK, "loss"])


def test_clipping_is_told_from_the_norm_and_from_the_update():
    def meaning(*clips):
        one, other = (Record(3, {**AGREE, "clip": each}, {}, {}, "") for each in clips)
        return explanation(record_difference(one, other, leaves=lambda kind: (None, None), last_match=2))

    assert "look at gradient_clip_val" in meaning({"norm": "1", "coefficient": "1"}, {"norm": "1", "coefficient": "2"})
    assert "their norm, and so" in meaning({"norm": "1", "coefficient": "1"}, {"norm": "2", "coefficient": "2"})
    assert "clipping, which was not recorded, or" in explained("optimizer", "weights", unrecorded=["clip"])


def test_the_same_samples_in_another_order_are_no_other_samples():
    meaning = explained("sample_ids")
    assert "another order" in meaning and "moved no other recorded bit" in meaning and "other samples" not in meaning
    assert "moved no other" not in explained("sample_ids", "gradients")


@pytest.mark.parametrize(
    ("rates", "step", "words"),
    [
        ((["1", "2"], ["2", "1"]), 1, "in another order: look at the optimizer's groups"),
        ((["1", "2"], ["1", "3"]), 1, "look at the optimizer's settings"),
        ((["1", "2"], ["1", "3"]), 5, "look at the schedule and at resume"),
        ((5, {"a": 1}), 5, "look at the schedule and at resume"),
    ],
)
def test_learning_rates_lead_to_what_set_them(rates, step, words):
    one, other = (Record(step, {**AGREE, "step": step, "learning_rates": each}, {}, {}, "") for each in rates)
    assert words in explanation(record_difference(one, other, leaves=lambda kind: (None, None), last_match=step - 1))


def test_a_tensor_that_only_one_model_has_is_told_and_initialisation_is_not_blamed():
    def meaning(*leaves):
        differing = {**AGREE, "step": 0, "roots": {"weights": "2"}}
        one, other = Record(0, {**AGREE, "step": 0}, {}, {}, ""), Record(0, differing, {}, {}, "")
        return explanation(record_difference(one, other, leaves=lambda kind: leaves))

    assert "only the candidate has d" in meaning({"a": "1"}, {"a": "1", "d": "1"})
    assert "only the reference has d" in meaning({"a": "1", "d": "1"}, {"a": "1"})
    assert "initialisation" in meaning({"a": "1", "d": "1"}, {"a": "2"})


def test_a_run_that_went_on_with_another_state_is_told_before_its_steps_are_blamed():
    here = ResumedState("candidate", 2, ("optimizer w.momentum_buffer",))
    meaning = explained("loss", "gradients", resumed=(here,))
    assert "the candidate was resumed after step 2" in meaning and "optimizer w.momentum_buffer" in meaning
    forward = "the forward pass differs"
    assert forward in explained("loss", "gradients", resumed=(replace(here, unlike=()),))
    assert forward in explained("loss", "gradients", resumed=(here, replace(here, side="reference")))


def test_a_kind_that_was_not_recorded_a_step_before_may_have_differed_there():
    """Weights at every tenth step, say: an equal loss at the ninth does not clear them."""
    roots = {**AGREE["roots"], "weights": None, "optimizer": None}
    before = [Record(2, {**AGREE, "step": 2, "roots": roots}, {}, {}, "")] * 2
    assert "the state before this step or the forward pass" in explained("loss", "weights", before=before)
    assert "the weights before it are not known to" in explained("gradients", "weights", before=before)
    assert explained("weights", before=before).endswith(
        "; weights of the step before were not recorded and may have differed"
    )
    both = explained("optimizer", "weights", before=before)
    assert both.endswith("; weights and optimizer of the step before were not recorded and may have differed")
    whole = [Record(2, {**AGREE, "step": 2}, {}, {}, "")] * 2
    for names in (["loss"], ["gradients"], ["weights"], ["optimizer", "weights"]):
        assert explained(*names, before=whole) == explained(*names)


def test_a_first_common_step_says_nothing_of_the_state_before_it():
    """As of a run that went on in a new ledger, perhaps from a damaged checkpoint."""
    for names in (["optimizer", "weights"], ["weights"]):
        assert explained(*names, last_match=None).endswith(
            "the state before this step was not compared and may have differed"
        )
    assert "are not known to" in explained("gradients", last_match=None)
