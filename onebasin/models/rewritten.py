# SPDX-License-Identifier: Apache-2.0
"""A model seen after its tensors were rewritten, by an alignment or by anything else that acts on them one by one."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from onebasin.symmetry import Signature

from .model import Model, View


class Acts(Protocol):
    """Anything that rewrites a model's tensors one by one: an alignment, exact or softened."""

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """Return the tensor `role` of a model of this signature, rewritten."""
        ...


A = TypeVar("A", bound=Acts)


class Rewritten(View, Generic[A]):
    """The model `base`, every tensor rewritten by `alignment` when it is read.

    Args:
        base: the model.
        alignment: what acts on its tensors.
        dtype: of the arithmetic, float32 or float64.
    """

    def __init__(self, base: Model, alignment: A, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base)
        self.alignment, self.dtype = alignment, dtype

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.alignment.apply(self.base.signature, role, self.base.read(role, self.dtype, device)).to(dtype)
