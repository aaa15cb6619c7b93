# SPDX-License-Identifier: Apache-2.0
"""Positive scales, per space or per neuron: writers take a, readers take 1 / a."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .assignment import assignment
from .base import Moments
from .coupling import Coupling
from .elements import Acts, Element, Linear, Monomial
from .group import Latent, Stretched, monomial_departure
from .permutation import Ordered, Permutation, StraightThrough, ordered, random_index

CHUNK = (
    1 << 16
)  # quartics to solve at a time: `ScaledPermutation` has n^2 of them; temporaries of this size fit a cache
CLOSE = 1e-10  # Newton's last step, relative to the root: the next would be about its square
TINY = 1e-30  # least slope, to avoid division by 0, also in float32
LIMIT = 200  # Newton steps; few are needed except near a triple root, or if u + v is large and negative


def best_scale(primal: Tensor, dual: Tensor, primal_norm: Tensor, dual_norm: Tensor) -> Tensor:
    """Return the a > 0 of least  a^2 p - 2 a P + d / a^2 - 2 D / a  (p, d norms; P, D inner products), elementwise.

    Stationary points solve p a^4 - P a^3 + D a - d = 0 (rotation paper, Eq. 12). There is a positive root whenever
    p, d > 0, since the quartic is -d at 0 and grows without bound. The result is the one of least objective, or 1 where
    either norm vanishes. All arguments and the result have the same shape and dtype; the arithmetic is in float64.
    """
    flat = [torch.split(value.reshape(-1), CHUNK) for value in (primal, dual, primal_norm, dual_norm)]
    parts = [_best_scale(*map(Tensor.double, chunk)).to(primal.dtype) for chunk in zip(*flat, strict=True)]
    return torch.cat(parts).reshape(primal.shape)


def _best_scale(primal: Tensor, dual: Tensor, p: Tensor, d: Tensor) -> Tensor:
    """Solve in units of a0 = (d / p)^(1/4), where the quartic is F(x) = x^4 - u x^3 + v x - 1: well scaled for any
    head.

    x -> 1 / x exchanges u and v, so let u >= v. With x = e^t the objective is, up to constants,
    2 cosh 2t - 2 (u + v) cosh t - 2 (u - v) sinh t: no larger at t than at -t, so the minimum has t >= 0. Its slope
    there is -2 cosh t times (u + v) tanh t + (u - v) - 4 sinh t, which starts at u - v >= 0 and either falls
    (u + v <= 0) or is concave: it has at most one more root, the greatest root of F. Since tanh t <= 1, or is dropped
    if u + v < 0, that root is at most b + sqrt(b^2 + 1), b = (max(u + v, 0) + u - v) / 4; and F is convex from it on,
    as F'' > 0 beyond u / 2 and F(u / 2) <= -(u^2 / 4 - 1)^2. Newton's steps from the bound therefore decrease to it.
    """
    alive = (p > 0) & (d > 0)
    p, d = torch.where(alive, p, 1.0), torch.where(alive, d, 1.0)
    a0 = (d / p).sqrt().sqrt()
    first, second = primal / (p * a0), dual * a0 / d
    u, v = torch.maximum(first, second), torch.minimum(first, second)
    b = ((u + v).clamp_min(0) + u - v) / 4
    x = b + torch.sqrt(b * b + 1)
    for _ in range(LIMIT):
        square = x * x
        step = (((x - u) * square + v) * x - 1) / ((4 * x - 3 * u) * square + v).clamp_min(1e-300)
        x = (x - step.clamp_min(0)).clamp_min(1)  # only rounding gives negative steps
        if not bool((step > CLOSE * x).any()):
            break
    return torch.where(alive, torch.where(first < second, 1 / x, x) * a0, 1.0)


def factor_gain(primal: Tensor, dual: Tensor, primal_norm: Tensor, dual_norm: Tensor) -> Tensor:
    """Return (p + d - least of  f^2 p - 2 f P + d / f^2 - 2 D / f  over all f other than 0) / 2, elementwise.

    This is the gain of all pairs of neurons, without the factors themselves. The method is that of `_best_scale`, with
    both signs at once: with the signs of u and v changed such that u + v >= 0, u the larger, the bound on the root is
    u / 2 + sqrt(u^2 / 4 + 1). At the minimum the slope is 0, so an error e of the root costs e^2, or e^3 at a double
    root: Newton stops at a step of eps^(1/3), and the precision of the arguments is enough.
    """
    close = torch.finfo(primal.dtype).eps ** (1 / 3)
    p, d = _once(primal_norm), _once(dual_norm)
    alive = (p > 0) & (d > 0)
    side, other = torch.where(alive, p, 1.0).sqrt(), torch.where(alive, d, 1.0).sqrt()
    size = side * other
    root = size.sqrt()
    first, second = primal * (1 / (side * root)), dual * (1 / (other * root))
    sum_, apart = (first + second).abs_(), (first - second).abs_()
    u, v = (sum_ + apart).div_(2), (sum_ - apart).div_(2)
    x = u / 2
    x = x + (x * x + 1).sqrt_()
    for _ in range(LIMIT):
        square = x * x
        slope = (4 * x - 3 * u).mul_(square).add_(v).clamp_min_(TINY)
        step = (x - u).mul_(square).add_(v).mul_(x).sub_(1).div_(slope).clamp_min_(0)
        x = (x - step).clamp_min_(1)
        if not bool((step > close * x).any()):
            break
    inverse = 1 / x
    gained = (u - x / 2).mul_(x).add_((v - inverse / 2).mul_(inverse)).mul_(size).add_((p + d) / 2)
    return torch.where(alive, gained, (primal + dual).abs())


def _once(tensor: Tensor) -> Tensor:
    """Return the tensor without entries repeated by `expand`; it broadcasts to the same."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def similarity(rotation: Tensor, scale: Tensor) -> Linear:
    """Return a R with its dual R / a: (*batch, n, n), (*batch,)."""
    a = scale[..., None, None].to(rotation)
    return Linear(a * rotation, rotation / a)


