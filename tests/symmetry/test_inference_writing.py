# SPDX-License-Identifier: Apache-2.0
"""Axes met in an operation, and tables as text: layers of a block are made alike."""

from __future__ import annotations

import torch

from onebasin.symmetry.inference.atoms import fix, flat, index, joined, new
from onebasin.symmetry.inference.rules import RULES
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.inference.writing.structures import matched
from onebasin.symmetry.tables.signature import MOVES


def test_a_gate_is_made_like_what_stays_in_another_layer() -> None:
    """`[gate | (gate scale)]` in one layer, an axis that stays in another: neither is cut without end."""
    gate, still = new(6, MOVES["permutation"]), new(12)
    fix(still, "no rule")
    gated = joined([gate, flat([gate, new(1, MOVES["factor"])])])
    assert [matched(gated, still) for _ in range(4)][-1] is True
    assert len(list(still.leaves)) <= 4
    assert gate.moves == MOVES["permutation"] and not any(leaf.moves for leaf in still.leaves)


def test_rotations_by_place_leave_pairs_where_places_are_told_apart() -> None:
    time, head = index(5), new(6)
    x, angle = torch.randn(5, 6), torch.randn(5, 3)
    setattr(x, KEY, Label([time, head]))
    trace = Trace(rules=RULES)
    with trace:
        a, b = x[..., ::2], x[..., 1::2]
        turned = torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)
    trace.axes(turned)
    assert head.moves == MOVES["interleaved"] and not time.moves


def test_entries_that_stay_one_by_one_are_made_like_an_axis_that_stays() -> None:
    """Boxes whose four numbers are used one by one after one layer, and as they are after another."""
    boxes, still = joined([new(1) for _ in range(4)]), new(4)
    for axis in (boxes, still):
        fix(axis, "output")
    assert [matched(boxes, still) for _ in range(2)] == [False, True]
    assert len(list(boxes.leaves)) == len(list(still.leaves)) == 1 and not boxes.moves


def test_vectors_side_by_side_keep_their_axis() -> None:
    """Four patches become one vector: the channels of each move alike."""
    channels = new(3)
    patches = torch.randn(12, 3)
    setattr(patches, KEY, Label([None, channels]))
    trace = Trace(rules=RULES)
    with trace:
        merged = patches.view(3, 12)
    still, moving = trace.axes(merged)[1].leaves  # type: ignore[union-attr]
    assert moving is channels and still.size == 4 and not still.moves and channels.moves == MOVES["linear"]


def test_vectors_that_are_torn_apart_stay() -> None:
    """Entries of several patches take turns, or two axes that move are cut where neither ends."""
    for axes, cut in (([None, None, new(3)], (3, 12)), ([None, new(4), new(3)], (3, 8, 3))):
        x = torch.randn(6, axes[1].size if axes[1] else 2, 3)
        setattr(x, KEY, Label(list(axes)))
        trace = Trace(rules=RULES)
        with trace:
            trace.axes(x.transpose(-1, -2).reshape(cut))
        assert not any(axis.moves for axis in axes if axis is not None)
