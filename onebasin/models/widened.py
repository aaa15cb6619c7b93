# SPDX-License-Identifier: Apache-2.0
"""A narrower model seen in the shapes of a wider one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onebasin.symmetry.gauge.widening import eps_factor, widen

from .canonical import Canonical
from .model import Model, View


class Widened(Canonical):
    """A model in canonical form, in the shapes and with the sizes of a wider one; the function stays.

    Args:
        base: the narrower model.
        like: the wider model, in canonical form.

    Raises:
        ValueError: naming the space, where that cannot be exact.
    """

    def __init__(self, base: Canonical, like: Model) -> None:
        super().__init__(_Embedded(base, like), base.dtype)


class _Embedded(View):
    """The tensors of `base` in the shapes of `like`."""

    def __init__(self, base: Canonical, like: Model) -> None:
        narrow, wide = base.signature, like.signature
        kept = {role: entry for role, entry in wide.tensors.items() if role in narrow.tensors}
        super().__init__(
            base,
            replace(wide, tensors=kept, temperature=narrow.temperature),
            {**sizes_of(like.raw_config), **base.updates, **_eps(base, like)},
            [f"widened '{base.name}' to the sizes of '{like.name}'"],
        )
        self.like, self.dtype = wide, base.dtype

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        wide = widen(self.base.signature, {role: self.base.read(role, self.dtype)}, self.like)[role]
        return wide.to(device=device, dtype=dtype)


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole numbers of a config, which hold all of its sizes."""
    return {key: value for key, value in config.items() if isinstance(value, int)}


def _eps(base: Model, like: Model) -> dict[str, Any]:
    """Return what the config says of the norms' eps, which is stored for the narrower model's width."""
    eps, factor = base.signature.eps, eps_factor(base.signature, like.signature)
    return {eps: base.config[eps] * factor} if factor != 1 and eps else {}
