# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a model, rewritten along with it.

An adapter adds s B A to a weight W (LoRA, Hu et al., 2021, Eq. 3). Where W with axes (out, in) becomes g W h^-1, the
adapter has to add s g B A h^-1, so B takes the maps of W's axis `out` and A those of its axis `in`, as W does. All of
this is linear in W: the rewritten adapter changes the rewritten model as the adapter changes the model. The folder has
the format of `peft`, which is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from onebasin.models.companions import copy_companions
from onebasin.models.errors import ModelError, one_line, read_json
from onebasin.models.fetching import refuse_links_out
from onebasin.models.folder import Folder
from onebasin.models.weight_files import clearly
from onebasin.models.writer import write_model
from onebasin.symmetry import Alignment, Entry, Signature
from onebasin.symmetry.gauge.canonical import plan
from onebasin.symmetry.gauge.dataflow import along, cut, downstream, noted, outlets, speaks_of
from onebasin.symmetry.tables.axes import Leaf
from onebasin.symmetry.tables.ties import with_ties

from .loaded import loaded_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:(embedding)_)?([AB])(?:\.(weight|bias))?$")
# Initialisations that subtract the initial adapter from the base model, which then differs from the model on disk.
_SHIFTED = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Adapter:
    """The folder of a LoRA adapter, read at once, since adapters are small.

    config: adapter_config.json. tensors: name -> tensor, as stored. Raises ModelError for an adapter that cannot be
    read or cannot be rewritten exactly.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config, weights = self.folder / CONFIG, self.folder / WEIGHTS
        for path in (config, weights):
            if not path.is_file():
                raise ModelError(f"'{folder}' has no {path.name}; give the folder of a LoRA adapter")
        refuse_links_out(self.folder)
        self.config: dict[str, Any] = read_json(config)
        if not isinstance(self.config, dict) or self.config.get("peft_type") != "LORA":
            raise ModelError(f"'{config}': only adapters of peft_type LORA can be rewritten")
        start = str(self.config.get("init_lora_weights")).lower()
        if self.config.get("use_dora"):
            raise ModelError(f"'{config}': use_dora normalizes columns of the weights, which a rotation does not "
                             "preserve; merge this adapter into its model first")  # fmt: skip
        if start.startswith(_SHIFTED):
            raise ModelError(f"'{config}': init_lora_weights '{start}' changes the base model; convert it to a "
                             "plain LoRA adapter first")  # fmt: skip
        try:
            self.tensors: dict[str, Tensor] = load_file(weights)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"'{weights}' is damaged or cut short: {one_line(error)}") from None
        for name, tensor in self.tensors.items():
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"'{weights}': the tensor '{name}' does not contain finite floating-point numbers")


def fit(adapter: Adapter, base: Folder) -> Signature:
    """Return the signature of the adapter: its tensors by name, with the axes of the base model's tensors they change.

    Tensors that replace those of the base model (`modules_to_save`, trained biases) have all of their axes. Raises
    ModelError for a tensor that belongs to no tensor of the base model, or to a single expert, or does not fit.
    """
    entries = entries_of(base, adapter.tensors)
    return replace(base.signature, tensors={name: _entry(adapter, entries, name) for name in adapter.tensors})


def entries_of(base: Folder, names: Iterable[str]) -> dict[str, Entry]:
    """Return name -> the tensor of the base model that it refers to, without names that refer to none. They may be
    names on disk, in the model's class, or in an adapter."""
    known, names = _on_disk(base.signature), list(names)
    if any(_owner(known, name) is None for name in names):
        known |= _in_memory(base)
    found = {name: _owner(known, name) for name in names}
    return {name: entry for name, entry in found.items() if entry is not None}


