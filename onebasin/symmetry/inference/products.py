# SPDX-License-Identifier: Apache-2.0
"""Entrywise products, whose entries may share a factor that another tensor takes back."""

from __future__ import annotations

from ..tables.signature import MOVES
from .atoms import PERMUTE, Atom, Axis, flat, restrict
from .unification import split, unify


def gated(axis: Axis, why: str) -> tuple[Axis, list[Axis]]:
    """Return an axis whose entries are multiplied one by one, as (places, factors). If any factor, or any positive one,
    may act on it, it gets one, `(p s)`, of which another tensor takes the inverse."""
    top = axis.top
    if not top.atom.parts and {"scale", "permute"} <= top.moves:
        atom = top.atom
        places, factor = Axis(Atom(atom.size, PERMUTE)), Axis(Atom(1, top.moves & MOVES["factor"]))
        places.atom.written = factor.atom.written = atom.written
        atom.parts = (places, factor)
        return axis.parts[0], [axis.parts[1]]
    if top.flat:
        *outer, last = axis.parts
        if last.size == 1 and not last.top.atom.parts:
            if len(outer) > 1 and outer[-1].size > 1:
                return flat(outer), [last]
            places, factors = gated(flat(outer), why)
            return places, [*factors, last]
        for part in outer:
            restrict(part, PERMUTE, why)
        places, factors = gated(last, why)
        return flat([*outer, places]), factors
    restrict(axis, PERMUTE, why)
    return axis, []


def product(a: Axis, b: Axis, why: str) -> Axis:
    """Return the axis of an entrywise product."""
    for one, other in ((a, b), (b, a)):  # an axis without structure gets the other's
        if not one.top.atom.parts and other.flat and other.parts[-1].size > 1:
            split(one, [part.size for part in other.parts])
    (places, mine), (same, theirs) = gated(a, why), gated(b, why)
    unify(places, same, why)
    return flat([places, *mine, *theirs])


def square(axis: Axis, why: str) -> Axis:
    """Return the axis of an entrywise square: factors act twice, `(p s s)`."""
    if not axis.top.atom.parts and "scale" not in axis.moves:
        restrict(axis, MOVES["odd"], why)
        return axis
    places, factors = gated(axis, why)
    return flat([places, *factors, *factors])
