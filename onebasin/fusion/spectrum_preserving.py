# SPDX-License-Identifier: Apache-2.0
"""The average with the singular values of the models.

Measured: helps GPT-2, hurts ViT; an option, not a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetry import Entry, Signature
from onebasin.symmetry.tables.axes import blocks

from .average import average
from .method import TensorMethod


@dataclass(frozen=True)
class SpectrumPreserving(TensorMethod):
    """The average P S V^T of a layer's matrix with S replaced by the average of the models' singular values.

    Fused matrices are treated block by block; embeddings, heads and vectors are averaged plainly.
    """

    def combine(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        mean = average(tensors, weights, signature, entry)
        if len(entry.axes) < 2 or entry.layer is None:
            return mean
        cuts = [blocks(tensor, entry.axes, signature.sizes) for tensor in (mean, *tensors)]
        for (target, leaves), *others in zip(*cuts, strict=True):
            # A matrix between the spaces that all layers share (the stream) and those of this layer.
            roots = ["" if leaf.constant else signature.root[leaf.space] for leaf in leaves]
            outside = [dim for dim, root in enumerate(roots) if root and signature.spaces[root].layer is None]
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
