# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a model, rewritten along with it.

An adapter adds s B A to a weight W (LoRA, Hu et al., 2021, Eq. 3). Where W with axes (out, in) becomes g W h^-1, the
adapter has to add s g B A h^-1, so B takes the maps of W's axis `out` and A those of its axis `in`, as W does. All of it
is linear in W: the rewritten adapter does to the rewritten model what the adapter does to the model. The folder is
that of `peft`, which is not needed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from onebasin.symmetry import Alignment, Entry, Signature
from onebasin.symmetry.axes import Axis, Leaf

from .reader import Checkpoint, CheckpointError, _json, one_line
from .writer import _clearly, _into_place, _name, _write_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:(embedding)_)?([AB])(?:\.(weight|bias))?$")
# Initialisations that subtract the adapter's start from the base model, which is then not the model on disk.
_SHIFTED = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Adapter:
    """The folder of a LoRA adapter, read whole: adapters are small.

    config: adapter_config.json. tensors: name -> tensor, as stored. Raises CheckpointError for what cannot be read or
    cannot be rewritten exactly.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config, weights = self.folder / CONFIG, self.folder / WEIGHTS
        for path in (config, weights):
            if not path.is_file():
                raise CheckpointError(f"'{folder}' holds no {path.name}; give the folder of a LoRA adapter")
        self.config: dict[str, Any] = _json(config)
        if not isinstance(self.config, dict) or self.config.get("peft_type") != "LORA":
            raise CheckpointError(f"'{config}': only adapters of peft_type LORA can be rewritten")
        start = str(self.config.get("init_lora_weights")).lower()
        if self.config.get("use_dora"):
            raise CheckpointError(f"'{config}': use_dora normalises columns of the weights, which a rotation does not "
                                  "keep; merge this adapter into its model first")  # fmt: skip
        if start.startswith(_SHIFTED):
            raise CheckpointError(f"'{config}': init_lora_weights '{start}' changes the base model; convert it to a "
                                  "plain LoRA adapter first")  # fmt: skip
        try:
            self.tensors: dict[str, Tensor] = load_file(weights)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{weights}' is damaged or cut short: {one_line(error)}") from None
        for name, tensor in self.tensors.items():
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"'{weights}': the tensor '{name}' does not hold finite floating-point numbers")


def transported(
    adapter: Adapter, base: Checkpoint, alignment: Alignment, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The adapter's tensors for the base model that `alignment` rewrites, by name, in their stored dtypes.

    Tensors that the adapter replaces whole (`modules_to_save`, trained biases) move like those of the base. dtype: of
    the arithmetic. Raises CheckpointError, naming the tensor, for what belongs to no tensor of the base, to an expert,
    or does not fit.
    """
    found = {}
    for name, tensor in adapter.tensors.items():
        entry = _entry(adapter, base.signature, name, tuple(tensor.shape))
        signature = replace(base.signature, tensors={entry.role: entry})
        moved = alignment.apply(signature, entry.role, tensor.to(dtype).contiguous())
        found[name] = moved.to(tensor.dtype)
    return found


def _entry(adapter: Adapter, signature: Signature, name: str, shape: tuple[int, ...]) -> Entry:
    """The tensor `name` of an adapter as if it were one of the model: with the axes of what it changes."""
    where = f"'{adapter.folder / WEIGHTS}': '{name}'"
    module, factor = name.removeprefix(_PREFIX), _FACTOR.match(name.removeprefix(_PREFIX))
    whole = _owner(signature, f"{factor[1]}.weight" if factor else module)
    if whole is None:
        raise CheckpointError(f"{where} belongs to no tensor of the base model")
    if whole.pieces:
        raise CheckpointError(f"{where} belongs to a single expert; such adapters cannot be rewritten yet")
    axes, sizes = whole.axes, whole.shape
    if factor:
        if len(axes) != 2 or (factor[4] == "bias" and factor[3] == "A"):
            raise CheckpointError(f"{where} adapts no matrix; such adapters cannot be rewritten yet")
        transposed = bool(factor[2] or adapter.config.get("fan_in_fan_out"))  # W is stored (in, out)
        end = int((factor[3] == "A") != transposed)  # the axis of W that this factor shares
        rank = (Leaf(str(shape[0 if factor[3] == "A" else -1])),) if factor[4] != "bias" else ()
        mine: tuple[Axis, ...] = (*rank, axes[end]) if factor[3] == "A" else (axes[end], *rank)
        ranks = tuple(int(leaf.space) for leaf in rank)
        sizes = (*ranks, sizes[end]) if factor[3] == "A" else (sizes[end], *ranks)
        axes = mine
    if sizes != shape:
        raise CheckpointError(f"{where} has shape {shape}, and {sizes} would fit '{whole.name}' of the base model")
    return replace(whole, role=name, name=name, shape=shape, axes=axes, alias=None)


def _owner(signature: Signature, name: str) -> Entry | None:
    """The tensor of the model that an adapter calls `name`: by its name on disk, else with or without a prefix.

    A model with a head is adapted under other names than its base model alone is stored.
    """
    entries = [*signature.tensors.values(), *signature.absent.values()]
    exact = [entry for entry in entries if name in entry.names]
    near = [
        entry for entry in entries if any(one.endswith(f".{name}") or name.endswith(f".{one}") for one in entry.names)
    ]
    found = exact or near
    return found[0] if len(found) == 1 else None


def write_adapter(
    adapter: Adapter, tensors: dict[str, Tensor], out: str | Path, base: str | Path, overwrite: bool = False
) -> None:
    """Write the folder of an adapter of the model `base`, whole or not at all. Raises as `write_model` does."""
    out = Path(out).resolve()
    refuse(adapter, out, overwrite)
    temporary = out.parent / f".{out.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with _clearly(out):
            temporary.mkdir(parents=True)
            for path in _companions(adapter.folder):
                shutil.copyfile(path, temporary / path.name)
            _write_text(temporary / CONFIG, {**adapter.config, "base_model_name_or_path": str(base)})
            save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
            (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode)  # safetensors writes 0600
            _into_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
