# SPDX-License-Identifier: Apache-2.0
"""Permutations inside permutations: experts, the neurons inside each, a factor for each neuron.

The best map of an expert depends on which expert it is paired with, and the best order of its neurons on the factors
that pairs of neurons allow. The gain of a pair is the optimum inside it, so an assignment at every level, from the
inside out, finds the joint optimum. Pairs of experts are visited one at a time, so that only one matrix over neurons is
in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.engine import in_order
from onebasin.symmetry import Group, Moments, Signature
from onebasin.symmetry.groups import Wreath
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.elements import Element, Monomial
from onebasin.symmetry.groups.gemm import gemm
from onebasin.symmetry.tables.axes import blocks, space_leaves

from .moments import Pair


@dataclass(frozen=True)
class _Term:
    """A block of a tensor: anchor and source, with a dimension for each of the first `depth` spaces of the rest of the
    chain, and one for everything else."""

    anchor: Tensor
    source: Tensor
    depth: int
    dual: bool  # whether it reads the innermost of them
    weight: float

    def at(self, i: int, j: int) -> _Term:
        """Return entry i of the anchor with entry j of the source."""
        return replace(self, anchor=self.anchor[i], source=self.source[j], depth=self.depth - 1)


def chains(signature: Signature, groups: Mapping[str, Group]) -> dict[str, tuple[str, ...]]:
    """Return outermost space -> a chain of spaces, each inside the one before, of which the first two (at least) and
    all but the last are permuted: experts with their neurons, not neurons with a factor each, nor heads."""
    inside: dict[str, list[str]] = {}
    outermost = []
    for root in groups:
        outer = [space for space in signature.spaces[root].batch if space in groups]
        inside.setdefault(outer[-1], []).append(root) if outer else outermost.append(root)
    found = {}
    for root in outermost:
        chain = [root]
        while len(within := inside.get(chain[-1], [])) == 1:
            chain.append(within[0])
        permuted = [groups[space].plain for space in chain]
        fits = len(chain) > 1 and all(permuted[:-1]) and all(permuted[:2]) and not inside.get(chain[-1])
        fits = fits and not signature.spaces[root].batch  # fixed spaces
        single = signature.sizes[chain[-1]] == 1 or permuted[-1]
        if fits and single and not any(twice(signature, role, chain) for role in signature.touching[root]):
            found[root] = tuple(chain)
    return found


def twice(signature: Signature, role: str, roots: Sequence[str]) -> bool:
    """Whether a tensor has one of some spaces on two axes, as a recurrence has its neurons."""
    axes = [{signature.root[leaf.space] for leaf in space_leaves(axis)}
            for axis in signature.tensors[role].axes]  # fmt: skip
    return any(sum(root in axis for axis in axes) > 1 for root in roots)


def nearest_nested(
    signature: Signature,
    chain: Sequence[str],
    groups: Mapping[str, Group],
    pairs: Iterable[Pair],
    workers: int | None = None,
) -> tuple[dict[str, Element], float]:
    """Return the best elements of all spaces of a chain together, and by how much they lower the squared distance.

    chain: one of `chains`. pairs: (anchor, source) tensors.
    """
    terms = [term for pair in pairs for term in _terms(signature, chain, pair)]
    elements, value = _solve([groups[space] for space in chain], terms, workers)
    factors = 0 if groups[chain[-1]].plain else len(chain)
    return dict(zip(chain, elements, strict=True)), _stay(terms, factors) - value


def _terms(signature: Signature, chain: Sequence[str], pair: Pair) -> Iterable[_Term]:
    role, anchor, source, weight = pair
    axes = signature.tensors[role].axes
    cut = zip(blocks(anchor, axes, signature.sizes), blocks(source, axes, signature.sizes), strict=True)
    for (a, found), (s, _) in cut:
        roots = [signature.root.get(leaf.space, "") for leaf in found]
        there = [roots.index(space) for space in chain if space in roots]
        if there:
            rest = [dim for dim in range(a.dim()) if dim not in there]
            shape = [a.shape[dim] for dim in there]
            a, s = (x.permute(*there, *rest).reshape(*shape, -1) for x in (a, s))
            yield _Term(a, s, len(there), found[there[-1]].dual, weight)


def _solve(groups: Sequence[Group], terms: list[_Term], workers: int | None) -> tuple[tuple[Monomial, ...], float]:
    """Return the elements, and their squared distance less the constant |A|^2."""
    here = [term for term in terms if term.depth == 1]
    deeper = [term for term in terms if term.depth > 1]
    if len(groups) == 1 or (len(groups) == 2 and not groups[1].plain):
        return _innermost(groups, here, deeper)
    size = len(terms[0].anchor)

    def inside(i: int, j: int) -> tuple[tuple[Monomial, ...], float]:
        return _solve(groups[1:], [term.at(i, j) for term in deeper], 1)

    def row(i: int) -> Tensor:
        return torch.tensor([inside(i, j)[1] for j in range(size)], dtype=torch.float64)

    values = torch.stack([*in_order(row, range(size), workers)]).to(terms[0].anchor.device)
    values = values - 2 * _cross(here).to(values) if here else values
    index = assignment(-values)
    found = [inside(i, j)[0] for i, j in enumerate(index.tolist())]
    stacked = (_stack(level) for level in zip(*found, strict=True))
    return (Monomial(index), *stacked), float(values.gather(1, index.unsqueeze(1)).sum())


def _innermost(groups: Sequence[Group], here: list[_Term], deeper: list[_Term]) -> tuple[tuple[Monomial, ...], float]:
    """Solve for neurons, with or without a factor for each, by one assignment."""
    rest = _cross(here) if here else None
    if len(groups) == 1:
        assert rest is not None
        index = assignment(rest)
        return (Monomial(index),), -2 * float(rest.gather(1, index.unsqueeze(1)).sum())
    size = len(deeper[0].source)
    crosses, norms = [], []
    for side in ([term for term in deeper if term.dual is dual] for dual in (False, True)):
        norm = sum((t.weight * t.source.flatten(1).square().sum(-1) for t in side), deeper[0].source.new_zeros(size))
        crosses.append((_cross(side) if side else norm.new_zeros(size, size))[..., None, None])
        norms.append(norm.expand(size, size)[..., None])  # of [anchor, source, the one factor]
    moments = Moments(crosses[0], crosses[1], norms[0], norms[1])
    order, (factor,) = Wreath(groups[1]).nearest((moments,), rest)
    assert isinstance(factor, Monomial)
    rows = torch.arange(size, device=order.index.device)
    value = float(moments.take((rows, order.index)).value(factor).sum())
    return (order, factor), value - (0.0 if rest is None else 2 * float(rest[rows, order.index].sum()))


def _cross(terms: list[_Term]) -> Tensor:
    """Return the sum of A S^T over the first dimension of anchor and source."""
    return sum(term.weight * gemm(term.anchor.flatten(1), term.source.flatten(1)) for term in terms)  # type: ignore[return-value]


def _stack(level: Sequence[Monomial]) -> Monomial:
    scales = [each.scale for each in level]
    kept = [scale for scale in scales if scale is not None]
    return Monomial(torch.stack([each.index for each in level]), torch.stack(kept) if kept else None)


def _stay(terms: list[_Term], factors: int) -> float:
    """Return the value if nothing moves. As in `_innermost`, the source's norm counts where a factor (of the space at
    depth `factors`) could change it."""
    value = 0.0
    for term in terms:
        value -= 2 * term.weight * float((term.anchor * term.source).sum())
        value += term.weight * float(term.source.square().sum()) if term.depth == factors else 0.0
    return value
