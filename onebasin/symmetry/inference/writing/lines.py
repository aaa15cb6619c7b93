# SPDX-License-Identifier: Apache-2.0
"""The lines of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ...tables.axes import Leaf, show, space_leaves
from .draft import Draft, Found, Line
from .notation import keep, norm_notation, notation, primal
from .notes import notes_on


def lines_of(draft: Draft) -> Iterator[Line]:
    """Yield a line for each tensor, and one for those with the same role in all layers of a block."""
    done: set[tuple[str, str]] = set()
    layers: dict[str, set[int]] = defaultdict(set)
    present: dict[tuple[str, str], int] = defaultdict(int)
    stored: set[tuple[str, str]] = set()
    for one in draft.found:
        heading, layer, rest = draft.parsed(one)
        if not one.tied:
            stored.add((heading, rest))
        if heading:
            layers[heading].add(layer)
            present[heading, rest] += 1
    for order, one in enumerate(draft.found):
        heading, _, rest = draft.parsed(one)
        if (heading, rest) in done or (one.tied and (heading, rest) in stored):  # of some layers, say: not of all
            continue
        done.add((heading, rest))
        notes = " ; ".join(notes_on(draft, one))
        name, axes = _name_and_axes(draft, one)
        outside = bool(draft.prefix) and not one.name.startswith(draft.prefix)
        head = outside or (bool(one.tied) and one.parameter in draft.trace.seen and not draft.looked_up(one))
        if heading and present[heading, rest] < len(layers[heading]):
            name += "??"
        elif (head or one.tied) and (heading, rest) not in draft.loose:
            name += "?"
        yield Line(order, heading, name, axes, notes, head)


def _name_and_axes(draft: Draft, one: Found) -> tuple[str, str]:
    """Return the name of a tensor in its block, and its axes as text."""
    heading, _, rest = draft.parsed(one)
    if (heading, rest) in draft.loose:
        return rest, show(tuple(keep(draft, n, heading) if n > 1 else Leaf("1") for n in one.shape))
    norm, bias = draft.norm_of.get(one.parameter), draft.bias_of.get(one.parameter)
    if len(one.axes) == 1 and norm is not None:
        named = draft.style.norms or norm.kind != "layernorm"
        return rest, norm_notation(draft, norm, heading) if named else primal(draft, norm.source, heading)
    if len(one.axes) == 1 and bias is not None:
        assert bias.target is not None
        return rest, primal(draft, bias.target if draft.free[bias.weight] else bias.source, heading)
    axes = tuple(notation(draft, axis, heading) if axis is not None or n == 1 else keep(draft, n, heading)
                 for axis, n in zip(one.axes, one.shape, strict=True))  # fmt: skip
    if one.joint is not None:
        rest = rest.replace("@", next(leaf.space for leaf in space_leaves(axes[one.joint])))
    return rest, show(axes)
