"""The report of bisect: complete in itself, true to the ledgers, and not moved by what a ledger's names hold."""

import re
from html.parser import HTMLParser

import pytest

from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.bisection.search import thinned
from det_lightning.cli import exit_codes
from det_lightning.cli.report_data import DIVERGE, MATCH, gather
from det_lightning.cli.report_png import write_png
from det_lightning.cli.report_svg import ticks
from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import float_bits
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import NAMES, write_run


class Page(HTMLParser):
    """Every tag with its attributes, the text, and whether all tags were closed."""

    VOID = ("meta",)

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(tmp_path, *arguments):
    """(page, exit code) of a bisect with --html and --png."""
    html, png = tmp_path / "report.html", tmp_path / "report.png"
    code, _, err = answer(["bisect", *map(str, arguments), "--html", str(html), "--png", str(png)])
    assert "report: " in err, err
    assert png.read_bytes().startswith(b"\x89PNG")
    return Page(html.read_text(encoding="utf-8")), code


@pytest.mark.parametrize(
    "other", ["a", "first", "middle", "last", "other_recipe", "other_world", "short", "empty", "weights_only"]
)
def test_every_outcome_has_a_report_that_fetches_nothing_and_runs_nothing(beside_ledgers, tmp_path, other):
    page, code = report(tmp_path, "a", other)
    assert not page.open
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    for tag, attributes in page.tags:
        assert not {"src", "href", "onload", "onclick", "data"} & attributes.keys(), tag
        assert "url(" not in attributes.get("style", "")
    word = {0: "match", 1: "diverge"}.get(code, "cannot be judged")
    assert page.text.count(word) >= 1


def test_it_marks_the_first_divergence_and_colours_the_tensors_from_there_on(beside_ledgers, tmp_path):
    page, code = report(tmp_path, "a", "middle")
    assert code == exit_codes.DIVERGE
    assert "first divergence: step 5" in page.text and "layer.2.bias" in page.text
    cells = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert cells.count(DIVERGE) == 1 and cells.count(MATCH) == 2 * len(NAMES)
    assert "layer.2.bias: differs, step 5 to 12" in page.text


def test_names_from_a_ledger_are_text_and_nothing_else(tmp_path):
    names = ("<script>alert(1)</script>", 'a" onload="x', "&amp;\x1b[2J\u202e", "x" * 3000)
    recipe = {"seed": "</style><script>alert(2)</script>", "\ud7ff<b>": 1}
    a = write_run(tmp_path / "a", 4, names=names)
    b = write_run(tmp_path / "b", 4, names=names, recipe=recipe, changes=[(2, "weights", names[0])])
    page, _ = report(tmp_path, a, b, "--recipe-may-differ")
    assert not page.open and "script" not in {tag for tag, _ in page.tags}
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert "<script>alert(1)</script>: differs" in page.text


def test_losses_that_are_nan_infinite_or_missing_are_drawn_where_they_can_be(tmp_path):
    losses = {1: float("nan"), 2: float("inf"), 3: 2.0, 4: -1e30}
    fields = {step: {"loss": float_bits(loss)} for step, loss in losses.items()} | {
        5: {"loss": None},
        6: {"loss": "zz"},
    }
    page, code = report(tmp_path, write_run(tmp_path / "a", 6), write_run(tmp_path / "b", 6, fields=fields))
    assert code == exit_codes.DIVERGE
    assert "NaN from step 1" in page.text
    for tag, attributes in page.tags:
        numbers = " ".join(value or "" for value in attributes.values())
        assert not re.search(r"\b(nan|inf)\b", numbers.lower()), (tag, attributes)


def test_long_runs_are_thinned_out_but_keep_their_ends_and_what_is_marked():
    kept = thinned(3, 100_003, 160, [70_000, 70_001])
    assert len(kept) <= 160 and kept == sorted(set(kept))
    assert {3, 70_000, 70_001, 100_003} <= set(kept)
    assert thinned(3, 9, 160, [5]) == list(range(3, 10))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 14), (-3e-7, 5e-7), (1e30, 1.5e30), (2, 100_000)])
def test_ticks_are_few_and_within_the_axis(low, high):
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert all(low - 1e-9 * (high - low) <= mark <= high + 1e-9 * (high - low) for mark in marks)


@pytest.mark.parametrize("kind", ["--html", "--png"])
def test_a_report_that_cannot_be_written_is_named(beside_ledgers, kind):
    code, out, err = answer(["bisect", "a", "middle", kind, "/dev/full"])
    assert code == exit_codes.CANNOT_JUDGE and "the runs diverge at step 5" in out
    assert "error: the report /dev/full cannot be written: No space left on device" in err


def test_a_place_that_cannot_hold_a_report_is_misuse(beside_ledgers, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "report.html"):
        assert answer(["bisect", "a", "middle", "--html", str(path)])[0] == exit_codes.MISUSE


def drawn(monkeypatch, *ledgers) -> list[list[str]]:
    """The words at each part of the image: the steps below it as "step 3", and the others."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: (figures.append(figure), figure.draw_without_rendering())
    )
    with LedgerReader(ledgers[0]) as a, LedgerReader(ledgers[1]) as b:
        write_png(gather(a, b, compare_ledgers(a, b)), ledgers[0] / "x.png")
    words = []
    for axes in figures[0].axes:
        steps = [f"step {each.get_text()}" for each in axes.get_xticklabels()]
        found = [*axes.get_yticklabels(), axes.xaxis.label, *axes.texts]
        words.append([*steps, *(each.get_text() for each in found)])
    return words


def test_an_image_shows_whole_steps_tells_what_it_leaves_out_and_names_tensors_apart(tmp_path, monkeypatch):
    names = [f"{'model.block.' * 6}{number}.weight" for number in range(50)] + ["重み"]
    a = write_run(tmp_path / "a", 2, names=names)
    b = write_run(tmp_path / "b", 2, names=names, changes=[(1, "weights", name) for name in names])
    losses, apart, tensors = drawn(monkeypatch, a, b)
    steps = [word for word in losses if word.startswith("step ")]
    assert "step 1" in steps and not any("." in word for word in steps)
    assert "no losses differ" in apart
    rows = [word for word in tensors if word.startswith("weights ")]
    assert len(set(rows)) == len(rows) and all(row.endswith((".weight", "\\u91cd\\u307f")) for row in rows)
    assert all(len(row) <= 60 for row in rows)
    assert any("more tensors are not shown" in word for word in tensors)


def test_an_image_without_losses_says_so(tmp_path, monkeypatch):
    fields = {step: {"loss": None} for step in range(1, 4)}
    a, b = (write_run(tmp_path / name, 3, fields=fields) for name in "ab")
    assert "no step has a loss on both sides" in drawn(monkeypatch, a, b)[1]
