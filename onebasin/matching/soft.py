# SPDX-License-Identifier: Apache-2.0
"""Soft couplings of neurons and heads after matching: semi-permutations, near the identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from onebasin.symmetry import Group, Signature
from onebasin.symmetry.coupling import Blend, blend, soften
from onebasin.symmetry.groups import Fixed, ScaledOrthogonal
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.tables.axes import nesting

from .moments import cross_moments, outer_moments, pairwise_moments

Read = Callable[[str], tuple[Tensor, Tensor]]  # role -> (anchor, matched source)


def soft_couplings(
    signature: Signature, read: Read, groups: Mapping[str, Group], temperature: float
) -> dict[str, Coupling | Blend]:
    """Return a coupling for every FFN space in `groups`, and a blend for the spaces inside all heads in `groups`.

    Neurons are scored by the cross-moments of their permutation, heads by the gains of pairs with their best inner maps
    (the values of `Wreath.nearest`). Query, key, value and output of a head are mixed with the same weights. Heads with
    tensors of their own (relative biases, normalized queries) are not mixed.

    Args:
        signature: Of the source.
        read: Role -> (anchor, source after matching), so that couplings tend to the identity with the temperature.
        groups: Root space -> the group that acts on it.
        temperature: Of the softened assignment.

    Raises:
        ValueError: As in `soften`.
    """
    found: dict[str, Coupling | Blend] = {}
    for root in groups:
        space = signature.spaces[root]
        if space.part == "ffn" and not space.batch:
            pairs = [(role, *read(role), 1.0) for role in signature.touching[root]]
            found[root] = soften(cross_moments(signature, root, pairs).total, temperature)
        elif space.part == "attention" and not space.batch:
            found |= _heads(signature, read, groups, root, temperature)
    return found


def _heads(
    signature: Signature, read: Read, groups: Mapping[str, Group], root: str, temperature: float
) -> dict[str, Coupling | Blend]:
    """Return blends of all spaces inside the heads `root`; none if whole heads cannot be mixed."""
    around = {
        signature.root[key]
        for role in signature.touching[root]
        for leaf, outer in nesting(signature.tensors[role].axes)
        for key in outer
        if not leaf.constant
    }  # heads, and the groups inside them
    inner = [key for key in signature.members if signature.spaces[key].batch == (root,) and key not in around]
    roles = signature.touching[root]
    if not inner or any(signature.tensors[role].diagonal for role in roles):
        return {}
    pairs = {role: (role, *read(role), 1.0) for role in roles}
    if outer_moments(signature, root, inner, pairs.values()) is not None:
        return {}
    elements, gains = {}, torch.zeros(())
    for key in inner:
        group = groups.get(key, Fixed())
        group = ScaledOrthogonal() if group.uses_gram else group  # a descent for every pair would be too much
        moments = pairwise_moments(signature, root, key, [pairs[role] for role in signature.touching[key]])
        elements[key] = group.nearest(moments)
        length = moments.primal_norm.sum(-1) + moments.dual_norm.sum(-1)
        gains = gains + (length - moments.value(elements[key])) / 2
    coupling = soften(gains, temperature)
    return {key: blend(coupling, element, signature.sizes[key]) for key, element in elements.items()}
