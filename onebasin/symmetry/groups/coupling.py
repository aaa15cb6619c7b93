# SPDX-License-Identifier: Apache-2.0
"""Couplings, which act like elements but mix dimensions: a relaxation of permutations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Coupling:
    """Non-negative matrix, (*batch, m, n): row i has the weights of n source neurons in place i of m.

    dual: the matrix for the neurons' readers, (*batch, m, n); None if it is the same (doubly stochastic matrices).
    """

    matrix: Tensor
    dual: Tensor | None = None

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, k) -> (*batch, m, k)."""
        return self.of(dual).to(x) @ x

    def of(self, dual: bool) -> Tensor:
        """Return the matrix that acts on writers of the neurons, or on their readers (dual)."""
        return self.dual if dual and self.dual is not None else self.matrix


def sinkhorn(log: Tensor, sweeps: int = 20) -> Tensor:
    """Return the logarithm of a doubly stochastic matrix: rows and columns of exp(log) scaled in turn. Differentiable.

    log: (*batch, n, n). Columns sum to 1 exactly, rows approximately, depending on the sweeps.
    """
    for _ in range(sweeps):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return log
