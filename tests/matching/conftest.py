# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import CASES, save
from torch import Tensor

from onebasin.checkpoint import Canonical, Checkpoint
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


def own(signature: Signature) -> list[str]:
    return [role for role, entry in signature.tensors.items() if entry.alias is None]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[Signature, Tensors]]:
    """case, level -> signature and float64 tensors, in canonical form where the level needs it."""

    def build(case: str, level: str = "paper", number: int = 0) -> tuple[Signature, Tensors]:
        torch.manual_seed(number + 7)
        model = CASES[case]().double()
        if number:
            for parameter in model.parameters():
                parameter.data += torch.randn_like(parameter)
        folder = tmp_path / f"{case}-{number}"
        save(model, folder)
        checkpoint = Checkpoint(folder)
        if level in ("orthogonal", "full", "invertible"):
            checkpoint = Canonical(checkpoint, torch.float64)
        signature = checkpoint.signature
        return signature, {role: checkpoint.read(role, torch.float64) for role in own(signature)}

    return build
