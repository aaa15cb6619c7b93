# SPDX-License-Identifier: Apache-2.0
"""Random elements of a signature's groups, what they make of tensors, and how far tensors are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.symmetry import Alignment, Group, Signature

Tensors = dict[str, Tensor]


def random_alignment(signature: Signature, groups: dict[str, Group], seed: int = 0) -> Alignment:
    """A random element of every group, in float64."""
    generator = torch.Generator().manual_seed(seed)
    elements, batch = {}, {}
    for root, group in groups.items():
        space = signature.spaces[root]
        elements[root] = group.random(space.size, tuple(signature.sizes[outer] for outer in space.batch), generator)
        batch[root] = space.batch
    return Alignment(elements, batch)


def apply(signature: Signature, alignment: Alignment, tensors: Tensors) -> Tensors:
    return {role: alignment.apply(signature, role, tensor) for role, tensor in tensors.items()}


def squared(a: Tensors, b: Tensors) -> float:
    return sum(float((a[role] - b[role]).square().sum()) for role in a)
