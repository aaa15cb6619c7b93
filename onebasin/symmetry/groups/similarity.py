# SPDX-License-Identifier: Apache-2.0
"""Rotation and rescaling of a head together: a R with a > 0 and R orthogonal."""

from __future__ import annotations

import torch
from torch import Tensor

from ..maps import Linear
from .base import Moments
from .orthogonal import nuclear, polar, random_orthogonal
from .scaling import best_scale, random_scale, similarity


class ScaledOrthogonal:
    """a R with a > 0 and R orthogonal: rotation and rescaling of a head.

    joint=False: R = polar(primal + dual), then a by the quartic (rotation paper, Eq. 12, after the rotation).
    joint=True: both together, see `joint`; never worse than the former.
    """

    uses_gram = False

    def __init__(self, joint: bool = True) -> None:
        self.joint = joint
        self.name = "orthogonal with scale"

    def nearest(self, moments: Moments) -> Linear:
        if self.joint:
            return similarity(*joint(moments))
        rotation = polar(moments.total)
        return similarity(rotation, _scale(rotation, moments))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return similarity(random_orthogonal(size, batch, generator), random_scale(batch, generator))

    def dimension(self, size: int) -> int:
        return size * (size - 1) // 2 + 1


def joint(moments: Moments, tolerance: float = 1e-10, limit: int = 30) -> tuple[Tensor, Tensor]:
    """Rotation R (*batch, n, n) and scale a (*batch,) of least squared distance.

    For fixed t = log a the best rotation is the polar factor of B = e^t primal + e^-t dual and its value
    |B|_*, which leaves  f(t) = e^2t p + e^-2t d - 2 |B|_*  in one variable. One SVD B = U s V^T gives f and
    both its derivatives: with C = B' and G = U^T C V,
        |B|_*' = tr G,    |B|_*'' = sum s + sum_{i<j} (G_ij - G_ji)^2 / (s_i + s_j).
    Newton steps from the best of four starts: the rotations of primal + dual, of either alone, and of both
    at equal norm, each with its best scale. f need not be unimodal: where primal and dual disagree every
    rotation has its own basin, which is what the starts are for. A step that does not descend gives way to
    the best scale for the rotation at hand, which always does. Computed in float64; stops where a step
    promises less than `tolerance` times p a^2 + d / a^2. Heads without norm keep a = 1.
    """
    dtype, shape = moments.primal.dtype, moments.primal.shape
    n = shape[-1]
    primal, dual = (m.double().reshape(-1, n, n) for m in (moments.primal, moments.dual))
    p, d = (norm.double().sum(-1).reshape(-1) for norm in (moments.primal_norm, moments.dual_norm))

    starts = polar(torch.stack([primal + dual, primal, dual, _unit(primal) + _unit(dual)]))
    scales = _best(starts, primal, dual, p, d)
    a = scales[..., None, None]
    values = scales**2 * p + d / scales**2 - 2 * nuclear(a * primal + dual / a)
    choice = values.argmin(0)
    rows = torch.arange(len(p), device=p.device)
    rotation, scale = starts[choice, rows], scales[choice, rows]

    lowest = torch.full_like(p, torch.inf)
    trial, fallen = scale.log(), torch.zeros_like(p, dtype=torch.bool)
    live = rows[(p > 0) & (d > 0)]
    for _ in range(limit):
        if not len(live):
            break
        t, pl, dl = trial[live], p[live] * torch.exp(2 * trial[live]), d[live] * torch.exp(-2 * trial[live])
        grow, shrink = torch.exp(t)[:, None, None] * primal[live], torch.exp(-t)[:, None, None] * dual[live]
        u, s, vh = torch.linalg.svd(grow + shrink)
        g = u.mT @ (grow - shrink) @ vh.mT
        bend = (g - g.mT) ** 2 / (s[:, :, None] + s[:, None, :]).clamp_min(torch.finfo(s.dtype).tiny)
        value = pl + dl - 2 * s.sum(-1)
        slope = 2 * (pl - dl - torch.diagonal(g, dim1=-2, dim2=-1).sum(-1))
        curve = 4 * (pl + dl) - 2 * s.sum(-1) - bend.sum((-2, -1))

        better = value < lowest[live]
        found = live[better]
        lowest[found], rotation[found] = value[better], (u @ vh)[better]
        scale[found] = _best(rotation[found], primal[found], dual[found], p[found], d[found])
        # Newton where f is convex, else (and after a step that failed) the scale of the best rotation.
        step = -slope / curve
        newton = better & (curve > 0) & (step.abs() < 1)
        trial[live] = torch.where(newton, t + step, scale[live].log())
        promise = (slope * (trial[live] - t)).abs()
        going = torch.where(better, promise > tolerance * (pl + dl), ~fallen[live])
        fallen[live] = ~newton
        live = live[going]
    return rotation.reshape(shape).to(dtype), scale.reshape(shape[:-2]).to(dtype)


def _best(rotation: Tensor, primal: Tensor, dual: Tensor, p: Tensor, d: Tensor) -> Tensor:
    value = _inner(rotation, primal)
    return best_scale(value, _inner(rotation, dual), p.expand_as(value), d.expand_as(value))


def _scale(rotation: Tensor, moments: Moments) -> Tensor:
    return _best(rotation, moments.primal, moments.dual, moments.primal_norm.sum(-1), moments.dual_norm.sum(-1))


def _unit(matrix: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    return matrix / torch.where(norm > 0, norm, 1.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))
