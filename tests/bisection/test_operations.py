"""The first operation with a cause of its own, on made-up logs; consequences and refactoring are passed over."""

from dataclasses import replace

import pytest

from det_lightning.bisection.alignment import aligned
from det_lightning.bisection.operation_log import PENDING, Operation, Value, read_log, write_line
from det_lightning.bisection.operations import (
    ARGUMENT,
    CODE,
    DATA,
    INPUT,
    OPERATION,
    STATE_AFTER,
    concerned_tensor,
    first_operation,
)
from det_lightning.cli.step_report import finding_rows
from det_lightning.errors import LedgerError
from det_lightning.replay.step_search import StepFinding


class Log:
    """Builds a log: `log.run("mul", "x", gives="y")`; a tensor's content is what it was last given, told by a text."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.content: dict[str, str] = {}

    def value(self, name: str) -> Value:
        return Value("float32", (2,), self.content.get(name, name), abs(hash(name)) % 10**9, "")

    def run(self, op, *inputs, gives="", content=None, arguments=(), phase="forward", module="", samples=None):
        before = tuple(self.value(each) for each in inputs)
        outputs = ()
        if gives:
            words = [op, *map(str, arguments), *(each.digest for each in before)]
            self.content[gives] = content or f"{'|'.join(words)}"
            outputs = (self.value(gives),)
        self.operations.append(
            Operation(
                len(self.operations),
                phase,
                0,
                module,
                op,
                "",
                None,
                "",
                tuple(map(str, arguments)),
                before,
                outputs,
                samples,
            )
        )
        return self

    def end(self, *names):
        outputs = tuple(self.value(name) for name in names)
        self.operations.append(Operation(len(self.operations), "end", 0, "", "state", "", None, "", (), (), outputs))
        return self.operations


def step(*, batch="b", scale=2, clock="10:00", kernel=None, extra=None, module="net", stale=False) -> list[Operation]:
    """A step that scales its batch, logs the time, and adds the result to the weight w."""
    log = Log()
    log.run("batch", gives="batch", content=batch)
    log.run("aten.lift_fresh", clock, gives="time", content=f"time {clock}")
    log.run("aten.mul", "batch", gives="y", arguments=(scale,), module=module, content=kernel)
    if extra:
        log.run(*extra[0], **extra[1])
    log.run("aten.sum", "y", gives="loss", module=module)
    log.run("aten.clone", "w", gives="old", content="w", phase="update")
    log.run("aten.add_", "w", "loss", gives="w2", phase="update")
    log.run("aten.mul", "old" if stale else "w2", gives="average", phase="update", arguments=(0.5,))
    return log.end("w2", "average")


def kind_and_name(reference, candidate):
    found = first_operation(reference, candidate)
    return None if found is None else (found.kind, (found.candidate or found.reference).name)


def test_equal_logs_have_no_first_difference():
    assert first_operation(step(), step()) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"batch": "c"}, (DATA, "batch")),
        ({"scale": 3}, (ARGUMENT, "aten.mul")),
        ({"kernel": "other bits"}, (OPERATION, "aten.mul")),
        ({"extra": (("aten.neg", "y"), {"gives": "y"})}, (CODE, "aten.neg")),
        ({"stale": True}, (INPUT, "aten.mul")),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(change, expected):
    assert kind_and_name(step(), step(**change)) == expected
    assert kind_and_name(step(**change), step()) == expected


@pytest.mark.parametrize("change", [{"scale": 3}, {"kernel": "other bits"}, {"batch": "c"}, {"stale": True}])
def test_a_logged_time_that_reaches_nothing_is_passed_over(change):
    alone = kind_and_name(step(), step(**change))
    assert kind_and_name(step(clock="10:00"), step(clock="10:01", **change)) == alone
    assert kind_and_name(step(clock="10:00"), step(clock="10:01")) == (INPUT, "aten.lift_fresh")


@pytest.mark.parametrize(
    "extra",
    [
        (("aten.view", "y"), {"gives": "z", "content": "aten.mul|2|b"}),
        (("aten.detach", "batch"), {"gives": "z", "content": "b"}),
    ],
)
def test_refactoring_that_gives_the_same_values_is_no_difference(extra):
    assert kind_and_name(step(), step(extra=extra)) is None
    assert kind_and_name(step(), step(extra=extra, scale=3)) == (ARGUMENT, "aten.mul")
    assert kind_and_name(step(), step(module="renamed")) is None


def test_what_other_code_does_is_shown_where_both_sides_go_on():
    found = first_operation(step(), step(extra=(("aten.neg", "y"), {"gives": "y"})))
    one, other = found.shown
    assert (one.name, other.name, found.side, found.place) == ("aten.sum", "aten.sum", "inputs", 0)
    assert one.inputs[0].digest != other.inputs[0].digest


@pytest.mark.parametrize(("source", "expected"), [("data", (DATA, "batch")), ("w", (INPUT, "aten.select"))])
def test_a_sample_that_is_fetched_between_two_micro_batches_is_told_by_its_batch(source, expected):
    def fetched(content):
        log = Log()
        log.run("batch", gives="first").run("aten.mul", "first", gives="y")
        log.content[source] = content
        log.run("aten.select", source, gives="sample").run(
            "aten.stack", "sample" if source == "data" else "data", gives="b"
        )
        log.run("batch", gives="batch", content=log.content["b"]).run("aten.add_", "batch", "sample", gives="w2")
        return log.end("w2")

    assert kind_and_name(fetched("one"), fetched("other")) == expected


@pytest.mark.parametrize(
    "other", [{"batch[0]": (3, 2)}, {"batch[0]": (4, 2), "batch[1]": (4,)}, {"batch['x']": (4, 2)}]
)
def test_a_batch_of_another_form_is_data_and_no_other_code(other):
    def log(forms):
        batch = tuple(
            Value("float32", shape, f"{name} {shape}", 5 + k, name) for k, (name, shape) in enumerate(forms.items())
        )
        made = Value("float32", batch[0].shape, f"y of {batch[0].digest}", 9, "")
        return [
            Operation(0, "forward", 0, "", "batch", "", None, "", (), (), batch),
            Operation(1, "forward", 0, "", "aten.mul", "", None, "", (), batch[:1], (made,)),
            Operation(
                2, "end", 0, "", "state", "", None, "", (), (), (Value("float32", (), made.digest, 9, "weights w"),)
            ),
        ]

    for sides in (({"batch[0]": (4, 2)}, other), (other, {"batch[0]": (4, 2)})):
        found = first_operation(*(log(each) for each in sides))
        assert (found.kind, found.index) == (DATA, 0)
        rows = finding_rows(StepFinding("found", "", rank=0, difference=found))
        form = next(row for row in rows if row[0] == "form")
        assert form[1] != form[2] and str(list(other.get("batch[0]", (4, 2)))) in "".join(form)


def test_a_gradient_that_a_hook_changes_is_named_though_it_shares_memory_with_others():
    def value(digest, name=""):
        return Value("float32", (2,), digest, 7, name)

    def operation(index, name, inputs, outputs, phase="reduction"):
        return Operation(index, phase, 0, "", name, "", None, "", (), inputs, outputs)

    def hooked(factor):
        rest = int(factor is not None)
        changed = operation(0, "aten.mul_", (value("one"),), (value(factor or "one"),))
        gradients = (value("innocent", "gradients a"), value(factor or "one", "gradients b"))
        update = operation(1 + rest, "aten.add_", (value("w", "weights a"), gradients[0]), (value("v", "weights a"),))
        return [*[changed][:rest], operation(rest, "gradients", (), gradients), update]

    reference, candidate = hooked(None), hooked("half")
    assert concerned_tensor(first_operation(reference, candidate), candidate, reference) == "gradients b"


def test_a_gradient_is_named_by_what_changed_and_not_by_the_memory_that_it_shares():
    def value(digest, name="", storage=7):
        return Value("float32", (2,), digest, storage, name)

    def operation(index, name, inputs, outputs):
        return Operation(index, "reduction", 0, "", name, "", None, "", (), inputs, outputs)

    def hooked(b):
        views = [
            operation(0, "aten.select.int", (value("b"),), (value("one element"),)),
            operation(1, "aten.add_", (value("one element"),), (value("other element"),)),
        ]
        views = views if b != "b" else []
        gradients = value("a", "gradients a"), value(b, "gradients b")
        return [*views, operation(len(views), "gradients", (), gradients)]

    reference, candidate = hooked("b"), hooked("changed")
    found = first_operation(reference, candidate)
    assert found.candidate.name == "aten.select.int"
    assert concerned_tensor(found, candidate, reference) == "gradients b"


def test_what_comes_of_a_result_with_the_same_value_on_both_sides_is_not_concerned():
    """Of a loss whose penalty has another weight the backward pass begins with a one, which is innocent, and so is `c`."""

    def log(weight):
        made = Log()
        made.run("aten.mul", "penalty", gives="scaled", arguments=[weight])
        made.run("aten.add", "scaled", "rest", gives="loss").run("aten.ones_like", "loss", gives="one", content="1")
        made.run("aten.mm", "one", "c", gives="gradient of rest").run(
            "aten.mul", "a", "one", gives="g", arguments=[weight]
        )
        named = [
            replace(each, inputs=tuple(replace(v, name=names.get(v.digest, "")) for v in each.inputs))
            for each in made.operations
        ]
        return named

    names = {"a": "weights a", "c": "weights c"}
    reference, candidate = log(2), log(3)
    assert concerned_tensor(first_operation(reference, candidate), candidate, reference) != "weights c"


def test_a_number_that_noise_and_the_step_both_hold_leads_nowhere():
    """A metric's one is no origin of the one that a backward pass begins with."""

    def log(metric, weight):
        made = Log().run("aten.detach", "metric", gives="m", content=metric)
        made.operations[-1] = replace(
            made.operations[-1], outputs=tuple(replace(each, shape=()) for each in made.operations[-1].outputs)
        )
        made.run("aten.mul", "batch", gives="y", arguments=[weight]).run(
            "aten.ones_like", "y", gives="one", content="1"
        )
        return made.run("aten.mm", "one", "y", gives="w2").end("w2")

    assert kind_and_name(log("0", 2), log("1", 3)) == (ARGUMENT, "aten.mul")
    assert kind_and_name(log("1", 2), log("0", 3)) == (ARGUMENT, "aten.mul")


