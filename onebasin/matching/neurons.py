# SPDX-License-Identifier: Apache-2.0
"""Which neurons should be averaged: what a pair of them loses, from their activations and from the rows that read them.

A neuron with the activation x writes x c, one with y writes y d. Averaged, they have an activation z, and write
z (c + d) / 2 instead of (x c + y d) / 2. The difference is

    (c + d) / 2 * (z - (x + y) / 2)  -  (x - y) (c - d) / 4,

so neurons that fire alike lose nothing, and of others those with equal rows lose least. z is (x + y) / 2 where the
nonlinearity is linear. For a ReLU of independent normal inputs, E (z - (x + y) / 2)^2 = BENT / 4 * E (x - y)^2, and it
is uncorrelated with x - y. So the expected square of the loss is

    E (x - y)^2 / 16 * (|c - d|^2 + BENT |c + d|^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from onebasin.symmetry import Moments
from onebasin.symmetry.groups import as_moments

BENT = (1 - 2 / math.pi) / (2 - 2 / math.pi)


def losses(cross: Tensor, squares: Sequence[Tensor], anchor: Tensor, source: Tensor) -> Moments:
    """Return moments whose nearest permutation, with signs or without, loses least in the average (above).

    With S = E x^2 + E y^2, p = E x y, T = |c|^2 + |d|^2 and q = c . d, the loss of a pair is, up to a factor,

        (S - 2 p) ((1 + BENT) T - 2 (1 - BENT) q),

    and a sign changes those of p and q.

    Args:
        cross: E x y^T, (neurons, neurons) [anchor, source].
        squares: E x^2 and E y^2, (neurons,) each.
        anchor: Its rows c, (neurons, outputs).
        source: Its rows d in the anchor's stream, (neurons, outputs).
    """
    s = squares[0].unsqueeze(1) + squares[1]
    t = (1 + BENT) * (anchor.square().sum(1).unsqueeze(1) + source.square().sum(1))
    q = 2 * (1 - BENT) * (anchor @ source.mT)
    return replace(as_moments(s * q + 2 * cross * t), diagonal=-(s * t + 2 * cross * q))
