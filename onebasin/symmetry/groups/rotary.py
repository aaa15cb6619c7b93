# SPDX-License-Identifier: Apache-2.0
"""Maps that commute with rotary position embeddings: one complex number per pair of dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Linear, Monomial
from .group import Group, Latent, inverse_transposed, monomial_departure, probes, relative, units
from .scaling import LIMIT, TINY, best_scale, random_scale
from .signs import pairs

SMALL = 1e-6  # a step in log a of this size is the last, since its square is rounding


class Rotary(Group):
    """RoPE rotates every pair of dimensions by its own angle (Su et al., 2021, Eq. 34): a complex factor c on the pair,
    as a complex number, commutes with the rotation. Writers take c, readers 1 / conj(c).

    interleaved: which dimensions pair up, see `pairs`. rescale: "none" keeps |c| = 1; "after" solves for the phase and
    then for the modulus; "joint" for both, never worse than the former.

    With z_p, z_d the complex cross-moments of a pair (writers, readers) and p, d its squared norms, the squared
    distance is, up to a constant,
        f(c) = |c|^2 p + d / |c|^2 - 2 Re(conj(c) z_p) - 2 Re(z_d / c)
    At modulus a the best phase is that of a z_p + z_d / a, and at a phase u the best modulus solves the quartic of
    `best_scale`. "joint" descends in log a, with the best phase at each a, from the best moduli at the phases of
    z_p + z_d, z_p, z_d and z_p / |z_p| + z_d / |z_d|.
    """

    def __init__(self, interleaved: bool = False, rescale: str = "none") -> None:
        self.interleaved, self.rescale = interleaved, rescale
        self.name = "rotary" if rescale == "none" else "rotary with scale"
        kind = "next" if interleaved else "pair"
        self.moves = frozenset({f"{kind} turn", *(() if rescale == "none" else (f"{kind} scale",))})

    def nearest(self, moments: Moments) -> Linear:
        first, second = pairs(moments.primal.shape[-1], self.interleaved).to(moments.primal.device)

        def summed(cross: Tensor) -> Tensor:
            """Return the sum of a conj(s) over the pair's entries a of the anchor and s of the source."""
            real = cross[..., first, first] + cross[..., second, second]
            return torch.complex(real, cross[..., second, first] - cross[..., first, second])

        z_p, z_d = summed(moments.primal), summed(moments.dual)
        if self.rescale == "none":
            return self._matrix(_unit(z_p + z_d), None)
        p, d = (norm[..., first] + norm[..., second] for norm in (moments.primal_norm, moments.dual_norm))
        if self.rescale == "after":
            phase = _unit(z_p + z_d)
            return self._matrix(phase, _modulus(phase, z_p, z_d, p, d))
        phase, modulus = _joint(z_p, z_d, p, d)
        return self._matrix(phase.to(z_p), modulus.to(p))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Linear:
        angle = 2 * torch.pi * torch.rand(*batch, size // 2, generator=generator, dtype=torch.float64)
        modulus = None if self.rescale == "none" else random_scale(tuple(angle.shape), generator)
        return self._matrix(torch.polar(torch.ones_like(angle), angle), modulus)

    def dimension(self, size: int) -> int:
        return size // 2 if self.rescale == "none" else size

    def algebra(self, size: int, batch: tuple[int, ...]) -> Iterator[Tensor]:
        for unit in units((*batch, size // 2)):
            if self.rescale != "none":
                yield self._dense(torch.complex(unit, torch.zeros_like(unit)))
            yield self._dense(torch.complex(torch.zeros_like(unit), unit))

    def project(self, element: Element) -> Element:
        if isinstance(element, Monomial) or element.dual is None:
            return super().project(element)
        g, h = (self._dense(self._numbers(m)) for m in (element.matrix.double(), inverse_transposed(element)))
        return Linear(g, h)

    def departure(self, element: Element, generator: torch.Generator) -> float:
        if isinstance(element, Monomial):
            signs = pairs(element.index.shape[-1], self.interleaved)
            return monomial_departure(element, signs=signs, scale=self.rescale != "none")
        x, g, _, worst = probes(element, generator)
        worst = max(worst, relative(g @ x, self._dense(self._numbers(g)) @ x))
        return worst if self.rescale != "none" else max(worst, relative(g.mT @ (g @ x), x))

    def rigid(self) -> Rotary:
        return Rotary(self.interleaved)

    def parametrize(self, size: int, batch: tuple[int, ...], like: Tensor, order: str = "fixed") -> dict[str, Tensor]:
        names = ("phase",) if self.rescale == "none" else ("phase", "stretch")
        return {name: like.new_zeros(*batch, size // 2) for name in names}

    def element(self, latent: Latent, settle: bool = False) -> Linear:
        phase, stretch = latent["phase"], latent.get("stretch")
        return self._matrix(torch.complex(phase.cos(), phase.sin()), None if stretch is None else stretch.exp())

    def _matrix(self, phase: Tensor, modulus: Tensor | None) -> Linear:
        """Return (*batch, n / 2) complex numbers as (*batch, n, n) real matrices."""
        if modulus is None:
            return Linear(self._dense(phase))
        return Linear(self._dense(modulus * phase), self._dense(phase / modulus))

    def _numbers(self, matrix: Tensor) -> Tensor:
        """Return the complex numbers nearest to a matrix: (*batch, n, n) -> (*batch, n / 2)."""
        first, second = pairs(matrix.shape[-1], self.interleaved).to(matrix.device)
        real = matrix[..., first, first] + matrix[..., second, second]
        return torch.complex(real / 2, (matrix[..., second, first] - matrix[..., first, second]) / 2)

    def _dense(self, c: Tensor) -> Tensor:
        n = 2 * c.shape[-1]
        first, second = pairs(n, self.interleaved).to(c.device)
        out = c.real.new_zeros(*c.shape[:-1], n, n)
        out[..., first, first] = out[..., second, second] = c.real
        out[..., second, first], out[..., first, second] = c.imag, -c.imag
        return out


def _unit(z: Tensor) -> Tensor:
    """Return z / |z|, and 1 where z is 0."""
    size = z.abs()
    return torch.where(size > 0, z / torch.where(size > 0, size, 1.0), torch.ones_like(z))


def _modulus(phase: Tensor, z_p: Tensor, z_d: Tensor, p: Tensor, d: Tensor) -> Tensor:
    return best_scale((phase.conj() * z_p).real, (phase.conj() * z_d).real, p, d)


def _joint(z_p: Tensor, z_d: Tensor, p: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best phase and modulus of every pair, see `Rotary`: the best result of descents from four phases."""
    z_p, z_d, p, d = z_p.to(torch.complex128), z_d.to(torch.complex128), p.double(), d.double()
    phase = torch.stack([_unit(z) for z in (z_p + z_d, z_p, z_d, _unit(z_p) + _unit(z_d))])
    t = _modulus(phase, *(each.expand_as(phase) for each in (z_p, z_d, p, d))).log()
    t, value = _descended(t, (z_p.abs() ** 2, z_d.abs() ** 2, 2 * (z_p.conj() * z_d).real), p, d)
    t = torch.where((p > 0) & (d > 0), t.gather(0, value.argmin(0, keepdim=True))[0], 0.0)
    modulus = t.exp()
    return _unit(modulus * z_p + z_d / modulus), modulus


def _descended(t: Tensor, squares: tuple[Tensor, Tensor, Tensor], p: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Descend by Newton's method on f(t) = e^2t p + e^-2t d - 2 |e^t z_p + e^-t z_d|, the value of the best phase at
    t = log a. Return t and f(t).

    squares: |z_p|^2, |z_d|^2 and 2 Re(conj(z_p) z_d). A step that does not lower f is halved.
    """
    of_p, of_d, of_both = squares

    def at(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grown, shrunk = (2 * t).exp(), (-2 * t).exp()
        square = (grown * of_p + shrunk * of_d + of_both).clamp_min(0)
        root = square.sqrt()
        safe = torch.where(root > 0, root, 1.0)
        rise, bend = 2 * (grown * of_p - shrunk * of_d), 4 * (grown * of_p + shrunk * of_d)
        value = grown * p + shrunk * d - 2 * root
        slope = 2 * (grown * p - shrunk * d) - rise / safe
        curve = 4 * (grown * p + shrunk * d) - bend / safe + rise * rise / (2 * safe**3)
        return value, slope, curve

    value, slope, curve = at(t)
    step = (-slope / curve.abs().clamp_min(TINY)).clamp(-1, 1)
    for _ in range(LIMIT):
        if not bool((step.abs() > SMALL).any()):
            break
        tried = t + step
        value_there, slope_there, curve_there = at(tried)
        lower = value_there < value
        t, value = torch.where(lower, tried, t), torch.where(lower, value_there, value)
        onward = (-slope_there / curve_there.abs().clamp_min(TINY)).clamp(-1, 1)
        step = torch.where(lower, onward, step / 2)
    return t + torch.where(step.abs() <= SMALL, step, 0.0), value  # a step too small for f to show its decrease
