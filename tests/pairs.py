# SPDX-License-Identifier: Apache-2.0
"""Tiny models of one shape that differ, as objects, folders or opened folders; and a copy of one with other weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from zoo import CASES, save

from onebasin.data import Task
from onebasin.matching.coordinate_descent import CoordinateDescent
from onebasin.models import Folder
from onebasin.symmetry import Alignment, acting_groups


def model(
    case: str = "BertForSequenceClassification",
    seed: int = 0,
    *,
    apart: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A tiny model, config values replaced; every seed but 0 moves each parameter by normal noise of size `apart`."""
    made = CASES[case](**changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(bool(seed) * apart * torch.randn(parameter.shape, generator=generator))
    return made.to(dtype)  # type: ignore[no-any-return]


def folder(where: Path, case: str = "BertForSequenceClassification", seed: int = 0, **how: Any) -> Path:
    return save(model(case, seed, **how), where)


def folders(where: Path, case: str = "GPT2LMHeadModel", count: int = 2, **how: Any) -> list[Path]:
    """Different models of one shape, by their seeds."""
    return [folder(where / str(seed), case, seed, **how) for seed in range(count)]


def opened(where: Path, case: str, count: int = 2, *, apart: float = 0.2, **how: Any) -> list[Folder]:
    """The same in float64 and opened."""
    return [Folder(one) for one in folders(where, case, count, apart=apart, dtype=torch.float64, **how)]


def scrambled(source: Path, where: Path, level: str = "paper", seed: int = 0, family: str | None = None) -> Path:
    """The same function with other weights: a random group element in every space that `level` moves."""
    checkpoint = Folder(source, family)
    signature = checkpoint.signature
    generator = torch.Generator().manual_seed(seed)
    elements, batch = {}, {}
    for root, group in acting_groups(signature, level).items():
        space = signature.spaces[root]
        elements[root] = group.random(space.size, tuple(signature.sizes[outer] for outer in space.batch), generator)
        batch[root] = space.batch
    alignment = Alignment(elements, batch)
    shutil.copytree(source, where)
    tensors = load_file(source / "model.safetensors")
    for role, entry in signature.tensors.items():
        moved = alignment.apply(signature, role, checkpoint.read(role, torch.float64))
        for name, part in entry.split(moved):
            tensors[name] = part.to(tensors[name].dtype).contiguous()
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return where


def few_sweeps(patch: pytest.MonkeyPatch) -> None:
    """End matching after three sweeps, however near the models are: those that share nothing take a hundred."""
    descend = CoordinateDescent.descend

    def limited(self: CoordinateDescent) -> None:
        self.how = replace(self.how, max_sweeps=3)
        descend(self)

    patch.setattr(CoordinateDescent, "descend", limited)
    patch.setattr("onebasin.matching.universe.ROUNDS", 3)


def weights(where: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(where.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def words() -> Task:
    """Four sequences of seven tokens, to be predicted."""
    ids = torch.randint(3, 23, (4, 7), generator=torch.Generator().manual_seed(0))
    return Task("causal-lm", ({"input_ids": ids, "labels": ids},))