def random_scale(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return log-normal positive numbers, float64."""
    return torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)


class ScaledPermutation(Stretched, Ordered):
    """Permutation with one positive scale per neuron: ReLU networks.

    For a pairing (i, j) the best scale solves the quartic of its own entries, so nearest assigns over the
    n x n matrix of their values.
    """

    name = "scaled permutation"
    moves = frozenset({"permute", "scale"})

    def nearest(self, moments: Moments) -> Monomial:
        p, d = (norm[..., None, :].expand_as(moments.primal) for norm in (moments.primal_norm, moments.dual_norm))
        scale = best_scale(moments.primal, moments.dual, p, d)
        value = p * scale**2 - 2 * scale * moments.primal + d / scale**2 - 2 * moments.dual / scale
        index = assignment(-value)
        return Monomial(index, torch.take_along_dim(scale, index.unsqueeze(-1), dim=-1).squeeze(-1))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return Monomial(random_index(size, batch, generator), random_scale((*batch, size), generator))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element, permute=True, scale=True)

    def rigid(self) -> Permutation:
        return Permutation()

    def element(self, latent: Latent, settle: bool = False) -> Acts:
        """Return diag(e^s) P for writers, diag(e^-s) P for readers."""
        scale = latent["stretch"].exp()
        stay = torch.arange(scale.shape[-1], device=scale.device).expand(scale.shape)
        if len(latent) == 1:
            return Monomial(stay, scale)
        order = ordered(Permutation(), latent, settle)
        if isinstance(order, Coupling):
            return Coupling(scale.unsqueeze(-1) * order.matrix, order.matrix / scale.unsqueeze(-1))
        if isinstance(order, StraightThrough):
            return replace(order, scale=scale)
        return Monomial(stay, scale).after(order)
