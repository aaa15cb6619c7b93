# SPDX-License-Identifier: Apache-2.0
"""Random elements of a signature's groups, what they make of tensors, and how far tensors are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Signature
from onebasin.symmetry.groups.elements import Element

Tensors = dict[str, Tensor]


def random_alignment(
    signature: Signature, groups: Mapping[str, Group], seed: int = 0, *, moving: bool = False
) -> Alignment:
    """A random element of every group, in float64. moving: none of them the identity."""
    generator = torch.Generator().manual_seed(seed)
    elements: dict[str, Element] = {}
    for root, group in groups.items():
        space = signature.spaces[root]
        batch = tuple(signature.sizes[outer] for outer in space.batch)
        elements[root] = group.random(space.size, batch, generator)
        while moving and elements[root].is_identity():
            elements[root] = group.random(space.size, batch, generator)
    return Alignment(elements, {root: signature.spaces[root].batch for root in elements})


def apply(signature: Signature, alignment: Alignment, tensors: Tensors) -> Tensors:
    return {role: alignment.apply(signature, role, tensor) for role, tensor in tensors.items()}


def squared(a: Tensors, b: Tensors) -> float:
    return sum(float((a[role] - b[role]).square().sum()) for role in a)
