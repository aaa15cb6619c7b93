# SPDX-License-Identifier: Apache-2.0
"""A checkpoint seen in canonical form."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onebasin.symmetry.gauge.canonical import Plan, plan
from onebasin.symmetry.gauge.widening import eps_factor, widen

from .folder import Checkpoint


class Canonical(Checkpoint):
    """The same model with every parameter that its function does not see fixed by rule; reads like a checkpoint.

    Every tensor is made when it is read, from its own file and those that move into it. Only vectors stay in memory.
    dtype: of the arithmetic, float32 or float64. config_updates: what its config must say (an untied head, say).
    """

    def __init__(self, base: Checkpoint, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base.folder, base._family)
        self.given, self.dtype, self._base = base.given, dtype, base
        self._follow(plan(base.signature))

    def _follow(self, form: Plan) -> None:
        self._plan = form
        self._kept: dict[tuple[str, int], Tensor] = {}
        self.__dict__["signature"] = form.signature
        self.config_updates = form.config_updates
        self.notes = form.log

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self._plan.tensor(role, self._start, self._kept).to(device=device, dtype=dtype)

    def _start(self, role: str) -> Tensor:
        return self._base.read(role, self.dtype)


class Widened(Canonical):
    """A narrower model inside the shapes of a wider one, and in canonical form there; the function stays.

    Raises ValueError, naming the space, where that cannot be exact.
    """

    def __init__(self, narrow: Canonical, wide: Checkpoint) -> None:
        Checkpoint.__init__(self, narrow.folder, narrow._family)
        self.given, self.dtype, self._base = narrow.given, narrow.dtype, narrow
        kept = {role: entry for role, entry in wide.signature.tensors.items() if role in narrow.signature.tensors}
        self._wide = wide.signature
        self._follow(plan(replace(wide.signature, tensors=kept, temperature=narrow.signature.temperature)))
        sizes = {key: value for key, value in wide.raw_config.items() if isinstance(value, int)}
        self.config_updates = {**sizes, **narrow.config_updates, **self.config_updates}
        eps, factor = narrow.signature.eps, eps_factor(narrow.signature, wide.signature)
        if factor != 1 and eps:
            self.config_updates[eps] = narrow.config[eps] * factor
        self.notes = [*narrow.notes, f"widened '{self.given}' to the sizes of '{wide.given}'"]

    def _start(self, role: str) -> Tensor:
        return widen(self._base.signature, {role: self._base.read(role, self.dtype)}, self._wide)[role]
