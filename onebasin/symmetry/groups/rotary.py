# SPDX-License-Identifier: Apache-2.0
"""Maps that commute with rotary position embeddings: one complex number per pair of dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Linear, Monomial
from .group import Group, Latent, inverse_transposed, monomial_departure, probes, relative, units
from .scaling import best_scale, random_scale
from .signs import pairs


class Rotary(Group):
    """RoPE turns every pair of dimensions by its own angle (Su et al., 2021, Eq. 34): as a complex number, the pair
    takes a factor c, which commutes with the turn. Writers take c, readers 1 / conj(c).

    interleaved: which dimensions pair up, see `pairs`. rescale: "none" keeps |c| = 1; "after" solves for the phase and
    then for the modulus; "joint" for both, never worse than the former.

    With z_p, z_d the complex cross-moments of a pair (writers, readers) and p, d its squared norms, the squared
    distance is, up to a constant,
        f(c) = |c|^2 p + d / |c|^2 - 2 Re(conj(c) z_p) - 2 Re(z_d / c)
    At modulus a the best phase is that of a z_p + z_d / a; at a phase u the best modulus solves the quartic of
    `best_scale`. "joint" alternates the two from the phases of z_p + z_d, z_p, z_d and z_p / |z_p| + z_d / |z_d|.
    """

    def __init__(self, interleaved: bool = False, rescale: str = "none") -> None:
        self.interleaved, self.rescale = interleaved, rescale
        self.name = "rotary" if rescale == "none" else "rotary with scale"
        kind = "next" if interleaved else "pair"
        self.moves = frozenset({f"{kind} turn", *(() if rescale == "none" else (f"{kind} scale",))})

    def nearest(self, moments: Moments) -> Linear:
        first, second = pairs(moments.primal.shape[-1], self.interleaved).to(moments.primal.device)

        def summed(cross: Tensor) -> Tensor:
            """sum of a conj(s) over the pair's entries a of the anchor and s of the source."""
            real = cross[..., first, first] + cross[..., second, second]
            return torch.complex(real, cross[..., second, first] - cross[..., first, second])

        z_p, z_d = summed(moments.primal), summed(moments.dual)
        if self.rescale == "none":
            return self._matrix(_unit(z_p + z_d), None)
        p, d = (norm[..., first] + norm[..., second] for norm in (moments.primal_norm, moments.dual_norm))
        if self.rescale == "after":
            phase = _unit(z_p + z_d)
            return self._matrix(phase, _modulus(phase, z_p, z_d, p, d))
        return self._matrix(*_joint(z_p, z_d, p, d))

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
        """(*batch, n / 2) complex numbers as (*batch, n, n) real matrices."""
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
    """z / |z|, and 1 where z is 0."""
    size = z.abs()
    return torch.where(size > 0, z / torch.where(size > 0, size, 1.0), torch.ones_like(z))


def _modulus(phase: Tensor, z_p: Tensor, z_d: Tensor, p: Tensor, d: Tensor) -> Tensor:
    return best_scale((phase.conj() * z_p).real, (phase.conj() * z_d).real, p, d)


def _joint(z_p: Tensor, z_d: Tensor, p: Tensor, d: Tensor, rounds: int = 50) -> tuple[Tensor, Tensor]:
    phase = torch.stack([_unit(z) for z in (z_p + z_d, z_p, z_d, _unit(z_p) + _unit(z_d))])
    z_p, z_d, p, d = (value.expand_as(phase) for value in (z_p, z_d, p, d))
    modulus = _modulus(phase, z_p, z_d, p, d)
    for _ in range(rounds):
        before = modulus
        phase = _unit(modulus * z_p + z_d / modulus)
        modulus = _modulus(phase, z_p, z_d, p, d)
        if torch.allclose(before, modulus, rtol=1e-12, atol=0):
            break
    value = modulus**2 * p + d / modulus**2 - 2 * (phase.conj() * (modulus * z_p + z_d / modulus)).real
    best = value.argmin(0, keepdim=True)
    return torch.take_along_dim(phase, best, 0)[0], torch.take_along_dim(modulus, best, 0)[0]
