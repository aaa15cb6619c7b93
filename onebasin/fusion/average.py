# SPDX-License-Identifier: Apache-2.0
"""Weighted averages of aligned models, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.models import LazyTensors, Model
from onebasin.symmetry import Entry, Signature
from onebasin.symmetry.tables.axes import Leaf, blocks

from .circuits import average_circuit, circuit_roots

Combine = Callable[[list[Tensor], Sequence[float], Signature, Entry], Tensor]


def average(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """sum_i w_i T_i."""
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def norm_preserving(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """The average, scaled to the average of the norms: independent parts of the models shrink it.

    Vectors and norm weights are plainly averaged. Measured: helps GPT-2, hurts ViT; an option, not a default.
    """
    mean = average(tensors, weights, signature, entry)
    if len(entry.axes) < 2:
        return mean
    wanted = sum(weight * float(tensor.norm()) for weight, tensor in zip(weights, tensors, strict=True))
    return mean * (wanted / max(float(mean.norm()), torch.finfo(mean.dtype).tiny))


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


METHODS = (*COMBINE, "circuit")


def merged_tensors(
    models: Sequence[Model],
    weights: Sequence[float],
    layout: int,
    shared: Collection[str],
    *,
    method: str = "average",
    combine: Combine | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    workers: int | None = 1,
    ray: str | None = None,
) -> LazyTensors:
    """The merged model's tensors under the names of `models[layout]`, one at a time.

    Roles in `shared` are combined by `method`, or by `combine` where it is given. All others come from
    `models[layout]` alone. Where position tables differ in length, the
    common rows are combined and the rest are the layout's. workers, ray: as of `LazyTensors`.
    """
    signature = models[layout].signature
    combine = combine or COMBINE.get(method, average)
    circuits: dict[int | None, list[str]] = {}
    for root in circuit_roots(signature) if method == "circuit" else ():
        circuits.setdefault(signature.spaces[root].layer, []).append(root)

    def read(role: str) -> list[Tensor]:
        """The tensor of every model, in the layout's place for it."""
        found = []
        for model in models:
            own = role if role in model.signature.tensors else str(signature.tensors[role].alias)
            found.append(model.read(own, dtype, device))
        return found

    def merged(role: str, tensors: list[Tensor]) -> Tensor:
        base = tensors[layout]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in tensors), strict=True))
        mean = combine([tensor[corner] for tensor in tensors], weights, signature, signature.tensors[role])
        if mean.shape == base.shape:
            return mean
        whole = base.clone()
        whole[corner] = mean
        return whole

    def single(role: str) -> Tensor:
        if role in shared or signature.tensors[role].alias in shared:
            return merged(role, read(role))
        return models[layout].read(role, dtype, device)

    def heads(layer: int | None, roles: Sequence[str]) -> dict[str, Tensor]:
        """The tensors of a layer's heads, which are merged together."""
        every = {role: read(role) for role in roles}
        mean = {role: merged(role, tensors) for role, tensors in every.items()}
        for root in circuits[layer]:
            parts = [{role: tensors[i] for role, tensors in every.items()} for i in range(len(models))]
            touched = {role: mean[role] for role in roles if role in signature.touching[root]}
            average_circuit(signature, root, parts, weights, touched)
        return mean

    together: dict[str, tuple[str, ...]] = {}  # role -> the roles that are merged with it
    for layer, roots in circuits.items():
        touched = dict.fromkeys(role for root in roots for role in signature.touching[root] if role in shared)
        roles = tuple(role for role in touched if signature.tensors[role].layer == layer)
        together.update(dict.fromkeys(roles, roles))

    def make(roles: Sequence[str]) -> dict[str, Tensor]:
        if roles[0] in together:
            return heads(signature.tensors[roles[0]].layer, roles)
        return {role: single(role) for role in roles}

    groups = dict.fromkeys(together.get(role, (role,)) for role in signature.tensors)
    return LazyTensors(signature, make, [*groups], workers, ray)


def nearest_to_mean(models: Sequence[Model], shared: Sequence[str], weights: Sequence[float]) -> int:
    """The model whose weights lie closest to the weighted mean of all, over the shared tensors: the natural anchor."""
    if len(models) == 2 and abs(sum(weights) - 1) < 1e-9:  # |t_0 - mean| = |w_1| |t_0 - t_1|: nothing need be read
        return int(abs(weights[1]) > abs(weights[0]))
    distances = [0.0] * len(models)
    for role in shared:
        tensors = [model.read(role) for model in models]
        corner = tuple(slice(0, min(lengths)) for lengths in zip(*(t.shape for t in tensors), strict=True))
        tensors = [tensor[corner] for tensor in tensors]
        mean = average(tensors, weights, models[0].signature, models[0].signature.tensors[role])
        for i, tensor in enumerate(tensors):
            distances[i] += float((tensor - mean).square().sum(dtype=torch.float64))
    return distances.index(min(distances))
