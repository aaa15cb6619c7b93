# SPDX-License-Identifier: Apache-2.0
"""Couplings: what acts like an element but mixes dimensions, a relaxation of a permutation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Coupling:
    """Non-negative matrix, (*batch, m, n): row i says of which of n source neurons place i of m is mixed.

    dual: what the neurons' readers take, (*batch, m, n); None says that it is the same (doubly stochastic matrices).
    """

    matrix: Tensor
    dual: Tensor | None = None

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, k) -> (*batch, m, k)."""
        matrix = self.dual if dual and self.dual is not None else self.matrix
        return matrix.to(x) @ x


def sinkhorn(log: Tensor, sweeps: int = 20) -> Tensor:
    """Return the logarithm of a doubly stochastic matrix: rows and columns of exp(log) scaled in turn. Differentiable.

    log: (*batch, n, n). Columns sum to 1 exactly, rows as far as the sweeps have come.
    """
    for _ in range(sweeps):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return log
