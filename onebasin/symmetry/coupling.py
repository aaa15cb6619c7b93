# SPDX-License-Identifier: Apache-2.0
"""Semi-permutations: neurons and attention heads split and mixed with non-negative weights.

A ReLU neuron can be split exactly, relu(x) = relu(a x) + relu((1 - a) x), and its shares moved to several places. So
can a head: with the same attention, its value-output circuit is the sum of its shares. With room for all shares, this
is a symmetry. In a network of the same width, where one place then has shares of several neurons, it is a relaxation of
a permutation: a doubly stochastic matrix. Two heads that attend differently become one that attends in between. So a
coupling is not a group element but has a type of its own, and the resulting model is close to the source but not the
same. The level is that of "Generalized Linear Mode Connectivity for Transformers" (NeurIPS 2025, its second class); the
couplings are those of entropic transport (Cuturi, NeurIPS 2013), annealed to the permutation as the temperature goes to
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .alignment import Alignment, move
from .groups.coupling import Coupling, sinkhorn
from .groups.elements import Element
from .tables.signature import Signature


@dataclass(frozen=True)
class Blend:
    """A coupling of heads, in one space inside them: every share is mapped to the basis of the head that it goes to.

    matrix, dual: (g, h, m, n), for writers and readers of the space. Place i becomes sum_j matrix[i, j] x[j], where
    matrix[i, j] is the weight of source head j times the map that brings it closest to anchor head i.
    """

    matrix: Tensor
    dual: Tensor

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (h, n, k) -> (g, m, k)."""
        return torch.einsum("ijab,jbm->iam", (self.dual if dual else self.matrix).to(x), x)


def blend(coupling: Coupling, element: Element, size: int) -> Blend:
    """Combine a coupling of heads (h, h) with an element for every pair of them, (h, h) of `size` dimensions."""
    weight = coupling.matrix[..., None, None]
    eye = torch.eye(size).to(weight).expand(*coupling.matrix.shape, size, size)
    return Blend(weight * element.act(eye), weight * element.act(eye, dual=True))


def soften(score: Tensor, temperature: float, sweeps: int = 200) -> Coupling:
    """Return argmax over doubly stochastic P of <P, M> + T H(P), by Sinkhorn's iteration in the log domain.

    Args:
        score: M, (*batch, n, n).
        temperature: T > 0, in units of the standard deviation of each matrix's entries. It is reached by halving, each
            time from the last solution, since the iteration is slow for low T.
        sweeps: Of the iteration at every temperature.

    Raises:
        ValueError: The temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: a coupling needs a positive one (a permutation is its limit at 0)"
        )
    spread = score.flatten(-2).std(-1, correction=0)[..., None, None].clamp_min(torch.finfo(score.dtype).tiny)
    halvings = max(0, math.ceil(-math.log2(temperature)))
    log = sinkhorn(score / (temperature * 2**halvings * spread), sweeps)
    for _ in range(halvings):
        log = sinkhorn(2 * log, sweeps)
    return Coupling(log.exp())


@dataclass(frozen=True)
class Softened:
    """An alignment followed by couplings: it rewrites tensors like an alignment, but not exactly."""

    alignment: Alignment
    couplings: Mapping[str, Coupling | Blend]

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """Return the tensor `role`, aligned and then mixed along its coupled axes."""
        return move(signature, self.couplings, role, self.alignment.apply(signature, role, tensor))
