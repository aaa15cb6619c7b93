# SPDX-License-Identifier: Apache-2.0
"""Axes that meet in an operation become one, and the structure of one becomes that of the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import prod

from ..tables.signature import MOVES
from .atoms import Atom, Axis, bind, data, fix, flat, hold, link, new, restrict
from .selecting import pick


def unify(a: Axis, b: Axis, why: str) -> None:
    """Make two axes one."""
    a, b = (axis.parts[0].top if axis.flat and len(axis.parts) == 1 else axis.top for axis in (a, b))
    if a.atom is b.atom:
        if a.dual != b.dual:
            restrict(a, MOVES["orthogonal"], why)
        return
    if _inside(a.atom, b) or _inside(b.atom, a):
        return _with_part(a, b, why)
    if a.size != b.size:
        return hold((a, b), why)
    if a.atom.evens is not None and b.atom.evens is not None:
        return unify(a.home, b.home, why)
    if a.atom.evens is not None or b.atom.evens is not None:  # one in another order
        return hold((a, b), why)
    if a.atom.parts and b.atom.parts:
        return _match(a, b, why)
    if a.atom.parts:
        a, b = b, a
    link(a, b, why)


def _with_part(a: Axis, b: Axis, why: str) -> None:
    """Unify an axis with another that contains it. Whatever else the other contains is fixed."""
    whole, part = (a, b) if _inside(b.atom, a) else (b, a)
    beside = [one for one in whole.parts if one.top != part]
    hold(beside if whole.flat and all(one.size == 1 for one in beside) else (whole, part), why)


def _inside(atom: Atom, axis: Axis) -> bool:
    return bool(axis.atom.parts) and any(part.top.atom is atom or _inside(atom, part.top) for part in axis.parts)


def _match(a: Axis, b: Axis, why: str) -> None:
    """Unify two structures, refining the coarser one."""
    if a.flat and b.flat:
        alone = [[part for part in axis.parts if part.size == 1] for axis in (a, b)]
        bodies = [flat([part for part in axis.parts if part.size > 1]) for axis in (a, b)]
        if any(alone):  # factors, `(ffn up_scale)`
            for left, right in zip_longest(*alone):
                if left is None or right is None:
                    fix(left or right, why)
                else:
                    unify(left, right, why)
            return unify(bodies[0], bodies[1], why)
        sizes = _refined([part.size for part in a.parts], [part.size for part in b.parts])
        if sizes is not None and len(sizes) > 1:
            for left, right in zip(split(a, sizes), split(b, sizes), strict=True):
                unify(left, right, why)
            return
    elif a.cat and b.cat:
        ends = sorted({end for axis in (a, b) for end in accumulate(part.size for part in axis.parts)})
        for start, end in zip([0, *ends], ends, strict=False):
            left, right = (pick(axis, start, [(end - start, 1)], why) for axis in (a, b))
            if left is None or right is None:
                break
            unify(left[0], right[0], why)
        else:
            return
    else:  # (3 q) and [q | k | v]
        product, side = (a, b) if a.flat else (b, a)
        count = len(side.parts)
        if all(part.size == product.size // count for part in side.parts) and product.size % count == 0:
            outer, inner = split(product, [count, product.size // count])
            if outer.size == count:
                fix(outer, why)
                for part in side.parts:
                    unify(inner, part, why)
                return
    hold((a, b), why)


def _refined(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """Return the common refinement of two factorizations, or None."""
    left, right = [n for n in a if n > 1], [n for n in b if n > 1]
    found = []
    while left and right:
        small = min(left[0], right[0])
        if left[0] % small or right[0] % small:
            return None
        found.append(small)
        for side in (left, right):
            side[0] //= small
            if side[0] == 1:
                side.pop(0)
    return found if not left and not right else None


def split(axis: Axis, sizes: Sequence[int], why: str = "reshape") -> list[Axis]:
    """Return the factors of an axis, row-major, of these sizes, which become its structure if it has none.

    If its structure does not allow this, it is fixed, and so are the factors.
    """
    sizes = list(sizes)
    top = axis.top
    if len(sizes) == 1:
        return [axis]
    if not top.atom.parts:
        if top.atom.data:
            return [data(size) for size in sizes]
        bind(top, sizes, True)
        return list(axis.parts)
    if top.flat:
        found: list[Axis] = []
        parts = list(top.parts)
        for number, size in enumerate(sizes):
            taken: list[Axis] = []
            while prod(part.size for part in taken) < size and parts:
                part = parts.pop(0)
                have = prod(each.size for each in taken)
                if have * part.size > size:
                    if size % have or part.size % (size // have):
                        break
                    cut = size // have
                    part, rest = split(part, [cut, part.size // cut])
                    parts.insert(0, rest)
                taken.append(part)
            if number == len(sizes) - 1:
                taken += parts  # factors of one entry
            if prod(part.size for part in taken) != size:
                break
            found.append(flat(taken) if taken else new(1, frozenset()))
        else:
            return found
    elif sizes[0] and len({part.size for part in top.parts}) == 1 and top.parts[0].size * sizes[0] == top.size:
        # [q | k | v] viewed as (3 q): only if all parts are the same
        for part in top.parts[1:]:
            unify(top.parts[0], part, why)
        return [new(sizes[0], frozenset()), *split(top.parts[0], sizes[1:], why)]
    fix(axis, why)
    return [new(size, frozenset()) for size in sizes]
