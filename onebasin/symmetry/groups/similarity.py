# SPDX-License-Identifier: Apache-2.0
"""Rotation and rescaling of a head together: a R with a > 0 and R orthogonal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Linear, Monomial
from .group import Latent, monomial_departure, probes, relative, units
from .orthogonal import Orthogonal, Turning, random_orthogonal, turned
from .procrustes import polar, sharpened
from .scaling import best_scale, random_scale, similarity


class ScaledOrthogonal(Turning):
    """a R with a > 0 and R orthogonal: rotation and rescaling of a head.

    joint=False: R = polar(primal + dual), then a by the quartic (rotation paper, Eq. 12, after the rotation).
    joint=True: both together, see `joint`; never worse than the former.
    """

    name = "orthogonal with scale"
    moves = frozenset({"rotate", "scale"})
    exact_gain = False

    def __init__(self, joint: bool = True) -> None:
        self.joint = joint

    def nearest(self, moments: Moments) -> Linear:
        if self.joint:
            return similarity(*joint(moments))
        rotation = polar(moments.total)
        along, across = _inner(rotation, moments.primal), _inner(rotation, moments.dual)
        p, d = (norm.double().sum(-1) for norm in (moments.primal_norm, moments.dual_norm))
        return similarity(rotation, best_scale(along, across, p, d))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        return similarity(random_orthogonal(size, batch, generator), random_scale(batch, generator))

    def dimension(self, size: int) -> int:
        return super().dimension(size) + 1

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        yield from super().algebra(size, batch)
        yield from (unit[..., None, None] * self.basis(size) for unit in units(batch))

    def project(self, element: Element) -> Element:
        if isinstance(element, Monomial):
            return element
        matrix, dual = element.matrix.double(), element.of(True).double()
        if element.dual is None:
            return Linear(sharpened(matrix))
        scale = _size_of(matrix, dual)
        rotation = sharpened((matrix / scale + dual * scale) / 2)
        return Linear(scale * rotation, rotation / scale)

    def departure(self, element: Element, generator: torch.Generator) -> float:
        if isinstance(element, Monomial):
            return monomial_departure(element, permute=True, signs=True)
        x, g, h, worst = probes(element, generator)
        rotation = g / _size_of(g, h)
        return max(worst, relative(rotation.mT @ (rotation @ x), x))

    def rigid(self) -> Orthogonal:
        return Orthogonal()

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        return {**super().parametrize(size, batch, like), "stretch": like.new_zeros(batch)}

    def element(self, latent: Latent, settle: bool = False) -> Linear:
        turn, scale = turned(latent["turn"]), latent["stretch"].exp()[..., None, None]
        return Linear(scale * turn, turn / scale)


def _size_of(matrix: Tensor, dual: Tensor) -> Tensor:
    """Return a of a R from it and its dual R / a: (*batch, 1, 1)."""
    size: Tensor = (torch.linalg.matrix_norm(matrix) / torch.linalg.matrix_norm(dual)).sqrt()
    return size[..., None, None]


def joint(moments: Moments, tolerance: float = 1e-10, limit: int = 30) -> tuple[Tensor, Tensor]:
    """Return the rotation R (*batch, n, n) and the scale a (*batch,) of least squared distance.

    For fixed t = log a the best rotation is the polar factor R of B = e^t primal + e^-t dual, which leaves
        f(t) = e^2t p + e^-2t d - 2 |B|_*,    f'(t) = 2 (e^2t p - e^-2t d - <R, B'>)
    in one variable. Every R has its own best scale (`best_scale`), and moving there never increases f: this is the
    first step from R = polar(primal + dual), whose best scale is the result of rescaling after the rotation. From then
    on, the secant through the last two slopes is faster, and is used where f is convex along it; a step that does not
    descend is replaced by the best scale of the best rotation. The descent stops when a step predicts a decrease of
    less than `tolerance` times p a^2 + d / a^2. Heads of norm zero keep a = 1.

    f need not be unimodal: if primal and dual disagree, every rotation has its own basin. Heads in `_open` descend from
    four rotations, those of primal + dual, of either alone, and of both at equal norm; the lowest after a step
    continues.
    """
    shape = moments.primal.shape
    n = shape[-1]
    primal, dual = (m.reshape(-1, n, n) for m in (moments.primal, moments.dual))
    p, d = (norm.double().sum(-1).reshape(-1) for norm in (moments.primal_norm, moments.dual_norm))

    rotation = _rotation(primal + dual)
    along, across = _inner(rotation, primal), _inner(rotation, dual)
    scale, lowest = _best(along, across, p, d)
    at, slope = torch.zeros_like(p), _slope(torch.zeros_like(p), along, across, p, d)
    many = torch.nonzero(_open(lowest, scale, primal, dual, p, d)).squeeze(1)
    if len(many):
        one, other = primal[many], dual[many]
        for start in (rotation[many], *map(_rotation, (one, other, _unit(one) + _unit(other)))):
            own, _ = _best(_inner(start, one), _inner(start, other), p[many], d[many])
            a = own[:, None, None].to(primal)
            start = _rotation(a * one + other / a)
            own, value = _best(_inner(start, one), _inner(start, other), p[many], d[many])
            lower = value < lowest[many]
            rows = many[lower]
            rotation[rows], scale[rows], lowest[rows] = start[lower], own[lower], value[lower]
            slope[rows] = torch.nan  # the known slope belongs to another basin

    trial, fallen = scale.log(), torch.zeros_like(p, dtype=torch.bool)
    live = torch.nonzero((p > 0) & (d > 0)).squeeze(1)
    for _ in range(limit):
        if not len(live):
            break
        t, one, other, weights = trial[live], primal[live], dual[live], (p[live], d[live])
        a = t.exp()[:, None, None].to(primal)
        found = _rotation(a * one + other / a)
        along, across = _inner(found, one), _inner(found, other)
        own, value = _best(along, across, *weights)
        lower = value < lowest[live]
        rows = live[lower]
        rotation[rows], scale[rows], lowest[rows] = found[lower], own[lower], value[lower]

        now = _slope(t, along, across, *weights)
        rise, run = now - slope[live], t - at[live]
        step = -now * run / rise
        secant = lower & (rise * run > 0) & (step.abs() < 1)
        trial[live] = torch.where(secant, t + step, scale[live].log())
        promise = (now * (trial[live] - t)).abs()
        size = weights[0] * torch.exp(2 * t) + weights[1] * torch.exp(-2 * t)
        going = torch.where(lower, promise > tolerance * size, ~fallen[live])
        slope[live], at[live], fallen[live] = now, t, ~secant
        live = live[going]
    return rotation.reshape(shape).to(primal), scale.reshape(shape[:-2]).to(primal)


def _rotation(matrix: Tensor) -> Tensor:
    """Return the polar factor in float64: a rounding of 1e-6 in |R S| may hide the gain of a better scale."""
    factor = polar(matrix)
    return factor if factor.dtype == torch.float64 else sharpened(factor)


def _best(along: Tensor, across: Tensor, p: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best scale of a rotation R with <R, primal> and <R, dual>, and its squared distance less |A|^2."""
    scale = best_scale(along, across, p, d)
    return scale, scale * (scale * p - 2 * along) + (d / scale - 2 * across) / scale


