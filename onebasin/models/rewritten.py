# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose tensors pass through a function when they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .folder import Checkpoint

Change = Callable[[str, Tensor], Tensor]


class Seen(Checkpoint):
    """The model `base`, every tensor passed through `change(role, tensor)`, one at a time when it is read.

    dtype: of the tensors that `change` is given, float32 or float64.
    """

    def __init__(self, base: Checkpoint, change: Change, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base.folder, base._family)
        self.given, self.notes, self.config_updates = base.given, base.notes, base.config_updates
        self.base, self.change, self.dtype = base, change, dtype
        self.__dict__["signature"] = base.signature
        self.__dict__["_handles"] = base._handles  # opened and closed with the base

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.change(role, self.base.read(role, self.dtype, device)).to(dtype)
