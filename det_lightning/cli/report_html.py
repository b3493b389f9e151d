"""bisect --html: one file that shows how two runs part, complete in itself; it fetches nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from det_lightning.bisection.operation_log import Operation
from det_lightning.cli.ledgers import steps_text
from det_lightning.cli.printing import field_text, header_name, header_text, plain_value, visible
from det_lightning.cli.report_data import Report
from det_lightning.cli.report_svg import loss_picture, map_picture
from det_lightning.cli.step_report import finding_rows, meaning, name_of, tensor_of
from det_lightning.ledger.compare import HEADER_PARTS, Difference
from det_lightning.ledger.explanation import explanation

_OPERATIONS_SHOWN = 60
_TENSORS_SHOWN = 15


def html_report(report: Report) -> str:
    """The whole file."""
    found = report.comparison
    step = None if found.first is None else found.first.step
    word = {"match": "match", "diverge": "diverge"}.get(found.verdict.value, "cannot be judged")
    parts = [
        f'<h1><span class="verdict {word.partition(" ")[0]}">{word}</span> {_text(found.reason)}</h1>',
        _runs(report),
        _section("Losses", _legend(), loss_picture(report.curves, step)),
        _section("Headers", _headers(report)),
    ]
    if report.finding is not None:
        parts.append(_section("Inside the step", _finding(report.finding)))
    if found.first is not None:
        parts.append(_section(f"Step {step}", _difference(found.first)))
    parts.append(
        _section(
            "Tensors over the steps",
            '<p class="legend"><i class="box match"></i> agrees <i class="box diverge"></i> differs '
            '<i class="box unknown"></i> not recorded on both sides</p>',
            map_picture(report.map, step),
        )
    )
    title = f"{word}: {visible(report.reference.path.name)} and {visible(report.candidate.path.name)}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _runs(report: Report) -> str:
    return _table(
        [],
        [
            [f'<i class="line {name}"></i> {name}', _code(reader.path), _text(steps_text(reader))]
            for name, reader in (("reference", report.reference), ("candidate", report.candidate))
        ],
    )


def _headers(report: Report) -> str:
    rows = [
        [
            part,
            _text(header_name(each.name)),
            *(_code(header_text(each.name, v)) for v in (each.reference, each.candidate)),
        ]
        for part in HEADER_PARTS
        for each in report.comparison.headers
        if each.part == part
    ]
    if not rows:
        return "<p>Recipe, environment and entry are the same.</p>"
    return "<p>The likeliest causes first.</p>" + _table(["", "", "reference", "candidate"], rows)


def _difference(difference: Difference) -> str:
    rows = [
        [
            _text(each.name),
            *(_code(field_text(each.name, plain_value(side))) for side in (each.reference, each.candidate)),
        ]
        for each in difference.fields
    ]
    rows += [
        [
            f"root of {_text(each.name)}",
            *(_code((plain_value(side) or "-")[:16]) for side in (each.reference, each.candidate)),
        ]
        for each in difference.roots
    ]
    tensors = [
        [_text(each.kind), _text(each.name), _code(each.reference or "-"), _code(each.candidate or "-")]
        for each in difference.tensors[:_TENSORS_SHOWN]
    ]
    more = len(difference.tensors) - len(tensors)
    parts = [_table(["differs", "reference", "candidate"], rows)]
    if difference.agreeing:
        parts.append(f"<p>Agree: {_text(', '.join(name for name in difference.agreeing if name != 'step'))}.</p>")
    if meaning_of := explanation(difference):
        parts.append(f'<p class="meaning">{_text(meaning_of)}.</p>')
    if tensors:
        parts.append(_table(["kind", "tensor", "digest in the reference", "in the candidate"], tensors))
    if more:
        parts.append(f"<p>... and {more} more tensors.</p>")
    return "".join(parts)


def _finding(finding: Any) -> str:
    difference = finding.difference
    if difference is None:
        return f'<p class="meaning">{_text(finding.verdict)}: {_text(finding.reason)}.</p>'
    one = difference.reference or difference.candidate
    parts = [
        f"<p>Operation {difference.index} of rank {finding.rank}, in the {one.phase} phase, is the first that differs. "
        f"A second replay of both sides agrees.</p>",
        f'<p class="meaning">{_text(meaning(difference))}.</p>',
        _table(
            ["", "reference", "candidate"],
            [
                [head, _code(ours), _code(theirs) if theirs != ours else "the same"]
                for head, ours, theirs in finding_rows(finding)
            ],
        ),
    ]
    element = finding.element
    if element is not None:
        sample = "" if finding.sample is None else f", sample {finding.sample} of the data set"
        apart = "" if element.ulps is None else f"{element.ulps} ulps apart"
        parts.append(
            f"<p>{_text(tensor_of(difference))}: {element.count} of {element.size} elements differ, the first at "
            f"[{', '.join(map(str, element.index))}]{sample}.</p>"
        )
        parts.append(
            _table(
                ["", "bits", "value", ""],
                [
                    ["reference", _code(f"0x{element.reference_bits}"), _code(element.reference), ""],
                    ["candidate", _code(f"0x{element.candidate_bits}"), _code(element.candidate), apart],
                ],
            )
        )
    return "".join(parts) + _operations(finding)


def _operations(finding: Any) -> str:
    """The replayed operations up to the first wrong one."""
    difference = finding.difference
    shown: Sequence[Operation] = finding.before[-_OPERATIONS_SHOWN:]
    rows, last = [], difference.index
    left_out = len(finding.before) - len(shown)
    for operation in shown:
        if operation.index >= last:
            continue
        rows.append(_operation_row(operation, "agrees", ""))
    if left_out:
        rows.insert(0, f'<tr><td colspan="6">... {left_out} operations before these agree</td></tr>')
    for side, operation in (("reference", difference.reference), ("candidate", difference.candidate)):
        if operation is not None:
            rows.append(_operation_row(operation, f"{side}: differs", "wrong"))
    heads = "".join(f"<th>{head}</th>" for head in ("#", "phase", "module", "operation", "result", ""))
    return f'<div class="wide"><table class="operations"><tr>{heads}</tr>{"".join(rows)}</table></div>'


def _operation_row(operation: Operation, state: str, css: str) -> str:
    results = ", ".join(f"{each.name or each.dtype} {list(each.shape)}" for each in operation.outputs[:2])
    where = f' title="{escape(visible(operation.place), quote=True)}"' if operation.place else ""
    cells = (str(operation.index), operation.phase, operation.module, name_of(operation), results, state)
    return f'<tr class="{css}"{where}>' + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _legend() -> str:
    return (
        '<p class="legend"><i class="line reference"></i> reference <i class="line candidate"></i> candidate; below, how '
        "far the two are apart</p>"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def _text(value: object) -> str:
    return escape(visible(value))


def _code(value: object) -> str:
    return f"<code>{_text(value)}</code>"


_STYLE = """
:root { --ink: #1d2733; --soft: #5b6875; --line: #d9dfe5; --paper: #fff; --reference: #7fb2d9; --candidate: #1f4e79;
  --bad: #c2334d; --match: #d5e3ef; --unknown: #f1f2f4; --wrong: #fbe6ea; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --line: #37424d; --paper: #151b21;
  --reference: #4f7fa6; --candidate: #a9d2f3; --bad: #ff7d93; --match: #2b4a66; --unknown: #232b33; --wrong: #45222a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; font-weight: 600; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { padding: .1em .5em; border-radius: .3em; color: #fff; background: #66727e; }
.verdict.match { background: #2c6e49; } .verdict.diverge { background: #b02a43; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .4rem 0; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-weight: 400; } th { color: var(--soft); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
.meaning { border-left: 3px solid var(--bad); padding-left: .8rem; }
.legend { color: var(--soft); } .legend i, td i { display: inline-block; margin: 0 .3em 0 .8em; vertical-align: middle; }
i.line { width: 1.6em; border-top: 3px solid; } i.box { width: .9em; height: .9em; }
i.reference { border-color: var(--reference); } i.candidate { border-color: var(--candidate); }
i.match { background: var(--match); } i.diverge { background: var(--bad); } i.unknown { background: var(--unknown);
  outline: 1px solid var(--line); }
.operations { font: 12.5px ui-monospace, monospace; } .operations .wrong td { background: var(--wrong); color: var(--bad); }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg text.tick, svg text.axis, svg text.note { fill: var(--soft); } svg text.tensor { text-anchor: end; font-size: 10.5px; }
svg text.kind { font-weight: 600; } svg text.marked { fill: var(--bad); }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--bad); stroke-dasharray: 5 3; stroke-width: 1.2; }
svg .curve { fill: none; } svg .curve.reference { stroke: var(--reference); stroke-width: 4.5; }
svg .curve.candidate { stroke: var(--candidate); stroke-width: 1.4; } svg .curve.apart { stroke: var(--bad); }
svg circle.apart { fill: var(--bad); } svg rect.match { fill: var(--match); } svg rect.diverge { fill: var(--bad); }
svg rect.unknown { fill: var(--unknown); }
"""
