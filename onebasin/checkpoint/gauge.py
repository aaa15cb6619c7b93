# SPDX-License-Identifier: Apache-2.0
"""A checkpoint seen in canonical form."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onebasin.symmetry.canonical import canonical
from onebasin.symmetry.widths import eps_factor, widen

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


class Widened(Canonical):
    """A narrower model inside the shapes of a wider one, and in canonical form there; the function stays.

    Raises ValueError, naming the space, where that cannot be exact.
    """

    def __init__(self, narrow: Canonical, wide: Checkpoint) -> None:
        Checkpoint.__init__(self, narrow.folder, narrow._family)
        self.given, self.dtype = narrow.given, narrow.dtype
        tensors = {role: narrow.read(role, narrow.dtype) for role in narrow.signature.tensors}
        kept = {role: entry for role, entry in wide.signature.tensors.items() if role in tensors}
        signature = replace(wide.signature, tensors=kept, temperature=narrow.signature.temperature)
        form = canonical(signature, widen(narrow.signature, tensors, wide.signature))
        self.__dict__["signature"] = form.signature
        self._tensors = form.tensors
        sizes = {key: value for key, value in wide.raw_config.items() if isinstance(value, int)}
        self.config_updates = {**sizes, **narrow.config_updates, **form.config_updates}
        eps, factor = narrow.signature.eps, eps_factor(narrow.signature, wide.signature)
        if factor != 1 and eps:
            self.config_updates[eps] = narrow.config[eps] * factor
        self.notes = [*narrow.notes, f"widened '{self.given}' to the sizes of '{wide.given}'"]
