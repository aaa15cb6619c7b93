# SPDX-License-Identifier: Apache-2.0
"""The canonical form: redundant parameters are removed before any search, by exact `rewrites`.

After that, any orthogonal O with O 1 = 1 commutes with a stock LayerNorm, and the result is an ordinary model. A second
run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..tables.signature import Signature
from ..tables.ties import bare, parted, separate, share, with_ties, without_ties
from .dataflow import joined, outlets
from .evening import evened, evening
from .rewrites import Step, steps

EVENED = "the weights of norms behind a sum were made even, which changes the function a little"


@dataclass(frozen=True)
class Canonical:
    """A model in canonical form. config_updates: changes of config.json. log: notes for the user."""

    signature: Signature
    tensors: dict[str, Tensor]
    config_updates: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def canonical(signature: Signature, tensors: Mapping[str, Tensor]) -> Canonical:
    """Return the canonical form of a model, which computes the same function up to rounding.

    A tied head that prevents rotations of the stream gets a tensor of its own: a new role in the signature, and
    `tie_word_embeddings: False` in `config_updates`.

    tensors: role -> floating-point tensor, float32 or float64; they are not changed.
    """
    form = plan(signature)
    copies = {role: tensor.clone(memory_format=torch.contiguous_format) for role, tensor in tensors.items()}
    shared = share(form.whole, copies)
    for step in form.steps:
        step.run(shared)
    return Canonical(form.signature, {role: shared[role] for role in form.signature.tensors}, form.config_updates,
                     form.log)  # fmt: skip


@dataclass(frozen=True)
class CanonicalForm:
    """The steps to a model's canonical form, which its signature determines.

    whole: the signature for the steps, including ties. signature: of the form. untied: tensors that are no longer tied.
    uneven: the signature before its norms are made even, which changes the function; None if they are not.
    """

    whole: Signature
    signature: Signature
    untied: list[str]
    uneven: Signature | None = None

    @cached_property
    def steps(self) -> Sequence[Step]:
        """All steps in order. Finding them takes most of the time, and the signature alone does not need them."""
        first = evening(joined(self.uneven)) if self.uneven else ()
        return [*first, *steps(joined(self.whole))]

    @property
    def config_updates(self) -> dict[str, Any]:
        return {"tie_word_embeddings": False} if self.untied else {}

    @property
    def log(self) -> list[str]:
        why = "its space can rotate by itself" if self.uneven else "the norm before it is folded into it"
        untied = [f"'{role}' is no longer tied, since {why}" for role in self.untied]
        return [*untied, *([EVENED] if self.uneven else [])]

    def home(self, role: str) -> str:
        """Return the role with the numbers of a tied one."""
        return self.whole.tensors[role].alias or role

    @cached_property
    def changes(self) -> dict[str, list[tuple[int, Step]]]:
        found: dict[str, list[tuple[int, Step]]] = {}
        for number, step in enumerate(self.steps):
            found.setdefault(self.home(step.role), []).append((number, step))
        return found

    def tensor(
        self, role: str, read: Callable[[str], Tensor], kept: dict[tuple[str, int], Tensor], before: int | None = None
    ) -> Tensor:
        """Return the tensor `role` of the form, or its state before step `before`.

        read: role -> stored tensor, called for every tensor that this one depends on. kept: a cache of vectors for
        later calls; matrices are not kept.
        """
        home = self.home(role)
        changes = [change for change in self.changes.get(home, []) if before is None or change[0] < before]
        if (home, len(changes)) in kept:
            return kept[home, len(changes)]
        entry = self.whole.tensors[home]
        tensor = bare(entry) if "bare" in entry.notes else read(home if entry.stored else entry.notes["tied"])
        tensor = tensor.clone(memory_format=torch.contiguous_format) if changes else tensor
        for number, step in changes:
            given = {other: self.tensor(other, read, kept, number) for other in step.given}
            step.run({**given, step.role: tensor})
        if tensor.dim() == 1:
            kept[home, len(changes)] = tensor
        return tensor


def plan(signature: Signature, even: bool = False) -> CanonicalForm:
    """Return the steps to the canonical form. even: whether norms that write back are first made even, where this gives
    a stream more freedom; see `evening`."""
    stored, whole = signature, with_ties(signature)
    level = evened(whole) if even else None
    untied = _in_the_way(joined(level or whole))
    if untied:
        whole, level = separate(whole), level and separate(level)
    elif even and level is None and (level := evened(parted(whole))):
        untied = [role for role, entry in whole.tensors.items() if entry.alias is not None]
        whole = parted(whole)
    form = level or whole
    return CanonicalForm(
        _read_from(stored, form), without_ties(form), untied, _read_from(stored, whole) if level else None
    )


def _read_from(stored: Signature, form: Signature) -> Signature:
    """Return a form's signature in which tensors that the file omits are read from those that they were tied to;
    omitted ties remain omitted."""
    entries = {role: replace(e, stored=role in stored.tensors) for role, e in form.tensors.items()}
    return replace(form, tensors=entries)


def _in_the_way(signature: Signature) -> list[str]:
    """Return the tied readers of norms that have to be folded before their space can rotate."""
    return [
        role
        for outlet in outlets(signature)
        if outlet.free and "ones" in signature.moves(outlet.norm.source)
        for role in outlet.readers
        if role in signature.sharing
    ]
