# SPDX-License-Identifier: Apache-2.0
"""Tables as text: layers of a block are made alike."""

from __future__ import annotations

from onebasin.symmetry.inference.atoms import fix, flat, joined, new
from onebasin.symmetry.inference.writing import _alike
from onebasin.symmetry.tables.signature import MOVES


def test_a_gate_is_made_like_what_stays_in_another_layer() -> None:
    """`[gate | (gate scale)]` in one layer, an axis that stays in another: neither is cut without end."""
    gate, still = new(6, MOVES["permutation"]), new(12)
    fix(still, "no rule")
    gated = joined([gate, flat([gate, new(1, MOVES["factor"])])])
    assert [_alike(gated, still) for _ in range(4)][-1] is True
    assert len(list(still.leaves)) <= 4
    assert gate.moves == MOVES["permutation"] and not any(leaf.moves for leaf in still.leaves)
