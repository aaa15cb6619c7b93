# SPDX-License-Identifier: Apache-2.0
"""The weighted average of aligned models, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.models import Model
from onebasin.models.pairing import corner
from onebasin.symmetry import Entry, Signature

from .method import TensorMethod


@dataclass(frozen=True)
class Average(TensorMethod):
    """The weighted average of every tensor."""

    def combine(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        return average(tensors, weights, signature, entry)


def average(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
    """Return sum_i w_i T_i."""
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def nearest_to_mean(models: Sequence[Model], shared: Sequence[str], weights: Sequence[float]) -> int:
    """Return the number of the model closest to the weighted mean of all, over the shared tensors: the natural
    anchor."""
    if len(models) == 2 and abs(sum(weights) - 1) < 1e-9:  # |t_0 - mean| = |w_1| |t_0 - t_1|: no need to read anything
        return int(abs(weights[1]) > abs(weights[0]))
    distances = [0.0] * len(models)
    for role in shared:
        tensors = [model.read(role) for model in models]
        common = corner(tensor.shape for tensor in tensors)
        tensors = [tensor[common] for tensor in tensors]
        mean = average(tensors, weights, models[0].signature, models[0].signature.tensors[role])
        for i, tensor in enumerate(tensors):
            distances[i] += float((tensor - mean).square().sum(dtype=torch.float64))
    return distances.index(min(distances))
