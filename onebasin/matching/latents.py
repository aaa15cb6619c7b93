# SPDX-License-Identifier: Apache-2.0
"""Unconstrained parameters of group elements near the identity, for learning by gradient descent.

Every group defines its parameters (`Group.parametrize`) and their element (`Group.element`):

    orthogonal           expm(A - A^T); in the complement of 1 where ones are fixed; times e^s where scales are allowed
    rotary               e^(s + i phi) per pair
    invertible           1 + Z, with the inverse transpose for readers
    scales of neurons    e^s
    permutations         stay `fixed`, or are learned `straight-through`, or relaxed (`sinkhorn`, only neurons)

Every map but the assignment is smooth, with finite derivatives everywhere: nothing is divided by singular values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Signature
from onebasin.symmetry.alignment import move
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.groups.elements import Acts, Element, Linear, Monomial
from onebasin.symmetry.groups.group import Latent

__all__ = ["Latent", "blend", "finished", "zeros"]


def zeros(
    signature: Signature, groups: Mapping[str, Group], like: Tensor, permutations: str = "fixed"
) -> dict[str, Latent]:
    """Return root space -> the parameters of the identity (of a coupling near it, if neurons are relaxed).

    like: a tensor with their dtype and device. permutations: one of `permutation.ORDERS`.
    """
    found: dict[str, Latent] = {}
    for root, group in groups.items():
        space = signature.spaces[root]
        batch = tuple(signature.spaces[key].size for key in space.batch)
        relaxes = permutations != "sinkhorn" or (space.part == "ffn" and not batch)
        latent = group.parametrize(space.size, batch, like, permutations if relaxes else "fixed")
        if latent:
            found[root] = {name: numbers.requires_grad_() for name, numbers in latent.items()}
    return found


def blend(
    signature: Signature,
    anchor: Mapping[str, Tensor],
    sources: Sequence[Mapping[str, Tensor]],
    elements: Sequence[Mapping[str, Acts]],
    shares: Sequence[float],
) -> dict[str, Tensor]:
    """Return shares[0] A + sum_j shares[j] e_j(B_j), by role, differentiable in the parameters of the elements e_j.

    sources: role -> tensor, B_j. elements: per source, root space -> element. shares: of the anchor, then of each
    source.
    """
    total = {role: shares[0] * tensor for role, tensor in anchor.items()}
    for share, tensors, moving in zip(shares[1:], sources, elements, strict=True):
        for role, tensor in tensors.items():
            total[role] = torch.add(total[role], move(signature, moving, role, tensor), alpha=share)
    return total


@torch.no_grad()
def finished(
    signature: Signature, groups: Mapping[str, Group], start: Alignment, latents: Mapping[str, Latent]
) -> tuple[Alignment, dict[str, Coupling]]:
    """Return the alignment `start` followed by the learned elements, and the couplings of relaxed neurons, to be
    applied after it.

    The elements are computed again in float64, without the rounding of training.
    """
    elements: dict[str, Element] = {}
    couplings: dict[str, Coupling] = {}
    for root, latent in latents.items():
        found = groups[root].element({name: numbers.double() for name, numbers in latent.items()}, settle=True)
        if isinstance(found, Coupling):
            couplings[root] = found
        elif isinstance(found, (Linear, Monomial)):
            elements[root] = found
    factor = Alignment(elements, {root: signature.spaces[root].batch for root in elements})
    batch = {**{root: signature.spaces[root].batch for root in start}, **start.batch}
    whole = factor.after(Alignment({root: element.map(_in_double) for root, element in start.elements.items()}, batch))
    exact = {root: groups[root].project(whole.elements[root]) for root in factor}
    return Alignment({**whole.elements, **exact}, whole.batch), couplings


def _in_double(part: Tensor) -> Tensor:
    return part.double() if part.is_floating_point() else part
