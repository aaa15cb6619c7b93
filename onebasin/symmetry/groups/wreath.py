# SPDX-License-Identifier: Apache-2.0
"""Permutations of whole heads, each with inner maps of its own: the wreath product of a permutation group."""

from __future__ import annotations

import torch
from torch import Tensor

from .assignment import assignment
from .base import Moments
from .elements import Element, Monomial
from .group import Group
from .permutation import random_index
from .similarity import ScaledOrthogonal

AT_ONCE = 1 << 14  # numbers in the moments of pairs to process at a time; temporaries of this size fit a cache
WreathElement = tuple[Monomial, tuple[Element, ...]]


class Wreath:
    """Permutation of h blocks, each with one element of every inner group: (head qk) and (head vo) together.

    An element (p, g) moves the block x[p(i)] to place i and maps it there: out[i] = g[i] x[p(i)]; the inner elements
    are batched over the *target* blocks.

    nearest is the joint optimum over the permutation and all inner elements. Pairing anchor block i with source block j
    gains value(i, j) = sum over the inner groups of max <g, M(i, j)>, a nuclear norm for the orthogonal group. One
    assignment over these values chooses the pairs, and the inner `nearest` their elements.
    """

    def __init__(self, *inner: Group) -> None:
        self.inner = inner
        self.uses_gram = any(group.uses_gram for group in inner)
        self.name = "wreath(" + ", ".join(group.name for group in inner) + ")"

    def nearest(self, moments: tuple[Moments, ...], outer: Tensor | None = None) -> WreathElement:
        """Return the best element.

        moments: for every inner group, the moments of all pairs, matrices (*batch, h, h, n, n) [anchor, source]. outer:
        the gains of pairs without inner maps, (*batch, h, h), from tensors that only have the blocks' axis.
        """
        gains, *others = [_gain(group, pairs) for group, pairs in zip(self.inner, moments, strict=True)]
        for other in others if outer is None else (*others, outer):
            gains += other
        index = assignment(gains)
        stay = torch.arange(index.shape[-1], device=index.device).expand_as(index)
        best, value = self._inside(index, moments, outer)
        if not all(group.exact_gain for group in self.inner) and not torch.equal(index, stay):
            kept, value_kept = self._inside(stay, moments, outer)  # estimated gains must not increase the distance
            if value_kept < value:
                index, best = stay, kept
        return Monomial(index), best

    def gain(self, element: WreathElement, moments: tuple[Moments, ...], outer: Tensor | None = None) -> float:
        """Return by how much `element` lowers the squared distance."""
        index, inner = element
        places = _places(index.index)
        here, there = (*places, places[-1]), (*places, index.index)
        gained = 0.0
        for pairs, g in zip(moments, inner, strict=True):
            gained += float((pairs.take(here).stay() - pairs.take(there).value(g)).sum())
        if outer is not None:
            gained += 2 * float((outer[there] - outer[here]).sum())
        return gained

    def _inside(
        self, index: Tensor, moments: tuple[Moments, ...], outer: Tensor | None
    ) -> tuple[tuple[Element, ...], Tensor]:
        """Return the inner optimum for these pairs, and its squared distance less the constant |A|^2."""
        there = (*_places(index), index)
        chosen = [pairs.take(there) for pairs in moments]
        inner = tuple(group.nearest(pairs) for group, pairs in zip(self.inner, chosen, strict=True))
        value = torch.stack([pairs.value(g).sum() for pairs, g in zip(chosen, inner, strict=True)]).sum()
        # The source's norm in blocks without inner maps is the same for every pairing.
        return inner, value if outer is None else value - 2 * outer[there].sum()

    def random(self, blocks: int, sizes: tuple[int, ...], generator: torch.Generator) -> WreathElement:
        outer = Monomial(random_index(blocks, (), generator))
        pairs = zip(self.inner, sizes, strict=True)
        return outer, tuple(group.random(n, (blocks,), generator) for group, n in pairs)

    def dimension(self, blocks: int, sizes: tuple[int, ...]) -> int:
        return blocks * sum(group.dimension(n) for group, n in zip(self.inner, sizes, strict=True))


def _places(index: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of every entry, a tensor for each dimension."""
    return torch.meshgrid(*(torch.arange(n, device=index.device) for n in index.shape), indexing="ij")


def _gain(group: Group, pairs: Moments) -> Tensor:
    """Return half of the decrease of the squared distance at the inner optimum of every pair: (h, h).

    A descent for each of h^2 pairs would cost too much: the gains of scaled and invertible maps are estimated by the
    best rotation and the best scale after it, and `nearest` checks that the chosen pairs are better than the present
    ones.
    """
    if not group.exact_gain:
        group = ScaledOrthogonal(joint=False)

    # A few rows at a time: if every neuron is a block, all pairs at once would need many matrices of their size.
    step = max(1, AT_ONCE // max(1, pairs.primal[0].numel()))
    starts = range(0, len(pairs.primal), step)
    return torch.cat([group.gain(pairs.take(slice(start, start + step))) for start in starts])