def _slope(t: Tensor, along: Tensor, across: Tensor, p: Tensor, d: Tensor) -> Tensor:
    """Return f'(t) for the best rotation R at t."""
    a = t.exp()
    return 2 * (a * (a * p - along) - (d / a - across) / a)


def _open(lowest: Tensor, scale: Tensor, primal: Tensor, dual: Tensor, p: Tensor, d: Tensor) -> Tensor:
    """Return the heads whose optimum may be more than a factor of 2 from the scale found: (N,) of bool.

    |B|_* <= sqrt(n) (e^t |primal| + e^-t |dual|) bounds f from below; scales with a bound above the value found are
    ruled out. Heads of few dimensions are always open, since each of their directions has much influence.
    """
    n = primal.shape[-1]
    if n < 16:
        return torch.ones_like(p, dtype=torch.bool)
    c, e = (n**0.5 * torch.linalg.matrix_norm(m).double() for m in (primal, dual))
    t = torch.linspace(-4, 4, 161, dtype=p.dtype, device=p.device)[:, None]
    a = scale * t.exp()
    bound = a * (a * p - 2 * c) + (d / a - 2 * e) / a
    undecided: Tensor = (bound <= lowest) & (t.abs() > 0.69)
    return undecided.any(0)


def _unit(matrix: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    return matrix / torch.where(norm > 0, norm, 1.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum((-2, -1))
