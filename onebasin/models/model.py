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
    """A model whose tensors are read one by one. Its properties agree with its signature.

    name: for messages and cards. origin: the folder that it comes from, with its files, stored dtypes and tokenizer.
    raw_config: the contents of its config.json. config: the same with the defaults of its class filled in. notes:
    decisions that were made on the way from the folder to these tensors, for the user.
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
    """Return the number of parameters in all tensors of a model."""
    return sum(prod(entry.shape) for entry in model.signature.tensors.values())


class View:
    """A changed view of a model; everything that it does not change comes from its base.

    Args:
        base: the model, which opens and closes the files.
        signature: of the view's tensors (default: as in the base).
        updates: values that are added to the config or replaced in it.
        notes: in addition to those of the base.

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
        """Return the same view with all arithmetic in `dtype`, also in the views below it."""
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
    """A model with other tensors, given by role."""

    def __init__(self, base: Model, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(base)
        self.tensors = tensors

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        entry = self.signature.tensors[role]
        return self.tensors[role if entry.stored else str(entry.alias)].to(device=device, dtype=dtype)
