# SPDX-License-Identifier: Apache-2.0
"""Random elements of a signature's groups, what they make of tensors, and how far tensors are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Signature, groups
from onebasin.symmetry.groups.elements import Element

Tensors = dict[str, Tensor]


def all_groups() -> dict[str, Group]:
    """Every group that the package exports, by name, and every variant of those with variants: nobody lists them."""
    kinds = [getattr(groups, name) for name in groups.__all__]
    plain = [kind() for kind in kinds if isinstance(kind, type) and issubclass(kind, Group) and kind is not Group]
    found = [*plain, groups.Rotary(True), groups.Rotary(rescale="joint"), groups.Rotary(True, "after"),
             groups.PairSigns(True)]  # fmt: skip
    return {f"{group.name} {number}": group for number, group in enumerate(found)}


def random_alignment(
    signature: Signature, acting: Mapping[str, Group], seed: int = 0, *, moving: bool = False
) -> Alignment:
    """A random element of every group, in float64. moving: none of them the identity."""
    generator = torch.Generator().manual_seed(seed)
    elements: dict[str, Element] = {}
    for root, group in acting.items():
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
