# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elements import Tensors
from pairs import folder

from onebasin.models import Canonical, Folder
from onebasin.symmetry import Signature


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[Signature, Tensors]]:
    """case, level -> signature and float64 tensors, in canonical form where the level needs it."""

    def build(case: str, level: str = "paper", number: int = 0) -> tuple[Signature, Tensors]:
        where = tmp_path / f"{case}-{number}"
        checkpoint = Folder(folder(where, case, number, apart=1.0, dtype=torch.float64))
        if level in ("orthogonal", "full", "invertible"):
            checkpoint = Canonical(checkpoint, torch.float64)
        signature = checkpoint.signature
        own = [role for role, entry in signature.tensors.items() if entry.alias is None]
        return signature, {role: checkpoint.read(role, torch.float64) for role in own}

    return build
