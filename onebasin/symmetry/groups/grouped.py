# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: permutations of key and value heads, and of the query heads that share each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .assignment import assignment
from .base import Moments
from .elements import Element, Monomial
from .group import Group
from .similarity import ScaledOrthogonal

GroupedElement = tuple[Monomial, Monomial, tuple[Element, ...]]  # of the groups, their members, the inner spaces
ROUNDS = 20  # of the alternation; it ends by itself after two or three


class GroupedWreath:
    """Permutation of h groups; in each, a permutation of its m members and one element of every inner group, which all
    members share: `(kv group qk)` with `(kv qk')`.

    The inner optimum of a pair of groups, anchor i and source j, is found by alternation: for an order of the members,
    the inner elements have a closed form, and for given elements, the best order is an assignment over the gains of
    pairs of members. Neither step increases the distance. There are three starts: the current order, the elements that
    are best for the shared parts (keys and values), and the gains of each pair of members alone. The best result
    counts.
    """

    def __init__(self, *inner: Group) -> None:
        self.inner = inner
        self.uses_gram = any(group.uses_gram for group in inner)
        self.name = "grouped wreath(" + ", ".join(group.name for group in inner) + ")"

    def nearest(
        self,
        shared: tuple[Moments | None, ...],
        single: tuple[Moments | None, ...],
        members: Tensor | None = None,
        outer: Tensor | None = None,
    ) -> tuple[GroupedElement, float]:
        """Return the best element, and by how much it lowers the squared distance.

        shared, single: for every inner group, the moments of all pairs: of the parts that a group's members share,
        matrices (h, h, n, n), and of the members, matrices (h, h, m, m, n, n) [anchor group, source group, anchor,
        source]. members, outer: the gains of pairs of members (h, h, m, m) and of groups (h, h) without inner maps.
        """
        pairs = _Pairs(shared, single, members, outer)
        judges = tuple(group if group.exact_gain else ScaledOrthogonal(joint=False) for group in self.inner)
        value, order, _ = pairs.settle(judges, pairs.orders(judges))
        index = assignment(-value)
        rows = torch.arange(len(index), device=index.device)
        stay = torch.arange(order.shape[-1], device=index.device).expand(len(index), -1)
        moved = pairs.take(rows, index).settle(self.inner, [order[rows, index]])
        kept = pairs.take(rows, rows).settle(self.inner, [stay])  # estimates must not increase the distance
        if kept[0].sum() <= moved[0].sum():
            index, moved = rows, kept
        value, order, elements = moved
        return (Monomial(index), Monomial(order), elements), float((pairs.take(rows, rows).stay() - value).sum())


class _Pairs:
    """The moments of some pairs of groups, batched over any dimensions."""

    def __init__(
        self,
        shared: tuple[Moments | None, ...],
        single: tuple[Moments | None, ...],
        members: Tensor | None,
        outer: Tensor | None,
    ) -> None:
        self.shared, self.single, self.members, self.outer = shared, single, members, outer
        some = next(each.total[..., 0, 0] for each in single if each is not None) if members is None else members
        self.shape = some.shape  # (*batch, m, m)
        self.nothing = some.new_zeros(some.shape)

    def take(self, rows: Tensor, columns: Tensor) -> _Pairs:
        def at(each: Moments | None) -> Moments | None:
            return None if each is None else each.take((rows, columns))

        members, outer = (None if each is None else each[rows, columns] for each in (self.members, self.outer))
        return _Pairs(tuple(map(at, self.shared)), tuple(map(at, self.single)), members, outer)

    def stay(self) -> Tensor:
        """Return the squared distance of every pair without any map, less its constant."""
        value = -2 * torch.diagonal(self.nothing if self.members is None else self.members, dim1=-2, dim2=-1).sum(-1)
        for shared, single in zip(self.shared, self.single, strict=True):
            if shared is not None:
                value = value + shared.stay()
            if single is not None:
                value = value + torch.diagonal(single.stay(), dim1=-2, dim2=-1).sum(-1)
        return value if self.outer is None else value - 2 * self.outer

    def orders(self, groups: tuple[Group, ...]) -> list[Tensor]:
        """Return the orders to start from, (*batch, m) each."""
        stay = torch.arange(self.shape[-1], device=self.nothing.device).expand(self.shape[:-1])
        known = [(group, each) for group, each in zip(groups, self.shared, strict=True)]
        suited = [None if each is None else group.nearest(each) for group, each in known]
        alone = [None if each is None else group.nearest(each) for group, each in zip(groups, self.single, strict=True)]
        return [stay, assignment(self._gains(suited)), assignment(self._gains(alone))]

    def settle(self, groups: tuple[Group, ...], starts: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Element, ...]]:
        """Return the least squared distance of every pair less its constant, (*batch,), its order and its elements."""
        ends = [self._descend(groups, start) for start in starts]
        values = torch.stack([value for value, _, _ in ends])
        best = values.argmin(0)
        where = best[None, ..., None].expand(1, *self.shape[:-1])
        order = torch.stack([order for _, order, _ in ends]).gather(0, where)[0]
        chosen = self._summed(order)
        elements = tuple(group.nearest(each) for group, each in zip(groups, chosen, strict=True))
        return values.min(0).values, order, elements

    def _descend(self, groups: tuple[Group, ...], order: Tensor) -> tuple[Tensor, Tensor, tuple[Element, ...]]:
        for _ in range(ROUNDS):
            elements = tuple(group.nearest(each) for group, each in zip(groups, self._summed(order), strict=True))
            better = assignment(self._gains(elements))
            if torch.equal(better, order):
                break
            order = better
        chosen = self._summed(order)
        elements = tuple(group.nearest(each) for group, each in zip(groups, chosen, strict=True))
        value = torch.stack([each.value(g) for each, g in zip(chosen, elements, strict=True)]).sum(0)
        if self.members is not None:
            value = value - 2 * self.members.gather(-1, order.unsqueeze(-1)).sum((-2, -1))
        return value if self.outer is None else value - 2 * self.outer, order, elements

    def _summed(self, order: Tensor) -> list[Moments]:
        """Return the moments of every inner group for an order of the members: member i of the anchor with order[i]."""

        def pick(statistic: Tensor) -> Tensor:
            where = order.reshape(*order.shape, *[1] * (statistic.dim() - order.dim()))
            shape = (*order.shape, 1, *statistic.shape[order.dim() + 1 :])
            return statistic.gather(order.dim(), where.expand(shape)).squeeze(order.dim()).sum(order.dim() - 1)

        found = []
        for shared, single in zip(self.shared, self.single, strict=True):
            picked = None if single is None else single.map(pick)
            both = [each for each in (shared, picked) if each is not None]
            found.append(both[0] if len(both) == 1 else both[0] + both[1])
        return found

    def _gains(self, elements: list[Element | None] | tuple[Element, ...]) -> Tensor:
        """Return the gain of every pair of members under given inner elements, (*batch, m, m).

        The source's norm is the same in every order.
        """
        gains = self.nothing if self.members is None else self.members
        for element, each in zip(elements, self.single, strict=True):
            if each is None or element is None:
                continue
            eye = torch.eye(each.primal.shape[-1]).to(each.primal).expand_as(each.primal)
            batch = each.primal.dim() - 2
            for dual, cross in ((False, each.primal), (True, each.dual)):
                apart = element.batch < batch  # one element for all members
                g = element.act(eye[..., 0, 0, :, :] if apart else eye, dual)
                gains = gains + ((g[..., None, None, :, :] if apart else g) * cross).sum((-2, -1))
        return gains
