# SPDX-License-Identifier: Apache-2.0
"""Positive scales, per space or per neuron: writers take a, readers take 1 / a."""

from __future__ import annotations

import torch
from torch import Tensor

from ..assignment import assignment
from ..maps import Linear, Monomial
from .base import Moments
from .permutation import random_index

CHUNK = 1 << 18  # quartics solved at once: bounds the memory of `ScaledPermutation`, which has n^2 of them


def best_scale(primal: Tensor, dual: Tensor, primal_norm: Tensor, dual_norm: Tensor) -> Tensor:
    """The a > 0 of least  a^2 p - 2 a P + d / a^2 - 2 D / a  (p, d norms; P, D inner products), elementwise.

    Stationary points solve p a^4 - P a^3 + D a - d = 0 (rotation paper, Eq. 12). There is a positive root
    whenever p, d > 0, since the quartic is -d at 0 and grows without bound; the one of least objective is
    taken, and 1 kept where either norm vanishes. All arguments share one shape and dtype, which the result
    has too.
    Solved in float64.
    """
    flat = [torch.split(value.reshape(-1), CHUNK) for value in (primal, dual, primal_norm, dual_norm)]
    parts = [_best_scale(*map(Tensor.double, chunk)).to(primal.dtype) for chunk in zip(*flat, strict=True)]
    return torch.cat(parts).reshape(primal.shape)


def _best_scale(primal: Tensor, dual: Tensor, p: Tensor, d: Tensor) -> Tensor:
    alive = (p > 0) & (d > 0)
    p, d = torch.where(alive, p, 1.0), torch.where(alive, d, 1.0)
    # In units of a0 = (d / p)^(1/4) the quartic is x^4 - u x^3 + v x - 1: well scaled for any head.
    a0 = (d / p) ** 0.25
    u, v = primal / (p * a0), dual / (p * a0**3)
    x = _polish(_positive_roots(u, v), u, v)  # (3, N)
    value = x * (x - 2 * u) + (1 / x - 2 * v) / x
    best = torch.take_along_dim(x, value.argmin(0, keepdim=True), dim=0).squeeze(0)
    return torch.where(alive, _polish(best, u, v) * a0, 1.0)


def _polish(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Newton steps towards a root; one that leaves x > 0 is not taken."""
    for _ in range(3):
        slope = (4 * x - 3 * u) * x**2 + v
        step = (((x - u) * x**2 + v) * x - 1) / torch.where(slope == 0, 1.0, slope)
        x = torch.where(x > step, x - step, x)
    return x


def _positive_roots(u: Tensor, v: Tensor) -> Tensor:
    """Candidates for the positive roots of x^4 - u x^3 + v x - 1, (3, N): Ferrari's factorisation.

    The resolvent cubic y^3 + (4 - u v) y + u^2 - v^2 is depressed already. With any real root y of it, and
    n = sqrt(1 + y^2 / 4), m = -(u y / 2 + v) / (2 n), the quartic is
    (x^2 + (m - u / 2) x + (n + y / 2)) (x^2 - (m + u / 2) x - (n - y / 2)):
    the second factor has exactly one positive root, the first two or none.
    """
    y = _real_root(4 - u * v, u**2 - v**2)
    n = torch.sqrt(1 + y**2 / 4)
    m = -(u * y / 2 + v) / (2 * n)
    # n + y/2 and n - y/2 are inverse to each other; only the larger is free of cancellation.
    larger = n + y.abs() / 2
    outer, inner = torch.where(y > 0, larger, 1 / larger), torch.where(y > 0, 1 / larger, larger)
    half = (m + u / 2) / 2
    reach = torch.sqrt(half**2 + inner)
    single = torch.where(half > 0, half + reach, inner / (reach - half.clamp_max(0)))
    middle = (u / 2 - m) / 2
    large = middle.abs() + torch.sqrt((middle**2 - outer).clamp_min(0))
    return torch.stack([single, large, outer / large.clamp_min(1e-300)]).clamp_min(1e-150)


def _real_root(p: Tensor, q: Tensor) -> Tensor:
    """A real root of y^3 + p y + q: Cardano's where it is the only one, else the largest by Viete's."""
    inner = (q / 2) ** 2 + (p / 3) ** 3
    w = -torch.where(q < 0, -1.0, 1.0) * (q.abs() / 2 + torch.sqrt(inner.clamp_min(0))) ** (1 / 3)
    one = w - p / (3 * torch.where(w == 0, 1.0, w))
    radius = torch.sqrt((-p / 3).clamp_min(1e-300))
    three = 2 * radius * torch.cos(torch.acos((-q / (2 * radius**3)).clamp(-1, 1)) / 3)
    return torch.where(inner >= 0, one, three)


def similarity(rotation: Tensor, scale: Tensor) -> Linear:
    """a R with its dual R / a: (*batch, n, n), (*batch,)."""
    a = scale[..., None, None].to(rotation)
    return Linear(a * rotation, rotation / a)


def random_scale(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-normal positive numbers, float64."""
    return torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)


class Positive:
    """One positive number for a whole space, per batch entry (rescaling of a head). nearest = quartic, Eq.
    12."""

    name = "positive"
    uses_gram = False

    def nearest(self, moments: Moments) -> Linear:
        primal, dual = (torch.diagonal(m, dim1=-2, dim2=-1).sum(-1) for m in (moments.primal, moments.dual))
        scale = best_scale(primal, dual, moments.primal_norm.sum(-1), moments.dual_norm.sum(-1))
        eye = torch.eye(moments.primal.shape[-1]).to(moments.primal)
        return similarity(eye.expand_as(moments.primal), scale)

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        eye = torch.eye(size, dtype=torch.float64)
        return similarity(eye.expand(*batch, size, size), random_scale(batch, generator))

    def dimension(self, size: int) -> int:
        return 1


class ScaledPermutation:
    """Permutation with one positive scale per neuron: ReLU networks.

    For a pairing (i, j) the best scale solves the quartic of its own entries, so nearest assigns over the
    n x n matrix of their values.
    """

    name = "scaled permutation"
    uses_gram = False

    def nearest(self, moments: Moments) -> Monomial:
        p, d = (norm[..., None, :].expand_as(moments.primal) for norm in (moments.primal_norm, moments.dual_norm))
        scale = best_scale(moments.primal, moments.dual, p, d)
        value = p * scale**2 - 2 * scale * moments.primal + d / scale**2 - 2 * moments.dual / scale
        index = assignment(-value)
        return Monomial(index, torch.take_along_dim(scale, index.unsqueeze(-1), dim=-1).squeeze(-1))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return Monomial(random_index(size, batch, generator), random_scale((*batch, size), generator))

    def dimension(self, size: int) -> int:
        return size
