# SPDX-License-Identifier: Apache-2.0
"""Changing model folders from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def to_pickle(folder: Path) -> Path:
    """Keep the same weights as a pickle instead."""
    file = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), file)
    (folder / "model.safetensors").unlink()
    return file