def test_other_code_without_an_effect_does_not_hide_other_code_further_on():
    """A metric that is made anew on one side only, and a hook that changes a gradient."""

    def log(extra):
        made = Log().run("aten.mul", "w", gives="y")
        if extra:
            made.run("aten.clone", "metric", gives="m", content="noise")
        made.run("aten.add", "y", gives="z").run("aten.neg", "z", gives="g")
        if extra:
            made.run("aten.select.int", "g", gives="g", content="one element")
        if extra:
            made.run("aten.mul_", "g", gives="g", content="changed")
        made.run("gradients", gives="g", content="all elements" if extra else made.content["g"])
        return made.run("aten.sub", "w", "g", gives="w2").end("w2")

    found = first_operation(log(False), log(True))
    assert (found.kind, found.candidate.name) == (CODE, "aten.select.int")
    assert found.shown[0].name == "gradients"


def test_other_code_counts_whole_though_its_first_operation_reaches_nothing():
    """Clipping by hand on one side: what it begins with is dropped, and a constant that comes of it lies further on."""

    def log(extra):
        made = Log().run("aten.mul", "w", gives="g").run("aten.lift_fresh", gives="clock", content=str(extra))
        if extra:
            made.run("aten.arange", gives="dropped", content="counted").run(
                "aten.mul_", "g", gives="g", content="clipped"
            )
        made.run("aten.neg", "w", gives="y").run("aten.lift_fresh", gives="number", content=f"from {made.content['g']}")
        return made.run("aten.add", "number", "g", gives="w2").end("w2")

    found = first_operation(log(False), log(True))
    assert (found.kind, found.candidate.name) == (CODE, "aten.arange")


