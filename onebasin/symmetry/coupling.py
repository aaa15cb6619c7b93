# SPDX-License-Identifier: Apache-2.0
"""Semi-permutations: neurons split and mixed with non-negative weights.

A ReLU neuron can be split exactly, relu(x) = relu(a x) + relu((1 - a) x), and its shares given to several places. With
room for all shares that is a symmetry; in a network of the same width, where one place then holds shares of several
neurons, it is a relaxation of a permutation: a doubly stochastic matrix. So a coupling is not a group element, the
model that it makes is close to but not the same as the source, and it has a type of its own. The level is that of
"Generalized Linear Mode Connectivity for Transformers" (NeurIPS 2025); the couplings are those of entropic transport
(Cuturi, NeurIPS 2013), annealed to the permutation as the temperature goes to zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .alignment import Alignment, move
from .signature import Signature


@dataclass(frozen=True)
class Coupling:
    """Doubly stochastic matrix, (*batch, n, n): row i says of which source neurons place i is mixed."""

    matrix: Tensor

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (*batch, n, m) -> (*batch, n, m). What reads the neurons is mixed like what writes them."""
        return self.matrix.to(x) @ x


def soften(score: Tensor, temperature: float, sweeps: int = 200) -> Coupling:
    """argmax over doubly stochastic P of <P, M> + T H(P), by Sinkhorn's iteration in the log domain.

    score: M, (*batch, n, n). temperature: T > 0, in units of the standard deviation of each matrix's entries.
    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: a coupling needs a positive one (a permutation is its limit at 0)"
        )
    spread = score.flatten(-2).std(-1, correction=0)[..., None, None].clamp_min(torch.finfo(score.dtype).tiny)
    return Coupling(sinkhorn(score / (temperature * spread), sweeps).exp())


def sinkhorn(log: Tensor, sweeps: int = 20) -> Tensor:
    """The logarithm of a doubly stochastic matrix: rows and columns of exp(log) scaled in turn. Differentiable.

    log: (*batch, n, n). Columns sum to 1 exactly, rows as far as the sweeps have come.
    """
    for _ in range(sweeps):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return log


@dataclass(frozen=True)
class Softened:
    """An alignment, and couplings after it: rewrites tensors like an alignment, but not exactly."""

    alignment: Alignment
    couplings: Mapping[str, Coupling]

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """The tensor `role`, aligned and then mixed along its coupled axes."""
        return move(signature, self.couplings, role, self.alignment.apply(signature, role, tensor))
