# SPDX-License-Identifier: Apache-2.0
"""A model seen in canonical form."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebasin.symmetry.gauge.canonical import plan

from .model import Model, View


class Canonical(View):
    """The same model with every parameter that its function does not see fixed by rule.

    Every tensor is made when it is read, from its own file and those that move into it. Only vectors stay in memory.
    The config says what the form needs (an untied head, say).

    Args:
        base: the model.
        dtype: of the arithmetic, float32 or float64.
    """

    def __init__(self, base: Model, dtype: torch.dtype = torch.float32) -> None:
        self.form = plan(base.signature)
        super().__init__(base, self.form.signature, self.form.config_updates, self.form.log)
        self.dtype = dtype
        self._kept: dict[tuple[str, int], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, or other arithmetic, which makes the vectors itself."""
        return {**self.__dict__, "_kept": {}}

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        start = partial(self.base.read, dtype=self.dtype)
        return self.form.tensor(role, start, self._kept).to(device=device, dtype=dtype)
