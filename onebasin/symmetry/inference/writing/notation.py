# SPDX-License-Identifier: Apache-2.0
"""Axes as tables write them."""

from __future__ import annotations

from collections.abc import Iterator

from ...tables.axes import Axis as Written
from ...tables.axes import Cat, Flat, Leaf, show
from ...tables.signature import kind_of
from ..atoms import Axis
from ..trace import Normed
from .draft import Draft
from .structures import pieces


def notation(draft: Draft, axis: Axis | None, heading: str) -> Written:
    """Return how a table writes an axis of a tensor in a block, or outside of blocks (no heading)."""
    if axis is None:
        return Leaf("1")
    if axis.top.atom.parts and still(draft, axis):
        return keep(draft, axis.size, heading)
    if axis.flat:
        inner = [part for part in pieces(axis) if part.size > 1 or not still(draft, part)]
        factors = tuple(notation(draft, part, heading) for part in inner)
        return factors[0] if len(factors) == 1 else Flat(factors)
    if axis.cat:
        return Cat(tuple(_side_by_side(draft, axis, heading)))
    if heading and id(axis.top.atom) in draft.ragged:
        return keep(draft, axis.size, heading)
    if not axis.size:  # empty
        return Leaf("0")
    number = draft.of[id(axis.top.atom)]
    place, outer = draft.places[number], number in draft.outer
    if kind_of(place.moves) == "fixed" and place.size == 1 and not outer and not _alone(draft, axis):
        return Leaf(str(place.size))
    return Leaf(place.name, axis.top.dual != draft.turned[id(axis.top.atom)] and not outer)


def _side_by_side(draft: Draft, axis: Axis, heading: str) -> Iterator[Written]:
    """Yield the parts of a concatenation; neighbours that stay are one."""
    staying = 0
    for part in [*pieces(axis), None]:
        if part is not None and still(draft, part) and not _normed(draft, part):
            staying += part.size
            continue
        if staying:
            yield keep(draft, staying, heading)
            staying = 0
        if part is not None:
            written = notation(draft, part, heading)
            yield from written.parts if isinstance(written, Cat) else [written]


def norm_notation(draft: Draft, norm: Normed, heading: str) -> str:
    """Return the line of a norm: its kind, what it reads, and what it writes."""
    source = primal(draft, norm.source, heading)
    kind = f"{norm.kind}1p" if norm.plus else norm.kind
    if draft.free[norm.weight] and norm.target is not None:
        return f"{kind}: {source} -> {primal(draft, norm.target, heading)}"
    return f"{kind}: {source} -> {source}" if draft.is_written(norm) else source


def primal(draft: Draft, axis: Axis, heading: str) -> str:
    """Return an axis as text, without marks of duals."""
    return show((_without_duals(notation(draft, axis, heading)),))


def _without_duals(axis: Written) -> Written:
    if isinstance(axis, Leaf):
        return Leaf(axis.space)
    return type(axis)(tuple(map(_without_duals, axis.parts)))


def still(draft: Draft, axis: Axis) -> bool:
    """Whether all parts of an axis are fixed, and no space has a map for each of their entries."""
    numbers = draft.spaces_on(axis)
    return all(kind_of(draft.places[n].moves) == "fixed" and n not in draft.outer for n in numbers)


def _normed(draft: Draft, axis: Axis) -> bool:
    """Whether a norm reads an axis, so that the table has to name it (queries or keys where nothing moves)."""
    return any(draft.is_written(norm) and norm.source.top.atom is axis.top.atom for norm in draft.trace.norms)


def keep(draft: Draft, size: int, heading: str) -> Leaf:
    """Return a new fixed space."""
    name = f"kept{len(draft.kept) + 1}"
    draft.kept.append((name, bool(heading)))
    draft.sizes[name] = size
    return Leaf(name)


def _alone(draft: Draft, axis: Axis) -> bool:
    return any(axis.top.atom is other.top.atom for one in draft.found for other in one.axes if other is not None)
