# SPDX-License-Identifier: Apache-2.0
"""Random group elements in every space, model folders rewritten by them, and what these put out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import zoo
from elements import random_alignment
from safetensors.torch import save_file
from torch import Tensor

from onebasin.models.errors import ModelError
from onebasin.models.folder import Folder
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.symmetry import Alignment, Signature, acting_groups
from onebasin.symmetry.levels import largest_group
from onebasin.symmetry.tables.signature import MOVES


def moving_alignment(signature: Signature, level: str) -> Alignment:
    """A random element in every space that may move, none of them the identity.

    level: `paper` (with scales), `permutation`, or `widest`: all that a space's kind promises.
    """
    if level == "widest":
        groups = {root: largest_group(kind) for root, kind in signature.kinds.items()
                  if MOVES[kind] and (kind != "permutation" or signature.sizes[root] > 1)}  # fmt: skip
    else:
        groups = acting_groups(signature, level, rescale="joint")
    return random_alignment(signature, groups, seed=1, moving=True)


def read_all(checkpoint: Folder, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """All tensors by role."""
    return {role: checkpoint.read(role, dtype) for role in checkpoint.signature.tensors}


def with_unit_norms(signature: Signature, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms that read the stream do nothing but normalize, and LayerScale nothing: what is left of them commutes with
    rotations."""
    entries = signature.tensors.items()
    free = {role: entry.norm.unit for role, entry in entries if entry.norm and not entry.norm.writes_back}
    free |= {role: 1.0 for role, entry in entries if entry.scaled}
    return {role: torch.full_like(value, free[role]) if role in free else value for role, value in tensors.items()}


def write(folder: Path, like: Folder, tensors: dict[str, Tensor]) -> Path:
    """A folder with the config of `like` and these tensors, under the names that `like` has on disk."""
    folder.mkdir()
    shutil.copy(like.folder / "config.json", folder)
    entries = like.signature.tensors
    named = {name: part.contiguous() for role, whole in tensors.items() for name, part in entries[role].split(whole)}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(case: str, folder: Path) -> list[Tensor]:
    """Outputs of the model in a folder, in float64."""
    model = zoo.load(case, folder)
    return zoo.outputs(model, zoo.inputs(model))


@lru_cache(maxsize=2)
def _loaded(folder: Path) -> LoadedModel:
    return loaded_model(Folder(folder), dtype=torch.float64)


def outputs_of(checkpoint: Folder, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Outputs in float64 of the model in a folder with these tensors in place of its own; nothing is written.

    A sixth of the time of `write` and `run`, which show for every case that a written folder does the same.
    """
    try:
        loaded = _loaded(checkpoint.folder)
    except ModelError:  # its class divides a tensor of the folder
        with TemporaryDirectory() as place:
            return run(checkpoint.folder.name, write(Path(place) / "model", checkpoint, dict(tensors)))
    loaded.fill(tensors.__getitem__)
    loaded.fill_buffers(tensors.__getitem__)
    return zoo.outputs(loaded.model, zoo.inputs(loaded.model))


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest difference over the scale of the outputs."""
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True))
