# SPDX-License-Identifier: Apache-2.0
"""The structure of axes: their parts, and two axes that are given the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product

from ..atoms import Axis, bind, fix
from ..unification import split


def pieces(axis: Axis) -> Iterator[Axis]:
    """Yield the parts of a product, or of a concatenation, after flattening nested ones."""
    for part in axis.parts:
        if part.top.atom.parts and part.flat == axis.flat:
            yield from pieces(part)
        else:
            yield part


def views(axes: Sequence[Axis]) -> Iterator[list[Axis]]:
    """Yield the combinations of axes in a tensor: concatenated parts of one axis are in different ones."""
    parts = [list(_views_of(axis)) for axis in axes]
    return (list(chain.from_iterable(view)) for view in product(*parts))


def _views_of(axis: Axis) -> Iterator[list[Axis]]:
    if axis.flat:
        yield from views(axis.parts)
    elif axis.cat:
        for part in axis.parts:
            yield from _views_of(part)
    else:
        yield [axis.top]


def moving(axis: Axis) -> Iterator[Axis]:
    """Yield the leaves of an axis, without fixed factors."""
    return (leaf for leaf in axis.leaves if leaf.size > 1 or leaf.moves)


def matched(a: Axis, b: Axis) -> bool | None:
    """Give two axes the same structure: True if they have it, False if one was changed, None if it is impossible."""
    for one, other in ((a, b), (b, a)):
        if not other.top.atom.parts and other.size > 1 and not any(True for _ in moving(one)):  # cut into entries
            one.top.atom.parts, one.top.atom.own = (), frozenset()
            return False
    x, y = ([part for part in pieces(axis) if part.size > 1 or part.moves] for axis in (a, b))
    counts = [sum(part.size == 1 for part in parts) for parts in (x, y)]
    if a.flat and b.flat and counts[0] != counts[1]:  # one has more factors than the other
        for part in (*x, *y):
            if part.size == 1:
                fix(part, "layers differ")
        return False
    if len(x) == 1 or len(y) == 1:  # next to fixed factors
        return matched(x[0] if len(x) == 1 else a, y[0] if len(y) == 1 else b)
    if not x and not y:
        return True if a.size == b.size or not (a.moves or b.moves) else None
    if not x or not y:
        plain, other = (a, b) if not x else (b, a)
        sizes = [part.size for part in (y or x)]
        if plain.size != other.size or plain.top.atom.data or plain.top.atom.parts:
            return None
        if other.flat:
            split(plain, sizes)
        else:
            bind(plain.top, sizes, False)
        return False
    if a.flat != b.flat or len(x) != len(y):
        return None
    results = [matched(p, q) for p, q in zip(x, y, strict=True)]
    return None if None in results else all(results)