def test_noise_that_reaches_nothing_does_not_hide_what_no_operation_made():
    def log(clock, weight):
        return (
            Log()
            .run("aten.lift_fresh", gives="clock", content=clock)
            .run("aten.mul", "w", gives="w2")
            .end("w2", weight)
        )

    found = first_operation(log("10:00", "v"), log("10:01", "v'"))
    assert (found.kind, found.place) == (STATE_AFTER, 1)


def test_a_result_that_was_under_way_is_followed_through_its_memory():
    def log(local):
        made = Log()
        made.run("aten.mul", "x", gives="g", content=local)
        made.run("c10d.allreduce_", "g", gives="g", content=PENDING)
        made.content["g"] = f"sum of {local}"
        made.run("aten.add_", "w", "g", gives="w2", phase="update")
        return made.end("w2")

    assert kind_and_name(log("a"), log("b")) == (OPERATION, "aten.mul")


@pytest.mark.parametrize("count", [12, 70, 700])
def test_alignment_finds_the_way_back_after_stretches_that_one_side_has_alone(count):
    long = [("aten.neg", "y")] * count
    one, other = Log(), Log()
    for log, extra in ((one, []), (other, long)):
        log.run("a", "x", gives="y")
        for op, name in extra:
            log.run(op, name, gives=name)
        for op in "bcdefghi":
            log.run(op, "y", gives="y")
    pairs = list(aligned(one.operations, other.operations))
    assert [(a and a.name, b and b.name) for a, b in pairs] == [
        ("a", "a"), *[(None, "aten.neg")] * count, *[(each, each) for each in "bcdefghi"],
    ]  # fmt: skip
    assert list(aligned([], one.operations)) == [(None, each) for each in one.operations]


def test_a_log_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(map(write_line, step())), encoding="utf-8")
    assert read_log(path) == step()


@pytest.mark.parametrize("text", ["{", "[]\n", "{}\n", '{"index": 1}\n', "\x00\n", "[" * 100_000])
def test_a_log_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(LedgerError, match=r"log\.jsonl"):
        read_log(path)
    with pytest.raises(LedgerError):
        read_log(tmp_path / "nothing")
