# SPDX-License-Identifier: Apache-2.0
"""The average with the norms of the models: where the models are independent, the plain average is smaller than they
are.

Measured: helps GPT-2, hurts ViT; an option, not a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetry import Entry, Signature

from .average import average
from .method import TensorMethod


@dataclass(frozen=True)
class NormPreserving(TensorMethod):
    """The average, scaled to the average of the norms. Vectors and norm weights are averaged plainly."""

    def combine(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        mean = average(tensors, weights, signature, entry)
        if len(entry.axes) < 2:
            return mean
        wanted = sum(weight * float(tensor.norm()) for weight, tensor in zip(weights, tensors, strict=True))
        return mean * (wanted / max(float(mean.norm()), torch.finfo(mean.dtype).tiny))
