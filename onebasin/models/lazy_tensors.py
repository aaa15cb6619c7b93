# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that is still to be made: in threads as they are written, or by whoever writes a file."""

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

Group = Sequence[str]  # roles that are made together


@dataclass(frozen=True)
class LazyTensors:
    """How the tensors of a model are made. Iterating makes them: (name on disk, tensor), in order, a few in memory.

    signature: roles, shapes and names of what is made. make: the tensors of a group, by role; it shares nothing with
    another call, leaves what it gave as it is, and can be pickled where `ray` is set. workers: groups that are made at
    a time, on which no tensor depends. ray: address of a Ray cluster whose tasks write the files, see `write_model`.
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
        """The tensors of one group under their names on disk."""
        made = self.make(group)
        return [pair for role in group for pair in self.signature.tensors[role].split(made[role])]

    def one(self, name: str) -> Tensor:
        """One tensor by its name on disk; its whole group is made."""
        return dict(self.of(self._group[name]))[name]

    def some(self, names: Collection[str]) -> dict[str, Tensor]:
        """Several tensors by their names on disk."""
        groups = dict.fromkeys(self._group[name] for name in names)
        made = chain.from_iterable(in_order(self.of, groups, self.workers))
        return {name: tensor for name, tensor in made if name in names}

    @cached_property
    def like(self) -> dict[str, Tensor]:
        """All of them without numbers, by name."""
        return {name: tensor for group in self.groups for name, tensor in self.foreseen(group)}

    @cached_property
    def _group(self) -> dict[str, Group]:
        return {name: group for group in self.groups for name, _ in self.foreseen(group)}

    def foreseen(self, group: Group) -> list[tuple[str, Tensor]]:
        """The same without numbers (on the meta device): names and shapes."""
        entries = {role: self.signature.tensors[role] for role in group}
        made = {role: torch.empty(entry.shape, device="meta") for role, entry in entries.items()}
        return [pair for role, entry in entries.items() for pair in entry.split(made[role])]
