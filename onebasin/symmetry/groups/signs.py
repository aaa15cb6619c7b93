# SPDX-License-Identifier: Apache-2.0
"""Signs, and factors of either sign, for spaces in which dimensions, or RoPE pairs, cannot be mixed or permuted."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Moments
from .elements import Element, Monomial
from .group import Group, Latent, Stretched, monomial_departure
from .permutation import random_signs, sign_of
from .scaling import best_scale, factor_gain, random_scale


def pairs(size: int, interleaved: bool = False) -> Tensor:
    """Return the two dimensions of every RoPE pair, (2, size / 2): (i, i + size / 2), or (2 i, 2 i + 1) if interleaved.

    Raises ValueError for an odd size.
    """
    if size % 2:
        raise ValueError(f"rotary embeddings rotate pairs of dimensions; {size} dimensions do not form pairs")
    return torch.arange(size).reshape(-1, 2).T if interleaved else torch.arange(size).reshape(2, -1)


def diagonal(scale: Tensor) -> Monomial:
    """Return the element x -> scale * x."""
    return Monomial(torch.arange(scale.shape[-1], device=scale.device).expand(scale.shape), scale)


class PairSigns(Group):
    """One sign per RoPE pair, for both of its dimensions: queries and keys under an RMSNorm with a weight.

    The weights within a pair may differ, so that nothing else commutes with both the norm and the rotation.
    """

    name = "signs of pairs"

    def __init__(self, interleaved: bool = False) -> None:
        self.interleaved = interleaved
        self.moves = frozenset({"next sign" if interleaved else "pair sign"})

    def nearest(self, moments: Moments) -> Monomial:
        overlap = torch.diagonal(moments.total, dim1=-2, dim2=-1)
        places = pairs(overlap.shape[-1], self.interleaved).to(overlap.device)
        return self._spread(sign_of(overlap[..., places].sum(-2)))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return self._spread(random_signs((*batch, size // 2), generator))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        n = element.index.shape[-1] if isinstance(element, Monomial) else 0
        return monomial_departure(element, signs=pairs(n, self.interleaved))

    def _spread(self, signs: Tensor) -> Monomial:
        """(*batch, size / 2) -> the element that gives both dimensions of a pair its sign."""
        places = pairs(2 * signs.shape[-1], self.interleaved).to(signs.device)
        scale = signs.new_empty(*signs.shape[:-1], 2 * signs.shape[-1])
        scale[..., places] = signs.unsqueeze(-2).expand(*signs.shape[:-1], 2, -1)
        return diagonal(scale)


class Signs(Group):
    """One sign per dimension."""

    name = "signs"
    moves = frozenset({"sign"})

    def nearest(self, moments: Moments) -> Monomial:
        return diagonal(sign_of(torch.diagonal(moments.total, dim1=-2, dim2=-1)))

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        return diagonal(random_signs((*batch, size), generator))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element, signs=True)


class Factors(Stretched):
    """One nonzero number per dimension: the ungated half of a gated FFN, with the inverse in the output projection.

    nearest takes the root of a quartic. With factors f and moments P, D of norms p, d the squared distance is
    f^2 p - 2 f P + d / f^2 - 2 D / f. At -sqrt(d / p) / f, it is larger by
    2 (|f| / s + s / |f|) |P s + D / s|, s = (d / p)^(1/4), if f has the sign of P s + D / s: so the best f has it.
    """

    name = "factors"
    moves = frozenset({"sign", "scale"})

    def nearest(self, moments: Moments) -> Monomial:
        primal, dual = (torch.diagonal(m, dim1=-2, dim2=-1) for m in (moments.primal, moments.dual))
        p, d = moments.primal_norm, moments.dual_norm
        tiny = torch.finfo(p.dtype).tiny  # if one side is empty, the other decides
        sign = sign_of(primal * d.clamp_min(tiny).sqrt() + dual * p.clamp_min(tiny).sqrt())
        return diagonal(sign * best_scale(sign * primal, sign * dual, p, d))

    def gain(self, moments: Moments) -> Tensor:
        primal, dual = (torch.diagonal(m, dim1=-2, dim2=-1) for m in (moments.primal, moments.dual))
        return factor_gain(primal, dual, moments.primal_norm, moments.dual_norm).sum(-1)

    def random(self, size: int, batch: tuple[int, ...], generator: torch.Generator) -> Monomial:
        signs = random_signs((*batch, size), generator)
        return diagonal(signs * random_scale((*batch, size), generator))

    def departure(self, element: Element, generator: torch.Generator) -> float:
        return monomial_departure(element, signs=True, scale=True)

    def rigid(self) -> Signs:
        return Signs()

    def element(self, latent: Latent, settle: bool = False) -> Monomial:
        return diagonal(latent["stretch"].exp())
