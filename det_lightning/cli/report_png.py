"""bisect --png: the pictures of the report in one image, for those who sit at a terminal."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from det_lightning.cli.printing import header_name, header_text, visible
from det_lightning.cli.report_data import DIVERGE, MATCH, MapRow, Report
from det_lightning.cli.step_report import meaning, name_of, tensor_of

_INK, _SOFT, _BAD = "#1d2733", "#5b6875", "#c2334d"
_REFERENCE, _CANDIDATE, _MATCH, _UNKNOWN = "#7fb2d9", "#1f4e79", "#d5e3ef", "#f1f2f4"
_MOST_ROWS, _LONGEST_NAME = 60, 44


def write_png(report: Report, path: Path) -> None:
    """Losses, their distance, the map of tensors over steps, and what differs, in words."""
    from matplotlib.figure import Figure

    rows = report.map.rows[:_MOST_ROWS]
    lines = [part for line in _words(report) for part in wrap(line, 150, subsequent_indent="    ") or [""]]
    heights = [2.6, 1.1, 0.6 + 0.16 * max(len(rows), 4)]
    pictures, below = sum(heights) + 1.6, 0.3 + 0.17 * len(lines)  # inches
    figure = Figure(figsize=(13, pictures + below), dpi=110, layout="constrained")
    figure.get_layout_engine().set(rect=(0, below / (pictures + below), 1, pictures / (pictures + below)))
    losses, apart, tensors = figure.subplots(3, 1, gridspec_kw={"height_ratios": heights})
    step = None if report.comparison.first is None else report.comparison.first.step
    figure.suptitle(visible(report.comparison.reason), color=_INK, fontsize=13)
    _draw_losses(report, losses, apart, step)
    _draw_map(report, rows, tensors, step)
    figure.text(
        0.01, (below - 0.1) / (pictures + below), "\n".join(lines), va="top", family="monospace", fontsize=8.5,
        color=_INK, parse_math=False, in_layout=False,
    )  # fmt: skip
    figure.savefig(path, format="png")


def _draw_losses(report: Report, losses: Any, apart: Any, step: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    styles = ((report.curves[0], "reference", _REFERENCE, 4.5), (report.curves[1], "candidate", _CANDIDATE, 1.4))
    for curve, name, colour, width in styles:
        losses.plot(curve.steps, [_number(each) for each in curve.losses], color=colour, linewidth=width, label=name)
    losses.set_ylabel("loss")
    losses.legend(frameon=False, loc="lower right", ncols=2, bbox_to_anchor=(1, 1))
    ours = dict(zip(report.curves[0].steps, report.curves[0].losses, strict=True))
    pairs = [(s, ours.get(s), v) for s, v in zip(report.curves[1].steps, report.curves[1].losses, strict=True)]
    points = [(s, abs(v - o)) for s, o, v in pairs if o is not None and v is not None and abs(v - o) > 0]
    apart.set_ylabel("|difference|")
    apart.set_xlabel("step")
    apart.sharex(losses)
    if points:
        apart.semilogy(*zip(*points, strict=True), color=_BAD, marker=".", linewidth=1)
    else:
        both = any(o is not None and v is not None and o - v == 0 for _, o, v in pairs)
        text = "no losses differ" if both else "no step has a loss on both sides"
        apart.text(0.5, 0.5, text, transform=apart.transAxes, ha="center", color=_SOFT)
        apart.set_yticks([])
    steps = [each for curve in report.curves for each in curve.steps]
    if steps:  # those without a loss too, as after a NaN; half a step more, so that a single one has a width
        losses.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not any(_number(each) == _number(each) for curve in report.curves for each in curve.losses):
        losses.set_yticks([])
    for axes in (losses, apart):
        axes.grid(axis="y", color="#d9dfe5")
        if step is not None:
            axes.axvline(step, color=_BAD, linestyle="--", linewidth=1)
    if step is not None:
        losses.annotate(
            f"first divergence: step {step}", (step, 0), xycoords=("data", "axes fraction"), xytext=(5, 6),
            textcoords="offset points", color=_BAD,
        )  # fmt: skip


def _draw_map(report: Report, rows: Any, axes: Any, step: int | None) -> None:
    from matplotlib.colors import ListedColormap

    if not rows:
        axes.axis("off")
        axes.text(0, 0.5, "no tensors were recorded on both sides", color=_SOFT)
        return
    number = {MATCH: 0, DIVERGE: 1}
    cells = [[number.get(state, 2) for state in row.states] for row in rows]
    colours = ListedColormap([_MATCH, _BAD, _UNKNOWN])
    axes.imshow(cells, aspect="auto", cmap=colours, vmin=0, vmax=2, interpolation="nearest")
    axes.set_yticks(range(len(rows)), [row_name(row) for row in rows], fontsize=7, parse_math=False)
    places = sorted({len(report.map.steps) * i // 6 for i in range(6)} | {len(report.map.steps) - 1})
    axes.set_xticks(places, [str(report.map.steps[place]) for place in places])
    more = sum(report.map.left_out.values()) + len(report.map.rows) - len(rows)
    left_out = f"; {more:,} more tensor{'s are' if more > 1 else ' is'} not shown" if more else ""
    axes.set_xlabel(f"step (light: the tensor agrees, dark: it differs){left_out}")
    if step in report.map.steps:
        axes.axvline(report.map.steps.index(step) - 0.5, color=_INK, linestyle="--", linewidth=1)


def row_name(row: MapRow) -> str:
    """Kind and name of a tensor; of a long name the end, which tells it from others, and what the font lacks spelled out."""
    name = "".join(char if _has(char) else char.encode("unicode_escape").decode() for char in visible(row.name))
    return f"{row.kind} {name if len(name) <= _LONGEST_NAME else f'...{name[3 - _LONGEST_NAME :]}'}"


@cache
def _font() -> Any:
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return FT2Font(findfont(FontProperties()))


def _has(char: str) -> bool:
    return char.isascii() or _font().get_char_index(ord(char)) != 0


def _number(loss: float | None) -> float:
    return float("nan") if loss is None else loss


def _words(report: Report) -> list[str]:
    lines = []
    for each in report.comparison.headers[:8]:
        values = [visible(header_text(each.name, value), widest=34) for value in (each.reference, each.candidate)]
        lines.append(f"{each.part} {visible(header_name(each.name), widest=40)}: {values[0]} -> {values[1]}")
    finding = report.finding
    if finding is not None and finding.difference is None:
        lines += ["", visible(f"replay: {finding.verdict}: {finding.reason}", widest=150)]
    elif finding is not None:
        difference, element = finding.difference, finding.element
        one = difference.reference or difference.candidate
        lines += [
            "",
            f"replay: {one.phase}, operation {difference.index} of rank {finding.rank}, {name_of(one)}"
            + (f", in module {visible(one.module)}" if one.module else ""),
            f"  {meaning(difference)}",
        ]
        if element is not None:
            lines.append(
                f"  {tensor_of(difference)} at [{', '.join(map(str, element.index))}]: 0x{element.reference_bits} "
                f"({element.reference}) -> 0x{element.candidate_bits} ({element.candidate})"
                + ("" if element.ulps is None else f", {element.ulps} ulps apart")
            )
    return lines
