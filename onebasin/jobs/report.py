# SPDX-License-Identifier: Apache-2.0
"""The report on a merge: one HTML page without scripts, which needs no network and has a light and a dark theme.

Names of models may hold anything, and are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from onebasin.landscape.plots import COLOURS
from onebasin.models import Folder, numel
from onebasin.models.card import paths_of
from onebasin.models.kinship import Kinship
from onebasin.models.published import plain, public_name, without_paths
from onebasin.symmetry import Signature
from onebasin.symmetry.groups.elements import Linear, Monomial
from onebasin.symmetry.tables.signature import MOVES

from .aligning import AlignedPair
from .folders import beside
from .frame import Frame
from .verdict import Verdict

_PAGE_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d5d8dc, #3b4048); --soft: light-dark(#f4f5f7, #22262c); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere;
       color: light-dark(#1c1f23, #e4e6ea); background: light-dark(#ffffff, #15181c); }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
a { color: light-dark(#0b5cad, #7db8f0); }
.wide { overflow-x: auto; } figure { margin: 1.5rem 0; } figure svg { width: 100%; max-width: 48rem; height: auto; }
table { border-collapse: collapse; font-size: .9rem; min-width: 60%; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: var(--soft); border-radius: 4px; padding: .7rem; overflow-x: auto; }
"""
_STYLE = f"""
:root {{ --before: light-dark({COLOURS[0]}, #9a9fa6); --after: light-dark({COLOURS[2]}, {COLOURS[6]}); }}
.before {{ color: var(--before); fill: var(--before); }} .after {{ color: var(--after); fill: var(--after); }}
.verdict {{ background: var(--soft); border-left: 4px solid var(--after); padding: .7rem 1rem; }}
polyline.before {{ fill: none; stroke-width: 2; stroke: var(--before); }}
polyline.after {{ fill: none; stroke-width: 2; stroke: var(--after); }}
.line text {{ fill: currentColor; font-size: 13px; }}
figcaption {{ margin-bottom: .5rem; }} .bars text {{ fill: currentColor; font-size: 12px; }}
@media (max-width: 30rem) {{ table {{ font-size: .8rem; }}
                             th, td {{ padding: .3rem .25rem; white-space: normal; overflow-wrap: break-word; }} }}
"""
ROW, BAR, LEFT, WIDEST = 30, 12, 10, 70  # of bars: pixels of a layer and of a bar; per cent before it and of it


def place_of(output: str | Path | None, report: bool) -> Path | None:
    """Return where a report goes, if one is wanted. Raises ValueError without an output that it could be written
    beside."""
    if report and output is None:
        raise ValueError("a report is written beside a model: name an output")
    return Path(beside(output, None, "report.html")) if report and output is not None else None


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a page that is readable on a phone; the title is text, the body HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}{style}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def html_table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table that scrolls horizontally if it is too wide. heads: HTML. rows: lists of complete cells."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows)
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def report_on(
    title: str, result: Mapping[str, Any], models: Sequence[Folder], frame: Frame, found: Sequence[AlignedPair]
) -> str:
    """Return the page about a merge.

    result: as `merge` returns it, with its kinship. found: the alignments of all models but the anchor, in their order.
    """
    known = paths_of(models)
    names = [f"{chr(65 + i)}: {plain(public_name(model.name))}" for i, model in enumerate(models)]
    anchor, kin = names[frame.centre], Kinship(**result["kinship"])
    verdict = Verdict(**result["verdict"]) if "verdict" in result else None
    how = "not matched" if result["match"] == "none" else f"matched at level {result['match']}"
    parts = [
        f"<h1>{escape(plain(title))}</h1>\n<p>{len(names)} models merged: {escape(result['method'])}, {how}.</p>\n",
        _verdict(verdict, names, known) if verdict else "",
        f"<h2>Models</h2>\n{_models(models, names, result['weights'])}",
        f"<p>What they are to each other: {escape(kin.sentence)}.</p>\n",
        _search(result["search"]) if "search" in result else "",
        *(_matched(names[i], anchor, frame.models[i].signature, pair)
          for i, pair in zip(frame.others, found, strict=True)),
        "<h2>Notes</h2>\n<ul>",
        *(f"<li>{escape(plain(note))}</li>\n" for note in without_paths(result["notes"], known)),
        "</ul>\n",
    ]  # fmt: skip
    return html_page(f"onebasin: {plain(title)}", "".join(parts), _STYLE)


