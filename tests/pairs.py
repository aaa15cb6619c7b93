# SPDX-License-Identifier: Apache-2.0
"""Pairs of tiny model folders, for tests that see the project as a user does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from models import GPT2, IMAGE, TEXT, build, save
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from onebasin.models import Folder
from onebasin.symmetry import Alignment, acting_groups


def model(kind: str = "BertForSequenceClassification", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny float32 model; each seed moves every parameter away from that of seed 0."""
    base = IMAGE if "ViT" in kind else GPT2 if "GPT2" in kind else TEXT
    made = build(kind, **{**base, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(seed * 0.1 * torch.randn(parameter.shape, generator=generator))
    return made


def folder(where: Path, kind: str = "BertForSequenceClassification", seed: int = 0, **changes: Any) -> Path:
    return save(model(kind, seed, **changes), where)


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


def weights(where: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(where.glob("*.safetensors")) for name, tensor in load_file(file).items()}
