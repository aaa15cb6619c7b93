# SPDX-License-Identifier: Apache-2.0
"""The interface of a model, whether it is a folder or a view of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from onebasin.symmetry import Signature

if TYPE_CHECKING:
    from typing_extensions import Self

    from .folder import Folder


class Model(Protocol):
    """A model whose tensors are read one by one. All that it says of itself agrees with its signature.

    name: what messages and cards call it. origin: the folder that it comes from, with its files, stored dtypes and
    tokenizer. raw_config: what its config.json says. config: the same with the defaults of its class filled in. notes:
    what was decided on the way from the folder to these tensors.
    """

    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> Folder: ...
    @property
    def raw_config(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Return the tensor `role` of the signature, in `dtype` on `device`."""
        ...


def numel(model: Model) -> int:
    """Return how many numbers a model's tensors hold together."""
    return sum(prod(entry.shape) for entry in model.signature.tensors.values())


class View:
    """A model seen otherwise: what a view does not change is that of its base.

    Args:
        base: the model that is looked at; it opens and closes the files.
        signature: the tensors as they are seen here (default: as in the base).
        updates: what the config says besides, or instead.
        notes: what a reader of the result should know besides the base's notes.

    dtype: of the arithmetic, where there is any.
    """

    def __init__(
        self,
        base: Model,
        signature: Signature | None = None,
        updates: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.base, self.signature = base, signature or base.signature
        self.dtype = torch.float32
        self.updates, self.notes = dict(updates or {}), [*base.notes, *notes]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    def computed_in(self, dtype: torch.dtype) -> Self:
        """Return the same view, all arithmetic under it done in `dtype`."""
        other = copy(self)
        other.dtype = dtype
        if isinstance(self.base, View):
            other.base = self.base.computed_in(dtype)
        return other

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def origin(self) -> Folder:
        return self.base.origin

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        return {**self.base.raw_config, **self.updates}

    @cached_property
    def config(self) -> dict[str, Any]:
        return {**self.base.config, **self.updates}

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.base.read(role, dtype, device)


class Held(View):
    """A model that holds other tensors, by role."""

    def __init__(self, base: Model, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(base)
        self.tensors = tensors

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        entry = self.signature.tensors[role]
        return self.tensors[role if entry.stored else str(entry.alias)].to(device=device, dtype=dtype)