def _table(caption: str, heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    cells = ((f"<td>{escape(str(value))}</td>" for value in row) for row in rows)
    return html_table(caption, map(escape, heads), cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _verdict(verdict: Verdict, names: Sequence[str], known: Sequence[str]) -> str:
    sentence = f'<p class="verdict">{escape(plain(without_paths(verdict.sentence, known)))}</p>\n'
    rows = [*zip(names, verdict.agreement, verdict.divergence, strict=True),
            ("the sources, with each other", verdict.sources_agree, verdict.sources_diverge)]  # fmt: skip
    cells = ((name, "" if share is None else f"{100 * share:.1f} %", _number(apart)) for name, share, apart in rows)
    caption = f"The merged model's predictions beside those of its sources ({verdict.predictions} compared)"
    return sentence + (_table(caption, ["source", "agreement", "KL divergence"], cells) if verdict.predictions else "")


def _models(models: Sequence[Folder], names: Sequence[str], weights: Sequence[float]) -> str:
    rows = []
    for name, model, weight in zip(names, models, weights, strict=True):
        signature = model.signature
        aliases = (entry for entry in signature.tensors.values() if entry.alias is not None)
        size = numel(model) - sum(prod(entry.shape) for entry in aliases)
        streams = {space.size for space in signature.spaces.values() if space.part == "stream"}
        shape = f"{len(signature.layers)} by {', '.join(map(str, sorted(streams)))}"
        rows.append((name, signature.family, f"{size:,}", shape, f"{weight:.4g}"))
    return _table("What was merged", ["model", "family", "parameters", "layers by width", "weight"], rows)


def _search(search: Mapping[str, Any]) -> str:
    tried = sorted(search["candidates"].items(), key=lambda one: float(one[1]["loss"]))
    rows = [(name, _number(one["loss"]), f"{one['seconds']:.1f}", "chosen" if name == search["chosen"] else "")
            for name, one in tried]  # fmt: skip
    caption = f"Loss: KL divergence from the sources on {search['held_out']} examples that nothing was fitted to"
    line = _line(search["line"]) if "line" in search else ""
    return f"<h2>Candidates</h2>\n{_table(caption, ['candidate', 'loss', 'seconds', ''], rows)}{line}"


def _line(line: Mapping[str, Sequence[float]]) -> str:
    """Return the chart of the loss over lambda: of the averages of two models, as they are and matched."""
    kinds = [(kind, name) for kind, name in (("before", "unmatched"), ("after", "matched")) if name in line]
    most = max([value for _, name in kinds for value in line[name] if isfinite(value)], default=0.0) or 1.0
    left, top, wide, high = 60, 12, 620, 220
    drawn = [f'<path d="M{left} {top}V{top + high}H{left + wide}" fill="none" stroke="currentColor"/>',
             f'<text x="{left - 6}" y="{top + 5}" text-anchor="end">{_number(most)}</text>',
             f'<text x="{left - 6}" y="{top + high}" text-anchor="end">0</text>',
             *(f'<text x="{left + wide * lam}" y="{top + high + 18}" text-anchor="middle">{lam:g}</text>'
               for lam in line["lambdas"][::5])]  # fmt: skip
    for kind, name in kinds:
        points = [(left + wide * lam, top + high * (1 - min(value, most) / most))
                  for lam, value in zip(line["lambdas"], line[name], strict=True) if value == value]  # fmt: skip
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline class="{kind}" points="{path}"/>')
        drawn += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
    names = {"before": "as they are", "after": "matched"}
    key = " ".join(f'<span class="{kind}">&#9632;</span> {names[kind]}' for kind, _ in kinds)
    return (
        "<figure><figcaption>The average with the weights 1 &minus; &lambda; and &lambda;: KL divergence from the "
        f"mixture of both models' predictions, over &lambda;: {key}</figcaption>\n"
        f'<svg class="line" role="img" aria-label="divergence over lambda" viewBox="0 0 {left + wide + 20} '
        f'{top + high + 28}">{"".join(drawn)}</svg></figure>\n'
    )


def _matched(name: str, anchor: str, signature: Signature, pair: AlignedPair) -> str:
    """Return the section on one model: its distance to the anchor, and the heads and neurons that were matched."""
    before, after, moved = pair.before, pair.after, bool(pair.alignment.elements)
    told = f"Distance {before.distance:.4g}" + (f" before matching, {after.distance:.4g} after it." if moved else ".")
    key = '<span class="before">&#9632;</span> before ' + ('<span class="after">&#9632;</span> after' if moved else "")
    bars = _bars(before.layers, after.layers if moved else {})
    figure = f"<figure><figcaption>Distance by layer: {key}</figcaption>\n{bars}</figure>\n"
    return (
        f"<h2>{escape(name)} and {escape(anchor)}</h2>\n<p>{told}{_stream(signature, pair)}</p>\n"
        + (figure if before.layers else "")
        + (_moves(signature, pair) if moved else "<p>Its heads and neurons stay where they are.</p>\n")
    )


def _bars(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return two bars for every layer: its distance before matching, and below it the one after."""
    most = max([*before.values(), *after.values()], default=0.0) or 1.0
    drawn = []
    for row, layer in enumerate(before):
        drawn.append(f'<text x="0" y="{ROW * row + BAR + 4}">{escape(layer)}</text>')
        for place, (kind, values) in enumerate((("before", before), ("after", after))):
            if layer in values:
                y, wide = ROW * row + BAR * place, WIDEST * values[layer] / most
                drawn.append(
                    f'<rect class="{kind}" x="{LEFT}%" y="{y}" width="{wide:.2f}%" height="{BAR - 1}" rx="2"/>'
                    f'<text x="{LEFT + wide + 1:.2f}%" y="{y + BAR - 2}">{_number(values[layer])}</text>'
                )
    high = ROW * len(before)
    return (
        f'<svg class="bars" role="img" aria-label="distance by layer" style="height: {high}px">{"".join(drawn)}</svg>'
    )


def _permutations(signature: Signature, pair: AlignedPair, part: str) -> dict[str, Monomial]:
    """Return root space -> its permutation, for the spaces of a part: heads, or neurons (of every expert). A space that
    the alignment leaves alone has the identity."""
    found = {}
    for root in signature.members:
        space = signature.spaces[root]
        if space.part == part and (part == "ffn" or not space.batch) and "permute" in MOVES[signature.kinds[root]]:
            still = torch.arange(space.size).expand(*(signature.sizes[outer] for outer in space.batch), space.size)
            element = pair.alignment.elements.get(root, Monomial(still))
            if isinstance(element, Monomial):
                found[root] = element
    return found


def _changed(element: Monomial) -> str:
    here = torch.arange(element.index.shape[-1])
    return f"{int((element.index.cpu() != here).sum())} of {element.index.numel()}"


def _stream(signature: Signature, pair: AlignedPair) -> str:
    elements = pair.alignment.elements
    streams = [elements[root] for root in elements if signature.spaces[root].part == "stream"]
    if any(isinstance(element, Linear) for element in streams):
        return " The residual stream is rotated."
    moved = [_changed(element) for element in streams if isinstance(element, Monomial)]
    return f" Of the residual stream's dimensions, {'; '.join(moved)} move." if moved else ""


def _moves(signature: Signature, pair: AlignedPair) -> str:
    """Return a row per layer: how many neurons and heads changed places, and which head went where."""
    lines: dict[int | None, list[list[str]]] = {}
    for column, part in enumerate(("ffn", "attention")):
        for root, element in _permutations(signature, pair, part).items():
            line = lines.setdefault(signature.spaces[root].layer, [[], [], []])
            line[column].append(_changed(element))
            if part == "attention":
                line[2].append(" ".join(map(str, element.index.tolist())))
    rows = [
        ("all" if layer is None else layer, *map("; ".join, lines[layer]))
        for layer in sorted(lines, key=lambda layer: -1 if layer is None else layer)
    ]
    heads = ["layer", "neurons moved", "heads moved", "its heads, in the anchor's order"]
    return _table("What was matched to what", heads, rows) if rows else ""
