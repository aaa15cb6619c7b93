# SPDX-License-Identifier: Apache-2.0
"""Weighted averages of aligned models, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.checkpoint import Checkpoint
from onebasin.symmetry import Alignment, Entry, Signature
from onebasin.symmetry.axes import Leaf, blocks

Combine = Callable[[list[Tensor], Sequence[float], Signature, Entry], Tensor]


def average(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """sum_i w_i T_i."""
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total += weight * tensor
    return total


def norm_preserving(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """The average, scaled to the average of the norms: independent parts of the models shrink it.

    Vectors and norm weights are plainly averaged. Measured: helps GPT-2, hurts ViT; an option, not a default.
    """
    mean = average(tensors, weights, signature, entry)
    if len(entry.axes) < 2:
        return mean
    wanted = sum(weight * tensor.norm() for weight, tensor in zip(weights, tensors, strict=True))
    return mean * (wanted / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny))


def spectrum_preserving(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """The average P S V^T of a layer's matrix with S replaced by the average of the models' singular values.

    Fused matrices block by block; embeddings, heads and vectors are plainly averaged. Measured: helps GPT-2, hurts
    ViT; an option, not a default.
    """
    mean = average(tensors, weights, signature, entry)
    if len(entry.axes) < 2 or entry.layer is None:
        return mean
    cuts = [blocks(tensor, entry.axes, signature.sizes) for tensor in (mean, *tensors)]
    for (target, leaves), *others in zip(*cuts, strict=True):
        # A matrix from the spaces that all layers share (the stream) to those of this layer.
        outside = [dim for dim, leaf in enumerate(leaves) if _shared_by_layers(signature, leaf)]
        inside = [dim for dim in range(len(leaves)) if dim not in outside]
        if not outside or not inside:
            continue
        order = (*outside, *inside)
        rows = len(outside)

        def matrix(view: Tensor, order: tuple[int, ...] = order, rows: int = rows) -> Tensor:
            return view.permute(order).flatten(rows).flatten(0, rows - 1)

        u, _, vh = torch.linalg.svd(matrix(target), full_matrices=False)
        values = [torch.linalg.svdvals(matrix(view)) for view, _ in others]
        spectrum = torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)
        moved = target.permute(order)
        moved.copy_(((u * spectrum) @ vh).reshape(moved.shape))
    return mean


def _shared_by_layers(signature: Signature, leaf: Leaf) -> bool:
    return not leaf.constant and signature.spaces[signature.root[leaf.space]].layer is None


COMBINE: Mapping[str, Combine] = {
    "average": average,
    "norm-preserving": norm_preserving,
    "spectrum-preserving": spectrum_preserving,
}


def merged_tensors(
    models: Sequence[Checkpoint],
    alignments: Sequence[Alignment],
    weights: Sequence[float],
    layout: int,
    shared: Sequence[str],
    *,
    combine: Combine = average,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """The merged model's tensors under the names of `models[layout]`, one at a time.

    Roles in `shared` are combined after each model's alignment acted on them. All others come from `models[layout]`
    alone, likewise aligned. Where position tables differ in length, the common rows are combined and the rest are
    the layout's.
    """
    common = set(shared)
    for role, entry in models[layout].signature.tensors.items():
        base = _aligned(models[layout], alignments[layout], role, dtype, device)
        source = entry.alias if entry.alias is not None else role
        if role not in common and source not in common:
            yield entry.name, base
            continue
        aligned = [
            base if i == layout else _aligned(model, alignment, role if role in model.signature.tensors else source, dtype, device)
            for i, (model, alignment) in enumerate(zip(models, alignments, strict=True))
        ]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in aligned), strict=True))
        merged = combine([tensor[corner] for tensor in aligned], weights, models[layout].signature, entry)
        if merged.shape != base.shape:
            base = base.clone()
            base[corner] = merged
            merged = base
        yield entry.name, merged


def _aligned(model: Checkpoint, alignment: Alignment, role: str, dtype: torch.dtype, device: str) -> Tensor:
    return alignment.apply(model.signature, role, model.read(role, dtype, device))


def nearest_to_mean(models: Sequence[Checkpoint], shared: Sequence[str], weights: Sequence[float]) -> int:
    """The model whose weights lie closest to the weighted mean of all, over the shared tensors: the natural anchor."""
    distances = [0.0] * len(models)
    for role in shared:
        tensors = [model.read(role) for model in models]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in tensors), strict=True))
        tensors = [tensor[corner] for tensor in tensors]
        mean = average(tensors, weights, models[0].signature, models[0].signature.tensors[role])
        for i, tensor in enumerate(tensors):
            distances[i] += float((tensor - mean).square().sum(dtype=torch.float64))
    return distances.index(min(distances))
