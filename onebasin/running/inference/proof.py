# SPDX-License-Identifier: Apache-2.0
"""The proof of a table: random elements and the canonical form must leave the outputs of twins unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from onebasin.running import twins
from onebasin.running.trial import scrambling
from onebasin.symmetry import acting_groups, read_table, resolve
from onebasin.symmetry.gauge.canonical import Canonical, canonical

from .tracing import Traced, configured, kind_of, kinds, restored, shuffle

TOLERANCE = 1e-9


def proved(text: str, *found: Traced | None) -> tuple[float, str]:
    """Return the largest change of the outputs of twins by the canonical form and by random elements in every space,
    and the first level at which it is too large, where the proof ends.

    Raises:
        ValueError: The outputs of a twin do not depend on its parameters, so they prove nothing.
    """
    worst = 0.0
    for twin in found:
        for level, names, change in _levels(text, twin) if twin is not None else ():
            worst = max(worst, departure := change(None))
            if worst > TOLERANCE:
                return worst, level
            if names and departure == 0 and twin is not None and _deaf(twin):
                raise ValueError("its outputs do not depend on its parameters")
    return worst, ""


def _deaf(found: Traced) -> bool:
    """Whether the outputs of a twin stay the same when its parameters are shuffled."""
    before = found.outputs
    with restored(found.own):
        shuffle(found.own.values(), 0)
        return all(map(_equal, before, twins.outputs(found.model, found.inputs)))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN in the same places."""
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def to_blame(text: str, *found: Traced | None) -> dict[str, float]:
    """Return the spaces whose random elements change the outputs of twins, and by how much. Those that only move in the
    canonical form are found once it leaves the outputs unchanged.

    Raises:
        ValueError: The canonical form changes them, and no space is to blame.
    """
    blame: dict[str, float] = {}
    levels = [each for twin in found if twin is not None for each in _levels(text, twin)]
    for level, names, change in sorted(levels, key=lambda each: each[0] == "invertible"):
        if level == "invertible" and change(()) > TOLERANCE:
            if not blame:
                raise ValueError("the table's notes on constants change the outputs")
            break
        blame |= _blamed(change, sorted(names - blame.keys()))
    return blame


def unmoved(text: str, *found: Traced | None) -> set[str]:
    """Return the tensors, by name without numbers, from which the canonical form takes constants that no other tensor
    can absorb: if they keep them, it leaves the outputs of twins unchanged."""
    wrong = set[str]()
    for twin in found:
        if twin is not None:
            proof = _Proof.of(text, twin)
            wrong |= _blamed(proof.canonical_change, sorted(kinds(proof.form.signature.tensors) - wrong)).keys()
    return wrong


def _levels(text: str, found: Traced) -> Iterator[tuple[str, set[str], Callable[[Collection[str] | None], float]]]:
    """Yield every level, the spaces that move there, and a function that returns the change of the twin's outputs by
    random elements in some of them, or in all (None)."""
    proof = _Proof.of(text, found)
    for level in ("permutation", "paper", "invertible"):
        form = proof.form if level != "invertible" else canonical(proof.form.signature, proof.form.tensors)
        names = {form.signature.spaces[root].name for root in acting_groups(form.signature, level, rescale="joint")}
        yield level, names, partial(proof.change, form, level)


@dataclass(frozen=True)
class _Proof:
    """A twin and what a table says of it. form: its tensors by role, and their signature."""

    found: Traced
    form: Canonical

    @classmethod
    def of(cls, text: str, found: Traced) -> _Proof:
        """Read a twin by a table. Tied tensors are stored once, as in any file that the class writes, and restored to
        every name."""
        copies = torch.cat([torch.full((one.numel(),), name in found.tied) for name, one in found.own.items()])
        disk = {name: found.entries[places] for name, places in found.file.items() if not copies[places].any()}
        shapes = {name: tuple(tensor.shape) for name, tensor in (disk | found.constants).items()}
        config = {**found.model.config.to_dict(), "architectures": [type(found.model).__name__]}
        signature = resolve(read_table(text, "inferred"), shapes, config)
        values = {role: entry.whole([disk[name] for name in entry.names]) for role, entry in signature.tensors.items()}
        return cls(found, Canonical(signature, values))

    def change(self, form: Canonical, level: str, only: Collection[str] | None) -> float:
        """Return the change of the twin's outputs when it holds the tensors of a form, moved by random elements in
        some of the spaces that move at a level, or in all (None)."""
        alignment = scrambling(form.signature, level, only)
        found, tied = self.found, self.found.tied
        entries, given = found.entries.clone(), torch.zeros(len(found.entries), dtype=torch.bool)
        for role, entry in form.signature.tensors.items():
            for name, part in entry.split(alignment.apply(form.signature, role, form.tensors[role])):
                entries[found.places[name]], given[found.places[name]] = part.flatten(), True
        moved, own = found.apart(entries), found.own
        homes = {name: tied[name] for name, stored in found.apart(given).items() if name in tied and not stored.any()}
        with restored(own, found.apart(found.entries)), configured(found.model, form.config_updates), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(moved[homes.get(name, name)])
            after = twins.outputs(found.model, found.inputs)
        return max(_difference(a, b) for a, b in zip(found.outputs, after, strict=True))

    def canonical_change(self, names: Collection[str]) -> float:
        """Return the change by a canonical form that takes something only from tensors of these names."""
        tensors = {role: entry if kind_of(role) in names else replace(entry, notes={**entry.notes, "stays": ""})
                   for role, entry in self.form.signature.tensors.items()}  # fmt: skip
        signature = replace(self.form.signature, tensors=tensors)
        return self.change(canonical(signature, self.form.tensors), "invertible", ())


def _blamed(
    change: Callable[[Collection[str]], float], names: Sequence[str], beside: Sequence[str] = ()
) -> dict[str, float]:
    """Return the names that change the outputs, and by how much, found by bisection: most change nothing.

    If neither half does alone, one does together with the other (Zeller and Hildebrandt, Simplifying and isolating
    failure-inducing input, 2002).
    """
    if not names or (worst := change([*beside, *names])) <= TOLERANCE:
        return {}
    if len(names) == 1:
        return {names[0]: worst}
    one, other = names[: len(names) // 2], names[len(names) // 2 :]
    alone = _blamed(change, one, beside) | _blamed(change, other, beside)
    return alone or _blamed(change, one, [*beside, *other]) or _blamed(change, other, [*beside, *one])


def _difference(before: Tensor, after: Tensor) -> float:
    """Return the relative difference of two outputs; infinity and NaN have to stay in their places."""
    if before.shape != after.shape:  # a model may decide by its weights how long its output is
        return inf
    known = before.isfinite() & after.isfinite()
    if not _equal(before[~known], after[~known]):
        return inf
    return float((before - after)[known].norm() / before[known].norm().clamp_min(1e-30))
