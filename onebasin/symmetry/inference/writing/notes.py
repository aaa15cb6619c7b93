# SPDX-License-Identifier: Apache-2.0
"""The notes on a tensor: what the constants of others do to it, and under which names files store it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from ...tables.axes import space_leaves
from ...tables.signature import bias_beside
from ..atoms import Axis
from .draft import Draft, Found
from .notation import notation, still


def notes_on(draft: Draft, one: Found) -> Iterator[str]:
    """Yield the notes of a tensor, except those that its axes imply."""
    if one.tied:
        yield f"tied {draft.bare(one.tied)}"
    if copies := _copies(draft, one):
        yield f"beside {' '.join(draft.bare(copy.name) for copy in copies)}"
    biased = draft.trace.biases.get(one.parameter)
    matrix = next((other for other in draft.found if other.parameter == biased), None) if biased else None
    if matrix is not None and _biases(one, matrix):
        yield f"biases {draft.bare(matrix.name)}"
    if (gain := draft.gains.get(one.parameter)) is not None:
        yield f"scales {' '.join(draft.parsed(other)[2] for other in draft.found if other.parameter in gain.of)}"
    if draft.style.norms and (raised := _raised(draft, one)) is not None:
        yield raised
    if draft.style.sums and one.parameter in draft.trace.softmaxed:
        yield "softmax"
    norm = draft.bias_of.get(one.parameter)
    if draft.style.sums and norm is not None and not draft.free[norm.weight] and _runs_again(draft, norm.weight):
        yield "stays"
    if draft.style.sums and (places := _placed(draft, one)) is not None:
        rows, rest = (" ".join(draft.bare(other.name) for other in some) for some in places)
        yield from ([f"rows {rows}"] if rows else [])
        yield f"into {rest}".rstrip()
    elif draft.style.sums and (home := _summed_with(draft, one)) is not None:
        yield f"into {draft.bare(home.name)}"
    if _padded(draft, one):
        yield "padded"


def _raised(draft: Draft, one: Found) -> str | None:
    """Return the note of a matrix whose rows may have factors that another one in its block compensates."""
    if one.name not in draft.degrees:
        return None
    power, reader = draft.degrees[one.name]
    rest = draft.parsed(reader)[2]
    if reader.joint is not None:
        axis = reader.axes[reader.joint]
        if axis is None or still(draft, axis):
            return None
        written = notation(draft, axis, draft.parsed(one)[0])
        rest = rest.replace("@", next(leaf.space for leaf in space_leaves(written)))
    return f"degree {power} {rest}" if draft.parsed(one)[:2] == draft.parsed(reader)[:2] else None


def _placed(draft: Draft, one: Found) -> tuple[list[Found], list[Found]] | None:
    """Return the tensors that absorb the first rows of a table of positions, and those that absorb the mean of the
    others."""
    once = draft.trace.uses["", one.parameter] == 1 and not one.tied and not draft.parsed(one)[0]
    *first, (_, shared) = draft.trace.placed.get(one.parameter, ((0, ()),))
    vectors = [[other for other in draft.found if other.parameter in names] for names in (
        *(names for _, names in first), shared)]  # fmt: skip
    alone = all([prod(other.shape[:-1]) for other in found] == [length]
                for (length, _), found in zip(first, vectors, strict=False))  # fmt: skip
    return ([each[0] for each in vectors[:-1]], vectors[-1]) if once and alone and any(vectors) else None


def _biases(one: Found, matrix: Found) -> bool:
    """Whether a vector is the bias of a matrix under an unrelated name."""
    alone = sum(n > 1 for n in one.shape) == 1 and not one.tied
    return alone and one.name != bias_beside(matrix.name) and matrix.name.endswith("weight")


def _copies(draft: Draft, one: Found) -> list[Found]:
    """Return the tensors that are tied to this one and that a file may omit without leaving any sign of them: tables
    that are looked up, and heads whose inputs others read as well."""
    return [other for other in draft.found
            if other.tied == one.name and (draft.looked_up(other) or _read_by_others(draft, other))]  # fmt: skip


def _read_by_others(draft: Draft, one: Found) -> bool:
    """Whether other tensors read all spaces that this one reads."""
    read = [leaf.top for axis in one.axes if axis is not None for leaf in axis.leaves
            if leaf.top.dual != draft.turned[id(leaf.top.atom)]]  # fmt: skip

    def others() -> Iterator[Axis]:  # looked through only until one is found: there are thousands
        return (leaf.top for other in draft.found if other.tied != one.tied
                for axis in other.axes if axis is not None for leaf in axis.leaves)  # fmt: skip

    return bool(read) and all(leaf in others() for leaf in read)


def _summed_with(draft: Draft, one: Found) -> Found | None:
    """Return the first of the tables that are summed with this one whenever its rows are looked up."""
    known = draft.trace.rows
    rows = max((each for each in known if one.parameter in each), key=len, default=())
    if len({known[rows], *(known[name,] for name in rows)}) > 1:
        return None
    first = next((other for other in draft.found if other.parameter in rows), one)
    if first is one or one.tied:
        return None
    home = draft.original(first)
    return first if first in _copies(draft, home) else home


def _runs_again(draft: Draft, weight: str) -> bool:
    """Whether an earlier norm runs after this one, because layers run again on its output."""
    order = {norm.weight: place for place, norm in enumerate(draft.trace.norms)}
    source = {norm.weight: norm.source.top for norm in draft.trace.norms}
    taken = [other for other in draft.trace.normed if not other or source[other] == source[weight]]
    return any(one == weight and other and order[other] <= order[one] for one, other in pairwise(taken))


def _padded(draft: Draft, one: Found) -> bool:
    """Whether this is a norm's bias, in channels next to padding with zeros."""
    norm = draft.bias_of.get(one.parameter)
    if norm is None or norm.target is None or len(one.axes) != 1 or draft.parsed(one)[::2] in draft.loose:
        return False
    padded = {place for axis in draft.trace.padded for place in draft.spaces_on(axis)}
    return bool(draft.spaces_on(norm.target) & padded)
