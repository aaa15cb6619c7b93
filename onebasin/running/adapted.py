# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter merged into its base model: W + s B A (LoRA, Hu et al., 2021, Eq. 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from onebasin.models.errors import ModelError
from onebasin.models.folder import Folder
from onebasin.models.writer import write_model

from .lora import _FACTOR, Adapter, fit


def write_adapted(base: Folder, adapter: Adapter, out: Path) -> None:
    """Write the folder `out`: the base model with the adapter merged into it, in the dtypes of the base.

    Raises:
        ModelError: The adapter cannot be read, or does not fit.
    """
    write_model(out, adapted(base, adapter), base)


def adapted(base: Folder, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `write_adapted`: (name on disk, tensor). The arithmetic is in float32."""
    changes: dict[str, dict[str, str]] = {}  # base tensor -> the adapter's tensors for it: A, B, or the whole
    for name, entry in fit(adapter, base).tensors.items():
        factor = _FACTOR.match(name)
        kind = "whole" if factor is None else f"{factor[3]}{factor[4] if factor[4] == 'bias' else ''}"
        changes.setdefault(entry.name, {})[kind] = name
    for role, entry in base.signature.tensors.items():
        dtype = base.dtypes.get(entry.names[0], torch.float32)
        tensor = base.read(role, dtype)
        found = changes.pop(entry.name, {})
        if "whole" in found:
            tensor = adapter.tensors[found["whole"]].to(dtype)
        elif found:
            if found.keys() != {"A", "B"}:
                raise ModelError(f"'{adapter.folder}': '{next(iter(found.values()))}' lacks its other factor, "
                             "or has a bias, which cannot be merged")  # fmt: skip
            a, b = (adapter.tensors[found[key]].float() for key in "AB")
            change = scale(adapter, found["A"], len(a)) * (b @ a)
            tensor = (tensor.float() + (change.T if _turned(adapter, found["A"]) else change)).to(dtype)
        yield from entry.split(tensor)
    if changes:
        raise ModelError(f"'{adapter.folder}' changes '{next(iter(changes))}', which the base model does not have")


def scale(adapter: Adapter, name: str, rank: int) -> float:
    """Return the factor s of the module of `name`: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
    config = adapter.config
    alpha = float(config.get("lora_alpha") or 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        factor = _FACTOR.match(name)
        if factor and re.search(rf"(^|\.){pattern}$", factor[1]):
            alpha = float(value)
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _turned(adapter: Adapter, name: str) -> bool:
    """Whether the base stores the matrix (in, out)."""
    factor = _FACTOR.match(name)
    return bool(adapter.config.get("fan_in_fan_out") or (factor and factor[2]))