def rewritten_adapter(
    adapter: Adapter,
    fitted: Signature,
    alignment: Alignment,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the adapter's tensors for the base model that `alignment` rewrites, by name, in their stored dtypes.

    fitted: the result of `fit`. tensors: the result of `folded`, if the base is in canonical form.
    """
    return {
        name: alignment.apply(fitted, name, tensor.to(dtype).contiguous()).to(adapter.tensors[name].dtype)
        for name, tensor in (tensors or adapter.tensors).items()
    }


def folded(adapter: Adapter, fitted: Signature, base: Folder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the adapter's tensors for the canonical form of the base model.

    There, the weight D of an RMSNorm is folded into its readers: W D + s B (A D).

    Raises:
        ModelError: Constants move as well, which a low rank cannot express (LayerNorms, value biases that move into
            output biases), or the adapter changes a norm or a tied table.
    """
    whole = with_ties(base.signature)
    for name, entry in fitted.tensors.items():
        role = next((role for role, own in whole.tensors.items() if own.name == entry.name), "")
        if entry.norm or not role or role in whole.sharing:
            raise ModelError(
                f"'{adapter.folder / WEIGHTS}': '{name}' changes a norm or a tied table, which cannot follow a "
                "rotation of the residual stream; use paper or permutation"
            )
    signature = plan(base.signature).signature
    if any(norm.kind == "layernorm" for norm in signature.norms) or _constants_move(signature):
        raise ModelError(f"'{base.name}': at levels that rotate the residual stream, biases move through the "
                         "weights, which an adapter cannot follow; use paper or permutation")  # fmt: skip
    tensors = {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in adapter.tensors.items()}
    for outlet in outlets(signature):
        if outlet.free and signature.sharing.isdisjoint(outlet.readers):
            gain = outlet.norm.weight(base.read(outlet.role, dtype))
            for name, tensor in tensors.items():
                for view in along(fitted, name, tensor, outlet.source[0]):
                    view *= gain
    return tensors


def _constants_move(signature: Signature) -> bool:
    return any(
        downstream(signature, role, axes)
        for role, word in noted(signature, "passes")
        for _, axes in cut(signature, role, torch.empty(signature.tensors[role].shape, device="meta"))
        if speaks_of(signature, axes, word)
    )


def _entry(adapter: Adapter, entries: Mapping[str, Entry], name: str) -> Entry:
    where, shape = f"'{adapter.folder / WEIGHTS}': '{name}'", tuple(adapter.tensors[name].shape)
    whole, factor = entries.get(name), _FACTOR.match(name)
    if whole is None:
        raise ModelError(f"{where} belongs to no tensor of the base model")
    if whole.pieces:
        raise ModelError(f"{where} belongs to a single expert; such adapters cannot be rewritten yet")
    axes, sizes = whole.axes, whole.shape
    if factor:
        _, embedding, letter, kind = factor.groups()
        if len(axes) != 2 or len(shape) != (1 if kind == "bias" else 2):
            raise ModelError(f"{where} does not adapt a matrix; such adapters cannot be rewritten yet")
        transposed = bool(embedding or adapter.config.get("fan_in_fan_out"))  # W is stored (in, out)
        end = int((letter == "A") != transposed)  # the axis of W that this factor shares
        axes, sizes = (axes[end],), (sizes[end],)
        if kind != "bias":  # A is (rank, in), B is (out, rank)
            rank = shape[0 if letter == "A" else 1]
            constant = (Leaf(str(rank)),)
            axes = constant + axes if letter == "A" else axes + constant
            sizes = (rank, *sizes) if letter == "A" else (*sizes, rank)
    if sizes != shape:
        raise ModelError(f"{where} has shape {shape}, but '{whole.name}' of the base model needs {sizes}")
    return replace(whole, role=name, shape=shape, axes=axes, alias=None)


def _owner(names: Mapping[str, Entry], name: str) -> Entry | None:
    """Return the tensor that an adapter's tensor changes or replaces: by its name, with or without a prefix.

    The names in an adapter of a model with a head differ from those of the bare model on disk.
    """
    factor = _FACTOR.match(name)
    wanted = (f"{factor[1]}.weight" if factor else name).removeprefix(_PREFIX)
    near = {
        entry.role: entry
        for known, entry in names.items()
        if known.endswith(f".{wanted}") or wanted.endswith(f".{known}")
    }
    return names.get(wanted) or (next(iter(near.values())) if len(near) == 1 else None)


def _on_disk(signature: Signature) -> dict[str, Entry]:
    entries = (*signature.tensors.values(), *signature.absent.values())
    return {name: entry for entry in entries for name in entry.names}


def _in_memory(base: Folder) -> dict[str, Entry]:
    """Return the model's tensors by their names in its class. This loads the model."""
    try:
        stock = loaded_model(base)
    except ModelError:  # a class that keeps tensors in another form
        return {}
    roles = {id(parameter): role for role, parameter in stock.parameter.items()}
    found = {name: roles.get(id(parameter)) for name, parameter in stock.model.named_parameters()}
    return {name: base.signature.tensors[role] for name, role in found.items() if role}


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


def write_adapter(adapter: Adapter, tensors: dict[str, Tensor], folder: Path, base: str | Path) -> None:
    """Write an adapter of the model `base` into an empty folder. Raises ModelError if that fails."""
    config = {**adapter.config, "base_model_name_or_path": str(base)}
    with clearly(folder, "the adapter"):
        copy_companions(adapter.folder, folder)
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
        (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors writes 0600
