# SPDX-License-Identifier: Apache-2.0
"""Views of a model: in canonical form, in the shapes of a wider one, and rewritten by an alignment, or by anything else
that changes its tensors one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from onebasin.symmetry import Signature
from onebasin.symmetry.gauge.canonical import plan
from onebasin.symmetry.gauge.widening import eps_factor, widen

from .configuration import with_all_else_kept
from .model import Model, View


class Canonical(View):
    """The same model in canonical form: parameters that its function does not depend on have fixed values.

    A tensor is computed when it is read, from those on disk that enter it. Only vectors are kept in memory. The config
    is changed as the form requires (for an untied head, say).

    dtype: of the arithmetic, float32 or float64. even: whether norms that write back are made even, so that the streams
    of post-norm models can rotate. That changes the function, see `onebasin.symmetry.gauge.evening`.
    """

    def __init__(self, base: Model, dtype: torch.dtype = torch.float32, even: bool = False) -> None:
        self.form = plan(base.signature, even)
        updates = with_all_else_kept(base.raw_config, self.form.config_updates)
        super().__init__(base, self.form.signature, updates, self.form.log)
        self.dtype = dtype
        self._kept: dict[tuple[str, int], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, or for other arithmetic, which computes the vectors itself."""
        return {**self.__dict__, "_kept": {}}

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        start = partial(self.base.read, dtype=self.dtype)
        return self.form.tensor(role, start, self._kept).to(device=device, dtype=dtype)

    @property
    def even(self) -> bool:
        """Whether norms were made even, so that the function is not quite that of the base."""
        return self.form.uneven is not None


class Widened(Canonical):
    """A model in canonical form with the shapes and sizes of a wider one, and the same function as before.

    like: the wider model, in canonical form.

    Raises:
        ValueError: for a space that cannot be widened exactly.
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
    """Return the integers of a config, among which are all of its sizes."""
    return {key: value for key, value in config.items() if isinstance(value, int)}


def _eps(base: Model, like: Model) -> dict[str, Any]:
    """Return the new value of the norms' eps in the config, where that depends on the width."""
    eps, factor = base.signature.eps, eps_factor(base.signature, like.signature)
    return {eps: base.config[eps] * factor} if factor != 1 and eps else {}


class Applies(Protocol):
    """Anything that rewrites the tensors of a model one by one: an alignment, exact or softened."""

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """Rewrite the tensor `role` of a model with this signature."""
        ...


A = TypeVar("A", bound=Applies)


class Rewritten(View, Generic[A]):
    """The model `base`, with every tensor rewritten by `alignment` when it is read.

    dtype: of the arithmetic, float32 or float64.
    """

    def __init__(self, base: Model, alignment: A, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base)
        self.alignment, self.dtype = alignment, dtype

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.alignment.apply(self.base.signature, role, self.base.read(role, self.dtype, device)).to(dtype)
