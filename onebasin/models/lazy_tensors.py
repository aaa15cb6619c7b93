# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that is yet to be computed: in threads while they are written, or by a cluster's tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from onebasin.engine import in_order
from onebasin.symmetry import Signature

from .model import Model

Group = Sequence[str]  # roles that are computed together


@dataclass(frozen=True)
class LazyTensors:
    """A way to compute the tensors of a model. Iterating computes them in order, with a few in memory, and yields
    (name on disk, tensor).

    signature: the roles, shapes and names of the tensors. make: returns the tensors of a group by role. Calls are
    independent of each other, never change a tensor that was returned, and can be pickled if `ray` is set. workers: the
    number of groups that are computed at a time, which changes no tensor. ray: the address of a Ray cluster whose tasks
    write the files, see `write_model`.
    """

    signature: Signature
    make: Callable[[Group], Mapping[str, Tensor]]
    groups: Sequence[Group]
    workers: int | None = None
    ray: str | None = None

    @classmethod
    def of_model(
        cls, model: Model, dtype: torch.dtype, device: str = "cpu", workers: int | None = None, ray: str | None = None
    ) -> LazyTensors:
        """Return the tensors of `model`, read one by one; `dtype` is that of the arithmetic."""

        def make(roles: Group) -> dict[str, Tensor]:
            return {role: model.read(role, dtype, device) for role in roles}

        return cls(model.signature, make, [(role,) for role in model.signature.tensors], workers, ray)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return chain.from_iterable(in_order(self.of, self.groups, self.workers))

    def of(self, group: Group) -> list[tuple[str, Tensor]]:
        """Return the tensors of one group under their names on disk."""
        made = self.make(group)
        return [pair for role in group for pair in self.signature.tensors[role].split(made[role])]

    def one(self, name: str) -> Tensor:
        """Return one tensor by its name on disk; its whole group is computed."""
        return dict(self.of(self._group[name]))[name]

    def some(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return several tensors by their names on disk."""
        groups = dict.fromkeys(self._group[name] for name in names)
        made = chain.from_iterable(in_order(self.of, groups, self.workers))
        return {name: tensor for name, tensor in made if name in names}

    @cached_property
    def like(self) -> dict[str, Tensor]:
        """All tensors by name, on the meta device: shapes without values."""
        return {name: tensor for group in self.groups for name, tensor in self.foreseen(group)}

    @cached_property
    def _group(self) -> dict[str, Group]:
        return {name: group for group in self.groups for name, _ in self.foreseen(group)}

    def foreseen(self, group: Group) -> list[tuple[str, Tensor]]:
        """Return the same as `of` on the meta device: names and shapes, without values."""
        entries = {role: self.signature.tensors[role] for role in group}
        made = {role: torch.empty(entry.shape, device="meta") for role, entry in entries.items()}
        return [pair for role, entry in entries.items() for pair in entry.split(made[role])]
