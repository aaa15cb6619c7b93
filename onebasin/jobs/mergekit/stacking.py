# SPDX-License-Identifier: Apache-2.0
"""The tensors of a `linear` merge file: which layer of which model goes where, and with what weight."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onebasin.models import DTYPES, Model, Target, View, common_roles, write_into
from onebasin.models.pairing import refuse_other_spaces
from onebasin.settings import OutputSettings
from onebasin.symmetry import Entry

from ..options import Options
from .parameters import number, truth
from .schema import Recipe, Slice, Source


@dataclass(frozen=True)
class Slot:
    """One tensor of the output. entry: that of the layout. names: its names on disk. roles: one for each source of
    `piece`. t: the position of its layer in the slice, from 0 to 1; 0 for tensors outside the layers."""

    entry: Entry
    names: tuple[str, ...]
    roles: list[str]
    piece: Slice
    t: float


def write_stacked(
    recipe: Recipe, models: Mapping[str, Model], target: Target, opt: Options, look: OutputSettings
) -> list[str]:
    """Write the model that a file describes, and return notes on the tensors that were not merged.

    models: name in the file -> model. target: its place, like the model that gives the layout; the file names its
    dtype. Raises ValueError as `stacked` does.
    """
    dtype, layout, left = recipe.out_dtype or recipe.dtype, target.like, list[str]()
    view = View(layout, updates=config_of(recipe, models, layout))
    made = replace(target, like=view, dtype=DTYPES[dtype] if dtype else None)
    write_into(made, stacked(recipe, models, layout, opt, left), look)
    there = layout.signature.tensors
    kinds = (([role for role in left if role in there], f"copied from {layout.name}, since the models differ"),
             ([role for role in left if role not in there], f"left out, since {layout.name} has no such"))  # fmt: skip
    return [f"{words}: {', '.join(roles)}" for roles, words in kinds if roles]


def stacked(
    recipe: Recipe, models: Mapping[str, Model], layout: Model, opt: Options, left: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the output: (name on disk, tensor).

    models: name in the file -> model. layout: the model that gives the names, and the tensors that not all models share
    (task heads). The roles of these, and of tensors that the layout lacks, are appended to `left`. Raises ValueError
    for a source without a weight, layers that do not exist, and models that cannot be paired.
    """
    apart = set(common_roles(list(models.values())).differing) if recipe.models else set()
    left.extend(sorted(apart - layout.signature.tensors.keys()))
    for slot in _slots(recipe, models, layout):
        sources = [(source, models[str(source.model)]) for source in slot.piece.sources]
        for (_, model), role in zip(sources, slot.roles, strict=True):
            refuse_other_spaces(layout, slot.entry.role, model, role)
        entries = [model.signature.tensors.get(role) for (_, model), role in zip(sources, slot.roles, strict=True)]
        headed = slot.entry.head and slot.entry.role in apart
        if headed or any(entry is None or entry.shape != slot.entry.shape for entry in entries):
            if not slot.entry.head and slot.entry.alias is None:
                raise ValueError(
                    f"'{slot.entry.name}' is not in all models, or differs in shape: they cannot be merged"
                )
            left.append(slot.entry.role)
            yield from zip(slot.names, _parts(slot.entry, _read(layout, slot.entry.role, recipe, opt)), strict=True)
            continue
        weights = []
        for (source, model), entry in zip(sources, entries, strict=True):
            assert entry is not None
            scopes = (source.parameters, slot.piece.parameters, recipe.parameters)
            weight = number("weight", scopes, entry.name, slot.t)
            if weight is None:
                raise ValueError(f"linear needs a weight for every model, and '{model.name}' has none for "
                                 f"'{entry.name}'")  # fmt: skip
            weights.append(weight)
        normalize = truth("normalize", (slot.piece.parameters, recipe.parameters), slot.entry.name, slot.t)
        tensors = [_read(model, role, recipe, opt) for (_, model), role in zip(sources, slot.roles, strict=True)]
        merged = linear(tensors, weights, normalize is not False)
        yield from zip(slot.names, _parts(slot.entry, merged), strict=True)


def refuse_missing_layers(recipe: Recipe, models: Mapping[str, Model]) -> None:
    """Raise ValueError for a layer_range beyond its model's layers. models: name in the file -> model."""
    for piece in recipe.pieces:
        for source in piece.sources:
            layers, (_, end) = len(models[str(source.model)].signature.layers), source.layer_range or (0, 0)
            if end > layers:
                raise ValueError(f"layer_range: '{source.model}' has {layers} layers, not {end}")


