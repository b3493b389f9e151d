"""The pictures of a report as SVG text: loss curves with the first divergence, and the map of tensors over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from det_lightning.cli.printing import visible
from det_lightning.cli.report_data import DIVERGE, MATCH, LossCurve, TensorMap

_WIDTH, _LEFT, _RIGHT = 960, 64, 32
_PLOT = _WIDTH - _LEFT - _RIGHT


def loss_picture(curves: tuple[LossCurve, LossCurve], divergence: int | None) -> str:
    """Both losses over the steps, and below them how far they are apart."""
    steps = [step for curve in curves for step in curve.steps]
    finite = [loss for curve in curves for loss in curve.losses if loss is not None and loss == loss]
    if not steps or not finite:
        return "<p>No losses were recorded.</p>"
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def across(step: float) -> float:
        return _LEFT + _PLOT * (step - first) / (last - first)

    top, height, gap = 12, 220, 42
    low, high = min(finite), max(finite)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    pad = 0.05 * (high - low)

    def up(loss: float) -> float:
        return top + height * (1 - (loss - low + pad) / (high - low + 2 * pad))

    parts = [_axis_left(ticks(low, high), up, "loss")]
    for curve, name in zip(curves, ("reference", "candidate"), strict=True):
        pairs = list(zip(curve.steps, curve.losses, strict=True))
        points = [(across(step), None if loss is None or loss != loss else up(loss)) for step, loss in pairs]
        parts.append(f'<path class="curve {name}" d="{_path(points)}"/>')
        parts += [
            f'<text class="note {name}" x="{across(s):.1f}" y="{top + 10}">NaN from step {s}</text>'
            for s in [step for step, loss in pairs if loss is not None and loss != loss][:1]
        ]
    apart_top, apart_height = top + height + gap, 90
    parts.append(_apart(curves, across, apart_top, apart_height))
    bottom = apart_top + apart_height
    parts.append(_axis_below([t for t in ticks(first, last) if t == int(t)], across, bottom))
    if divergence is not None:
        x = across(divergence)
        end = x > _WIDTH - 220
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        anchor = f'x="{x - 6:.1f}" text-anchor="end"' if end else f'x="{x + 6:.1f}"'
        parts.append(f'<text class="marked" {anchor} y="{top + height - 6}">first divergence: step {divergence}</text>')
    return _svg(bottom + 36, parts, "Losses of both runs over the steps")


def _apart(curves, across, top: float, height: float) -> str:
    """|candidate - reference| on a logarithmic scale, where both have a loss."""
    ours = dict(zip(curves[0].steps, curves[0].losses, strict=True))
    apart = {}
    for step, loss in zip(curves[1].steps, curves[1].losses, strict=True):
        other = ours.get(step)
        if loss is not None and other is not None and loss == loss and other == other:
            apart[step] = abs(loss - other)
    positive = [value for value in apart.values() if value > 0]
    if not positive:
        where = f'x="{_LEFT + _PLOT / 2}" y="{top + height / 2}" text-anchor="middle"'
        what = "the losses agree to the bit at every step shown" if apart else "no step has a loss on both sides"
        return f'<text class="note" {where}>{what}</text>'
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)

    def up(value: float) -> float:
        return top + height * (1 - (math.log10(value) - low) / (high - low))

    every = max(1, (high - low) // 4)
    marks = [10.0**power for power in range(low, high + 1, every)]
    points = [(across(step), up(value) if value > 0 else None) for step, value in sorted(apart.items())]
    return (
        _axis_left(marks, up, "|difference|")
        + f'<path class="curve apart" d="{_path(points)}"/>'
        + "".join(f'<circle class="apart" cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>' for x, y in points if y is not None)
    )


def map_picture(found: TensorMap, divergence: int | None) -> str:
    """One line for each tensor, one column for each step; what diverges is dark."""
    if not found.rows:
        return "<p>No tensors were recorded on both sides.</p>"
    label, row_height, top = 290, 13, 8
    count = len(found.steps)
    width = (_WIDTH - label - _RIGHT) / count
    parts: list[str] = []
    y, kind = float(top), ""
    for row in found.rows:
        if row.kind != kind:
            kind, y = row.kind, y + 18
            parts.append(f'<text class="kind" x="0" y="{y - 4:.1f}">{escape(visible(kind))}</text>')
        name = visible(row.name)
        shown = name if len(name) <= 44 else f"...{name[-41:]}"
        parts.append(f'<text class="tensor" x="{label - 6}" y="{y + row_height - 3:.1f}">{escape(shown)}</text>')
        for start, end, state in _runs(row.states):
            steps = f"{found.steps[start]} to {found.steps[end - 1]}" if end - start > 1 else f"{found.steps[start]}"
            parts.append(
                f'<rect class="{state}" x="{label + width * start:.2f}" y="{y:.1f}" width="{width * (end - start):.2f}" '
                f'height="{row_height - 2}"><title>{escape(name)}: {_SAID[state]}, step {steps}</title></rect>'
            )
        y += row_height
        last = row is found.rows[-1] or found.rows[found.rows.index(row) + 1].kind != kind
        if last and kind in found.left_out:
            parts.append(
                f'<text class="tensor" x="{label - 6}" y="{y + 10:.1f}">... and {found.left_out[kind]} more</text>'
            )
            y += row_height
    if divergence in found.steps:
        x = label + width * found.steps.index(divergence)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y:.1f}"/>')
    places = sorted({count * i // 6 for i in range(6)} | {count - 1})
    for place in places:
        x = label + width * (place + 0.5)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{found.steps[place]}</text>'
        )
    parts.append(f'<text class="axis" x="{label}" y="{y + 34:.1f}">step</text>')
    return _svg(y + 40, parts, "Which tensors agree at which step")


_SAID = {MATCH: "agrees", DIVERGE: "differs", "unknown": "not recorded on both sides"}


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, about as many as wanted."""
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _runs(states: Sequence[str]) -> list[tuple[int, int, str]]:
    """(start, end, state) of stretches of equal states."""
    runs, start = [], 0
    for place in range(1, len(states) + 1):
        if place == len(states) or states[place] != states[start]:
            runs.append((start, place, states[start]))
            start = place
    return runs


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    words, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
        else:
            words.append(f"{pen}{x:.1f},{y:.1f}")
            pen = "L"
    return "".join(words)


def _axis_left(marks: Sequence[float], up, name: str) -> str:
    lines = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(mark):.1f}" y2="{up(mark):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{up(mark) + 4:.1f}" text-anchor="end">{mark:.6g}</text>'
        for mark in marks
    )
    return lines + f'<text class="axis" x="{_LEFT}" y="{up(max(marks)) - 6 if marks else 10:.1f}">{name}</text>'


def _axis_below(marks: Sequence[float], across, y: float) -> str:
    return (
        "".join(
            f'<text class="tick" x="{across(mark):.1f}" y="{y + 16:.1f}" text-anchor="middle">{mark:.0f}</text>'
            for mark in marks
        )
        + f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{y + 32:.1f}" text-anchor="end">step</text>'
    )


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
