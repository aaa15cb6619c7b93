# SPDX-License-Identifier: Apache-2.0
"""A checkpoint seen in canonical form."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.symmetry.canonical import canonical

from .reader import Checkpoint


class Canonical(Checkpoint):
    """The same model with every parameter that its function does not see fixed by rule; reads like a checkpoint.

    dtype: of the arithmetic, float32 or float64. config_updates: what its config must say (an untied head, say).
    """

    def __init__(self, base: Checkpoint, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base.folder, base._family)
        self.given = base.given
        self.dtype = dtype
        signature = base.signature
        form = canonical(signature, {role: base.read(role, dtype) for role in signature.tensors})
        self.__dict__["signature"] = form.signature
        self._tensors = form.tensors
        self.config_updates = form.config_updates
        self.notes = form.log

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self._tensors[role].to(device=device, dtype=dtype)
