# SPDX-License-Identifier: Apache-2.0
"""Batches: spaces with a map for each entry of others."""

from __future__ import annotations

from collections import Counter
from itertools import product

from ...tables.signature import kind_of
from ..atoms import LINEAR, PERMUTE
from .draft import Draft
from .structures import views


def find_batches(draft: Draft) -> None:
    """Set the spaces for each entry of which others have a map, outermost first."""
    of = draft.of
    beside: dict[int, set[int]] = {}
    occurrences = [*draft.trace.occurrences, *(draft.axes(one) for one in draft.found)]
    different = {tuple(id(axis.top.atom) for axis in axes): axes for axes in occurrences}
    for occurrence in different.values():
        for view in views(occurrence):
            here = {of[id(leaf.top.atom)] for leaf in view if id(leaf.top.atom) in of}
            for place in here:
                beside[place] = beside.get(place, here) & here
    apart: set[tuple[int, int]] = set()
    for kept, gone in draft.trace.apart:
        apart |= {pair for a in kept for b in gone for pair in product(draft.spaces_on(a), draft.spaces_on(b))}
    before: dict[tuple[int, int], bool] = {}
    parts = ((one, *part) for one in draft.found
             for part in enumerate(leaf for axis in draft.axes(one) for leaf in axis.leaves))  # fmt: skip
    rows = {(place, number, *draft.parsed(one)[::2]) for one, number, leaf in parts for place in draft.spaces_on(leaf)}
    having = Counter(place for place, *_ in rows)  # how many parts of tensors are of it, with all layers as one
    for one in draft.found:
        for view in views([axis for axis in one.axes if axis is not None]):
            first: dict[int, int] = {}
            for number, leaf in enumerate(view):
                first.setdefault(of[id(leaf.top.atom)], number)
            for a in first:
                for b in first:
                    before[a, b] = before.get((a, b), True) and first[a] < first[b]
    for number, space in enumerate(draft.places):
        if kind_of(space.moves) == "fixed" or (having[number] == 1 and space.moves == LINEAR):
            continue  # what stands only once is free, and says nothing of what stands beside it
        found = []
        for outer in beside.get(number, ()):
            other = draft.places[outer]
            if outer == number or (number, outer) in apart or not other.moves <= PERMUTE or other.size == 1:
                continue
            if (space.heading == "" and other.heading) or not before.get((outer, number), False):
                continue
            found.append(outer)
        space.per = sorted(found, key=lambda p: sum(before.get((q, p), False) for q in found))
    draft.outer = {outer for place in draft.places for outer in place.per}