def config_of(recipe: Recipe, models: Mapping[str, Model], layout: Model) -> dict[str, Any]:
    """Return the changed entries of the config: the number of layers, and lists with one value per layer."""
    if not recipe.slices:
        return {}
    kept = [
        (models[str(piece.sources[0].model)], layer)
        for piece in recipe.slices
        for layer in range(*(piece.sources[0].layer_range or (0, 0)))
    ]
    table = layout.origin.table
    known = [key for keys in table.layers for key in keys if key in layout.raw_config]
    updates: dict[str, Any] = dict.fromkeys(known, len(kept))
    for key, value in layout.raw_config.items():
        if isinstance(value, list) and len(value) == len(layout.signature.layers):
            updates[key] = [model.raw_config.get(key, value)[layer] for model, layer in kept]
    return updates


def _slots(recipe: Recipe, models: Mapping[str, Model], layout: Model) -> Iterator[Slot]:
    tensors = layout.signature.tensors
    depth = {(stack := _stack(entry)): 1 + max(other.layer or 0 for other in tensors.values() if _stack(other) == stack)
             for entry in tensors.values() if entry.layer is not None}  # fmt: skip
    if recipe.models:
        sources = list(recipe.models)
        named = {str(source.model) for source in sources}
        if recipe.base_model and str(recipe.base_model) not in named:
            sources.append(Source(model=recipe.base_model))
        piece = Slice(sources=sources)
        for role, entry in tensors.items():
            last = depth.get(_stack(entry), 1) - 1
            t = 0.0 if entry.layer is None else entry.layer / last if last else 1.0
            yield Slot(entry, entry.names, [role] * len(sources), piece, t)
        return
    pieces = recipe.slices or []
    if len(depth) != 1:
        raise ValueError(f"'{layout.name}' has several stacks of layers; slices need a model with one")
    roles = list(tensors)
    layered = [role for role in roles if tensors[role].layer is not None]
    first = [role for role in layered if tensors[role].layer == tensors[layered[0]].layer]
    for role in roles[: roles.index(layered[0])]:
        yield Slot(tensors[role], tensors[role].names, [role] * len(pieces[0].sources), pieces[0], 0.0)
    above = 0
    for piece in pieces:
        ranges = [source.layer_range or (0, 0) for source in piece.sources]
        count = ranges[0][1] - ranges[0][0]
        for i in range(count):
            for role in first:
                entry = tensors[role]
                at = entry.layer or 0
                yield Slot(
                    entry,
                    tuple(_renumbered(name, at, above + i) for name in entry.names),
                    [_renumbered(role, at, start + i) for start, _ in ranges],
                    piece,
                    i / (count - 1) if count > 1 else 1.0,
                )
        above += count
    for role in roles[roles.index(layered[0]) :]:
        if tensors[role].layer is None:
            yield Slot(tensors[role], tensors[role].names, [role] * len(pieces[-1].sources), pieces[-1], 0.0)


def _stack(entry: Entry) -> str:
    """Return what stands before the layer number in a name: `encoder.block`, `decoder.block`."""
    return "" if entry.layer is None else re.split(r"(?:^|\.)\d+\.", entry.role, maxsplit=1)[0]


def _renumbered(name: str, layer: int, wanted: int) -> str:
    return re.sub(rf"(^|\.){layer}\.", rf"\g<1>{wanted}.", name, count=1)


def _read(model: Model, role: str, recipe: Recipe, opt: Options) -> Tensor:
    """Return a tensor in the dtype that the file asks for, by default the dtype in which it is stored."""
    stored = model.origin.dtypes.get(model.signature.tensors[role].names[0], torch.float32)
    wide = torch.float64 if torch.float64 in (stored, opt.dtype) else opt.dtype
    return model.read(role, wide, opt.device).to(DTYPES[recipe.dtype] if recipe.dtype else stored)


def _parts(entry: Entry, tensor: Tensor) -> list[Tensor]:
    return [part for _, part in entry.split(tensor)]


def linear(tensors: Sequence[Tensor], weights: Sequence[float], normalize: bool = True) -> Tensor:
    """Return sum_i w_i T_i, over sum_i w_i where `normalize` (Model soups, Wortsman et al., 2022, Section 2).

    Summed in float32, or in float64 where the tensors are; returned in their dtype.

    Raises:
        ValueError: With `normalize`, the weights add up to 0.
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    total = torch.zeros_like(tensors[0], dtype=dtype)
    shares = torch.tensor(list(weights), dtype=dtype, device=total.device)
    for tensor, share in zip(tensors, shares, strict=True):
        total.addcmul_(tensor.to(dtype), share)
    if normalize:
        if float(shares.sum()) == 0:
            raise ValueError("the weights of a normalized sum add up to 0")
        total /= shares.sum()
    return total.to(tensors[0].dtype)
