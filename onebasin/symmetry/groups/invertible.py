# SPDX-License-Identifier: Apache-2.0
"""Any invertible map inside a head: the whole symmetry of a bilinear circuit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Linear, Monomial
from .group import Group, Latent, inverse_transposed, monomial_departure, probes, units
from .orthogonal import Orthogonal, random_orthogonal
from .scaling import random_scale
from .similarity import ScaledOrthogonal

TRIAL = 10  # steps after which the two descents are compared


class Invertible(Group):
    """GL(n): writers take g, readers h = g^-T. nearest descends from the optimum of `ScaledOrthogonal`.

    With G_p, G_d the Gram matrices of the source and P, D the cross-moments, the squared distance is
        f(g) = tr(g G_p g^T) - 2 <g, P> + tr(h G_d h^T) - 2 <h, D>.
    Move by g -> (1 + X) g. Then h -> (1 + X)^-T h = (1 - X^T + ...) h, and with everything transformed to the
    current point (G_p' = g G_p g^T, P' = P g^T, G_d' = h G_d h^T, D' = D h^T), the gradient at X = 0 is
        2 F,   F = (G_p' - P') - (G_d' - D')^T,
    and the Gauss-Newton model  2 <F, X> + |X G_p'^1/2|^2 + |G_d'^1/2 X|^2  is least where
        X G_p' + G_d' X = -F,
    a Sylvester equation with positive semidefinite coefficients, solved in their two eigenbases. X is a direction of
    descent; the step is halved until f satisfies Armijo's rule, so the result is never above the start. The sign of the
    determinant does not change, so a second descent starts from the best reflection of the start, and the lower of the
    two after a few steps continues.

    Directions of X in which writers and readers are zero, to the rounding of the moments, are left out: there the map
    remains an isometry with a scale, as in the start.

    condition: steps are refused if |g| |g^-1| / n (Frobenius) of g and all maps before it (`Moments.so_far`) would
    exceed this, since a copy in float32 loses as many digits: 1e3 roundings are 6e-5. tolerance: stop when a step
    predicts a decrease of less than this part of |g S|^2 + |h S|^2. limit: most steps. Computed in float64, all heads
    at once.
    """

    name = "invertible"
    moves = frozenset({"shear"})
    uses_gram = True
    exact_gain = False

    def __init__(self, condition: float = 1e3, tolerance: float = 1e-10, limit: int = 30) -> None:
        self.condition, self.tolerance, self.limit = condition, tolerance, limit

    def nearest(self, moments: Moments) -> Linear:
        """Return the best map. Raises ValueError for moments without Gram matrices."""
        if moments.primal_gram is None or moments.dual_gram is None:
            raise ValueError("an invertible map needs the Gram matrices of the source among its moments")
        shape = moments.primal.shape
        flat = moments.map(lambda statistic: statistic.double().reshape(-1, *statistic.shape[len(shape) - 2 :]))
        if flat.so_far is None:
            flat = replace(flat, so_far=torch.eye(shape[-1]).to(flat.primal).expand_as(flat.primal))
        start, rounding = ScaledOrthogonal().nearest(flat), shape[-1] * torch.finfo(moments.primal.dtype).eps
        assert start.dual is not None
        flip = _reflection(start.matrix.mT @ flat.primal + start.dual.mT @ flat.dual)
        trial = min(TRIAL, self.limit)
        here = self._descend(start.matrix, start.dual, flat, rounding, trial)
        there = self._descend(start.matrix @ flip, start.dual @ flip, flat, rounding, trial)
        ahead = flat.value(Linear(*there)) < flat.value(Linear(*here))
        g, h = (_where(ahead, *pair) for pair in zip(there, here, strict=True))
        g, h = self._descend(g, h, flat, rounding, self.limit - trial)
        return Linear(g.reshape(shape).to(moments.primal), h.reshape(shape).to(moments.primal))

    def _descend(self, g: Tensor, h: Tensor, moments: Moments, rounding: float, limit: int) -> tuple[Tensor, Tensor]:
        """Take at most `limit` steps from g, h, (N, n, n) each, until all heads have converged. rounding: of the
        moments."""
        g, h = g.clone(), h.clone()
        live = torch.arange(len(g), device=g.device)
        for _ in range(limit):
            if not len(live):
                break
            g[live], h[live], going = self._step(g[live], h[live], moments.take(live), rounding)
            live = live[going]
        return g, h

    def _step(self, g: Tensor, h: Tensor, moments: Moments, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step for all heads; return the new g and h, and which heads have not converged."""
        primal, dual, primal_gram, dual_gram, so_far = (
            moments.primal,
            moments.dual,
            moments.primal_gram,
            moments.dual_gram,
            moments.so_far,
        )
        assert primal_gram is not None and dual_gram is not None and so_far is not None
        so_far_dual = torch.linalg.inv(so_far).mT

        def spread(g: Tensor, h: Tensor) -> Tensor:
            norms: Tensor = torch.linalg.matrix_norm(g @ so_far) * torch.linalg.matrix_norm(h @ so_far_dual)
            return norms / g.shape[-1]

        gram_p, gram_d = g @ primal_gram @ g.mT, h @ dual_gram @ h.mT
        force = (gram_p - primal @ g.mT) - (gram_d - dual @ h.mT).mT
        a, u = torch.linalg.eigh(gram_p)
        b, v = torch.linalg.eigh(gram_d)
        stiff = b.clamp_min(0)[:, :, None] + a.clamp_min(0)[:, None, :]
        some = stiff > rounding * (a[:, -1] + b[:, -1])[:, None, None]
        x = -v @ torch.where(some, (v.mT @ force @ u) / torch.where(some, stiff, 1.0), 0.0) @ u.mT
        slope, now = 2 * (force * x).sum((-2, -1)), moments.value(Linear(g, h))
        size = a.sum(-1) + b.sum(-1)
        todo = slope.abs() > self.tolerance * size
        allowed = now + 8 * torch.finfo(a.dtype).eps * size  # rounding of f must not reject the last step

        eye, length = torch.eye(g.shape[-1]).to(g), torch.ones_like(slope)
        bound = spread(g, h).clamp_min(self.condition)
        pending, moved_g, moved_h = slope < 0, g, h  # the last small step is taken too
        for _ in range(30):
            if not bool(pending.any()):
                break
            move, singular = torch.linalg.inv_ex(eye + length[:, None, None] * x)
            new_g, new_h = g + length[:, None, None] * x @ g, move.mT @ h
            lower = moments.value(Linear(new_g, new_h)) <= allowed + 1e-4 * length * slope
            good = lower & (spread(new_g, new_h) <= bound) & (singular == 0)
            taken = pending & good
            moved_g, moved_h = _where(taken, new_g, moved_g), _where(taken, new_h, moved_h)
            pending = pending & ~good
            length = length / 2
        return moved_g, moved_h, todo & ~pending

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        left, right = (random_orthogonal(size, batch, generator) for _ in range(2))
        spectrum = random_scale((*batch, size), generator)[..., None, :]
        return Linear((left * spectrum) @ right, (left / spectrum) @ right)

    def dimension(self, size: int) -> int:
        return size**2

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        return units((*batch, size, size))

    def project(self, element: Element) -> Element:
        if isinstance(element, Monomial):
            return element
        if element.dual is None:
            return Orthogonal().project(element)
        return Linear(element.matrix.double(), inverse_transposed(element))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        if isinstance(element, Monomial):
            return monomial_departure(element, permute=True, signs=True, scale=True)
        return probes(element, generator)[-1]

    def rigid(self) -> Orthogonal:
        return Orthogonal()

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        return {"shear": like.new_zeros(*batch, size, size)}

    def element(self, latent: Latent, settle: bool = False) -> Linear:
        z = latent["shear"]
        matrix = torch.eye(z.shape[-1]).to(z) + z
        return Linear(matrix, torch.linalg.inv(matrix).mT)


def _reflection(overlap: Tensor) -> Tensor:
    """Return 1 - 2 w w^T for the direction w of least overlap: the cheapest change of the determinant's sign."""
    w = torch.linalg.eigh(overlap + overlap.mT)[1][..., :1]
    flip: Tensor = torch.eye(w.shape[-2]).to(w) - 2 * w @ w.mT
    return flip


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition[:, None, None], a, b)
