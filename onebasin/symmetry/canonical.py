# SPDX-License-Identifier: Apache-2.0
"""The canonical form: freedom that the function does not see, removed before any search.

Every rewrite is exact, local to a few tensors, and derived from the signature alone:

    scales    a factor per channel (LayerScale) moves into what writes those channels
    tables    the mean row of a summed table moves into the table it is summed with
    norms     weight and bias of a norm move into what reads its output; readers of a LayerNorm lose the all-ones
              direction, which a centred vector cannot reach
    passed    a value bias moves through attention into the output bias, a post-LN bias into the biases up to the
              next norm
    sums      biases that enter one sum (attention and FFN side by side) move into the first of them
    unseen    a key bias under softmax is set to zero, the mean of what a softmax runs over (a router's rows), and what
              a vector has across all that it meets
    writers   what only ever enters LayerNorms, of the stream or of a head's queries and keys, loses its all-ones
              direction

Each is a list of steps that change one tensor given a few others, so that any tensor of the form can be made by itself
from those it depends on. Nothing is divided by a norm's weight, so a weight of zero is as good as any other. A second
run changes nothing.
After it any orthogonal O with O 1 = 1 commutes with a stock LayerNorm, and the result is an ordinary model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .axes import Axis, Flat, Leaf, blocks, size
from .axes import leaves as leaves_of
from .signature import MOVES, Entry, Norm, Signature

Block = tuple[Tensor, tuple[Leaf, ...]]


@dataclass(frozen=True)
class Canonical:
    """A model in canonical form. config_updates: what config.json must say. log: what a reader should know."""

    signature: Signature
    tensors: dict[str, Tensor]
    config_updates: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def canonical(signature: Signature, tensors: Mapping[str, Tensor]) -> Canonical:
    """The canonical form of a model; the function stays as it is, up to rounding.

    tensors: role -> floating-point tensor, float32 or float64; they are not changed.
    Where a tied head stands in the way of the stream's rotation it gets a tensor of its own: a new role in the
    signature, and `tie_word_embeddings: False` in `config_updates`.
    """
    form = plan(signature)
    copies = {role: tensor.clone(memory_format=torch.contiguous_format) for role, tensor in tensors.items()}
    shared = share(form.whole, copies)
    for step in form.steps:
        step.run(shared)
    return Canonical(form.signature, {role: shared[role] for role in form.signature.tensors}, form.config_updates,
                     form.log)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One tensor changed in place: `role`, by `run`, which is called with it and with the tensors `given`, by role."""

    role: str
    given: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Plan:
    """How a model's canonical form is made, known from its signature alone.

    whole: the signature while the steps run, ties included. signature: of the form. untied: tensors that get numbers of
    their own.
    """

    whole: Signature
    signature: Signature
    untied: list[str]

    @cached_property
    def steps(self) -> Sequence[Step]:
        """In order. Finding them takes most of the time, and who only asks for the signature needs none."""
        rewrites = (_scales, _tables, _norms, _passed, _sums, _unseen, _writers)
        return [step for rewrite in rewrites for step in rewrite(joined(self.whole))]

    @property
    def config_updates(self) -> dict[str, Any]:
        return {"tie_word_embeddings": False} if self.untied else {}

    @property
    def log(self) -> list[str]:
        return [f"'{role}' no longer shares its numbers: the norm before it moves into it" for role in self.untied]

    def home(self, role: str) -> str:
        """The role that holds the numbers of a tied one."""
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
        """The tensor `role` of the form, or as it is before step `before`.

        read: role -> stored tensor, called for every tensor that this one depends on; they are let go, but for vectors,
        which go into `kept` for the next call.
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


def plan(signature: Signature) -> Plan:
    """The way to the canonical form."""
    stored, signature = signature, with_ties(signature)
    untied = _in_the_way(joined(signature))
    if untied:
        signature = separate(signature)
    # What the file leaves out is read from where it was tied to; ties that it leaves out stay out.
    entries = {role: replace(e, stored=role in stored.tensors) for role, e in signature.tensors.items()}
    whole = replace(signature, tensors=entries)
    return Plan(whole, without_ties(signature), untied)


# --- ties -----------------------------------------------------------------------------------------------------


def with_ties(signature: Signature) -> Signature:
    """The signature with the tied tensors that the file leaves out, heads at the end, others (embeddings of a decoder)
    beside what they are tied to; and with the weights of norms that have none, in their places."""
    tensors: dict[str, Entry] = {}
    for role, entry in signature.tensors.items():
        tensors |= {other: e for other, e in signature.absent.items() if e.notes.get("bare") == role}
        tensors[role] = entry
        tensors |= {other: e for other, e in signature.absent.items() if e.notes.get("tied") == role and not e.head}
    return replace(signature, tensors={**tensors, **signature.absent}, absent={})


def without_ties(signature: Signature) -> Signature:
    stored = {role: entry for role, entry in signature.tensors.items() if entry.stored}
    absent = {role: entry for role, entry in signature.tensors.items() if not entry.stored}
    return replace(signature, tensors=stored, absent=absent)


def separate(signature: Signature) -> Signature:
    """The signature in which every tied tensor has numbers of its own."""
    tensors = {role: replace(e, alias=None, stored="bare" not in e.notes) for role, e in signature.tensors.items()}
    return replace(signature, tensors=tensors)


def bare(entry: Entry) -> Tensor:
    """What a norm that has no numbers multiplies by."""
    return torch.ones(entry.shape)


def share(signature: Signature, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every role's tensor. Tied ones are the same object, so that writing into one writes into both; one that the
    file left out and that is tied no longer gets a copy."""
    found = dict(tensors)
    for role, entry in signature.tensors.items():
        if entry.alias is not None:
            found[role] = found[entry.alias]
        elif "bare" in entry.notes:
            found[role] = bare(entry).to(next(iter(tensors.values())))
        elif role not in found:
            found[role] = found[entry.notes["tied"]].clone()
    return found


def tied(signature: Signature, role: str) -> bool:
    """Whether another tensor holds the same numbers, so that they cannot be changed for one use alone."""
    return signature.tensors[role].alias is not None or any(e.alias == role for e in signature.tensors.values())


def _in_the_way(signature: Signature) -> list[str]:
    """Tied readers of norms that must fold for their space to rotate."""
    return [
        role
        for outlet in outlets(signature)
        if outlet.free and "ones" in MOVES[signature.kinds[signature.root[outlet.norm.source]]]
        for role in outlet.readers
        if tied(signature, role)
    ]


def joined(signature: Signature) -> Signature:
    """The signature in which the spaces that a norm takes as one vector, `(band inside)`, are one space, where only
    their places move. What reads the inner one alone (a grouped convolution) is noted as reading it."""
    outer: dict[str, tuple[Axis, ...]] = {}
    for entry in signature.tensors.values():
        if entry.norm and isinstance(entry.axes[0], Flat) and len(entry.norm.over) > len(entry.norm.parts):
            root = signature.root[entry.norm.source]
            if MOVES[signature.kinds[root]] <= {"permute"}:
                outer |= dict.fromkeys(signature.members[root], entry.axes[0].parts[:-1])

    def one(axis: Axis) -> Axis:
        if isinstance(axis, Flat) and isinstance(last := axis.parts[-1], Leaf) and last.space in outer:
            return last
        return Leaf(str(signature.sizes[axis.space])) if isinstance(axis, Leaf) and axis.space in outer else axis

    tensors = {}
    for role, entry in signature.tensors.items():
        axes = tuple(one(axis) for axis in entry.axes)
        alone = [axis.space for axis in entry.axes if isinstance(axis, Leaf) and axis.space in outer]
        notes = {**entry.notes, "reads": " ".join(alone)} if alone else entry.notes
        tensors[role] = replace(entry, axes=axes, notes=notes)
    spaces = dict(signature.spaces)
    for key, parts in outer.items():
        whole = size(Flat((*parts, Leaf(key))), signature.sizes)
        spaces[key] = replace(signature.spaces[key], size=whole, batch=())
    return replace(signature, tensors=tensors, spaces=spaces) if outer else signature


# --- who reads and writes -------------------------------------------------------------------------------------


def cut(signature: Signature, role: str, tensor: Tensor) -> list[Block]:
    """Views of a tensor with one dimension per leaf."""
    return blocks(tensor, signature.tensors[role].axes, signature.sizes)


def along(signature: Signature, role: str, tensor: Tensor, leaf: Leaf) -> Iterator[Tensor]:
    """Views of the parts of a tensor that have this leaf, with its dimension last."""
    for view, axes in cut(signature, role, tensor):
        if leaf in axes:
            yield view.movedim(axes.index(leaf), -1)


def fed(signature: Signature, outlet: Outlet, reader: str, tensor: Tensor) -> Iterator[Tensor]:
    """Views of the parts of a reader of a norm's output, with what the norm puts out last: one vector, or several side
    by side that are normalised together."""
    for view, axes in cut(signature, reader, tensor):
        if outlet.source[0] in axes:
            dim = axes.index(outlet.source[0])
            if outlet.norm.copies == 1:
                yield view.movedim(dim, -1)
            else:
                yield (pair := view.movedim((dim - 1, dim), (-2, -1))).view(*pair.shape[:-2], -1)


def has(signature: Signature, role: str, leaf: Leaf) -> bool:
    entry = signature.tensors[role]
    return leaf in signature.leaves(entry) or (leaf.dual and leaf.space in entry.notes.get("reads", "").split())


def readers(signature: Signature, space: str) -> list[str]:
    """Roles of the tensors that read from exactly this space."""
    return [role for role in signature.tensors if has(signature, role, Leaf(space, dual=True))]


@dataclass(frozen=True)
class Outlet:
    """Where a norm's output goes.

    readers: what reads it, and nothing else. writers: what is added to it before the next norm (post-LN), with that
    norm's sum as their only way out. free: nothing but the readers sees it, so the norm's weight, if it has one, can
    move into them.
    """

    role: str
    norm: Norm
    bias: str | None
    readers: list[str]
    writers: list[str]
    free: bool

    @property
    def source(self) -> tuple[Leaf]:
        return (Leaf(self.norm.target, dual=True),)


def outlets(signature: Signature) -> Iterator[Outlet]:
    """The norms whose readers the signature can tell: those with an output space of their own, and those that write
    back and whose bias `passes`: what they put out is read up to the next norm, and summed there.
    """
    order = list(signature.tensors)
    for role, entry in signature.tensors.items():
        norm, bias = entry.norm, role.removesuffix("weight") + "bias"
        if norm is None:
            continue
        own = bias if bias in order and has(signature, bias, Leaf(norm.target)) else None
        start, stop = 0, None
        if norm.writes_back:
            if own is None or "passes" not in signature.tensors[own].notes:
                continue
            start = order.index(own) + 1
            stop = next((i for i in range(start, len(order)) if normalises(signature, order[i], norm.target)), None)
        stage = order[start:stop] if norm.writes_back else order
        reading = [reader for reader in stage if has(signature, reader, Leaf(norm.target, dual=True))]
        added = [r for r in stage if has(signature, r, Leaf(norm.target))] if norm.writes_back else []
        normed = any(n and n.source == norm.target for n in (signature.tensors[r].norm for r in stage))
        linear = not any("nonlinear" in signature.tensors[reader].notes for reader in reading)
        if reading and linear and not normed:
            target = signature.spaces[norm.target]
            unseen = stop is None and not added and not target.output and bool(MOVES[target.kind])
            free = unseen and "bare" not in entry.notes
            yield Outlet(role, norm, own, reading, added, free)


def normalises(signature: Signature, role: str, space: str) -> bool:
    norm = signature.tensors[role].norm
    return norm is not None and norm.source == space


def returns(signature: Signature, role: str, space: str) -> bool:
    """Whether this is a norm of the space that writes back into it."""
    norm = signature.tensors[role].norm
    return norm is not None and norm.writes_back and space in norm.parts


def bias_of(signature: Signature, reader: str, source: tuple[Leaf, ...]) -> str | None:
    """The bias added to what `reader` makes of the leaves `source`, if the reader has one throughout: its own, or one
    that enters the same sum (the FFN's, where attention beside it has none)."""
    if {"nonlinear", "glu"} & signature.tensors[reader].notes.keys() or not reader.endswith("weight"):
        return None
    named = (role for role, entry in signature.tensors.items() if entry.notes.get("biases") == reader)
    bias = next(named, reader.removesuffix("weight") + "bias")
    if bias not in signature.tensors:
        written = [a for a in signature.tensors[reader].axes if not set(leaves_of(a)) & set(source)]
        one = written[0] if len(written) == 1 else None
        summed = beside(signature, reader, one.space) if isinstance(one, Leaf) and not one.dual else []
        if not summed:
            return None
        bias = summed[0]
    shapes = (torch.empty(signature.tensors[role].shape, device="meta") for role in (reader, bias))
    weights, biases = (_added(signature, role, shape) for role, shape in zip((reader, bias), shapes, strict=True))
    whole = all(any(set(out) < set(axes) for _, out in biases) for _, axes in weights if set(source) <= set(axes))
    return bias if whole else None


def _added(signature: Signature, role: str, tensor: Tensor) -> list[Block]:
    """`cut` without dimensions of one entry, as in BART's `1 vocab`."""
    one = Leaf("1")
    return [
        (view.squeeze([i for i, leaf in enumerate(axes) if leaf == one]), tuple(leaf for leaf in axes if leaf != one))
        for view, axes in cut(signature, role, tensor)
    ]


def beside(signature: Signature, role: str, space: str) -> list[str]:
    """The biases that enter the sum in `space` which `role` writes into: no norm, gain or reader stands between."""
    order = list(signature.tensors)
    if not any(entry.norm and entry.norm.source == space for entry in signature.tensors.values()):
        return []

    def added(some: list[str]) -> Iterator[str]:
        for other in some:
            entry = signature.tensors[other]
            found = list(signature.leaves(entry))
            if Leaf(space, dual=True) in found or (entry.norm and space in (entry.norm.source, entry.norm.target)):
                return
            if found == [Leaf(space)] and other.endswith("weight"):
                return  # a gain, as in wav2vec 2.0's convolutions: what comes before it is normed and scaled
            normed = signature.tensors.get(other.removesuffix("bias") + "weight", entry).norm is not None
            if found == [Leaf(space)] and other.endswith("bias") and not normed and "nonlinear" not in entry.notes:
                yield other

    place = order.index(role)
    return [*list(added(order[:place][::-1]))[::-1], *added(order[place:])]


def traded(signature: Signature) -> Iterator[tuple[str, str]]:
    """Biases that enter the same sum as an earlier one, after that one."""
    for role, entry in signature.tensors.items():
        if len(entry.axes) == 1 and isinstance(entry.axes[0], Leaf) and not tied(signature, role):
            summed = beside(signature, role, entry.axes[0].space)
            if role in summed[1:]:
                yield summed[0], role


def absorb(
    signature: Signature,
    tensors: Mapping[str, Tensor],
    reader: str,
    bias: str,
    constant: Tensor,
    leaves: tuple[Leaf, ...],
) -> None:
    """bias += W c, where c has one dimension for each of `leaves` (primal)."""
    source = tuple(dual(signature, leaf) for leaf in leaves)
    for weight, axes in cut(signature, reader, tensors[reader]):
        fitting = [(target, out) for target, out in _added(signature, bias, tensors[bias]) if set(out) < set(axes)]
        for target, out in fitting if set(source) <= set(axes) else ():
            # In `[ffn | (ffn lift)]` the first part of the bias also fits the second of the weight.
            if not any(set(out) < set(other) for _, other in fitting):
                target += contract(weight, axes, constant, source, out)


def dual(signature: Signature, leaf: Leaf) -> Leaf:
    """The leaf of a reader: primed, except for what batches (heads), which reads and writes alike."""
    batching = {outer for space in signature.spaces.values() for outer in space.batch}
    return leaf if leaf.space in batching or leaf.constant else Leaf(leaf.space, dual=True)


def contract(
    weight: Tensor, axes: tuple[Leaf, ...], other: Tensor, source: tuple[Leaf, ...], out: tuple[Leaf, ...]
) -> Tensor:
    """Einstein sum over all leaves of `weight` and `other` that are not in `out`."""
    number = {leaf: i for i, leaf in enumerate(dict.fromkeys(axes))}
    # A constant axis that `other` lacks has no name to be told by: it gets a number of its own and is summed over.
    alone = [leaf.constant and leaf not in source for leaf in axes]
    first = [len(number) + i if alone[i] else number[leaf] for i, leaf in enumerate(axes)]
    return torch.einsum(weight, first, other, [number[leaf] for leaf in source], [number[leaf] for leaf in out])


def vanishes(signature: Signature, role: str, space: str) -> bool:
    """Whether the all-ones direction of what `role` writes into `space` only ever enters LayerNorms.

    The order of the tensors is that of execution. A norm that writes back ends the sum that `role` writes into;
    where none does, the sum runs through all layers, and all norms and what reads it from here on count.
    """
    if "ones" not in MOVES[signature.spaces[space].kind] or "nonlinear" in signature.tensors[role].notes:
        return False
    entries = list(signature.tensors.values())
    norms = {e.role.removesuffix("weight") + "bias" for e in entries if e.norm and e.norm.writes_back}
    after = entries[list(signature.tensors).index(role) + 1 :]
    for entry in after:
        if entry.norm and entry.norm.source == space and entry.norm.writes_back:
            # What a norm puts out is read or summed before the next: the next is another branch's.
            return entry.norm.kind == "layernorm" and not entry.norm.beside and role not in norms
        if has(signature, entry.role, Leaf(space, dual=True)):
            return False
    reading = [entry.norm for entry in entries if entry.norm and entry.norm.source == space]
    # Of several vectors side by side a norm takes one mean, so ones added to one of them are seen.
    kinds = {norm.kind if norm.copies == 1 else "" for norm in reading if not norm.writes_back}
    return kinds == {"layernorm"} and not signature.spaces[space].output


def writers(signature: Signature) -> Iterator[tuple[str, tuple[Leaf, ...]]]:
    """Tensors (norms left out) and the leaves, parts of one vector, along which their all-ones direction is
    invisible."""
    for role, entry in signature.tensors.items():
        for leaf in signature.leaves(entry):
            if not entry.diagonal and not leaf.dual and vanishes(signature, role, leaf.space):
                yield role, (leaf,)
        norm = entry.norm
        if norm and norm.kind == "layernorm" and norm.writes_back and norm.over == norm.parts:
            space = signature.spaces[norm.source]
            if space.layer is not None and (norm.beside or "ones" not in MOVES[space.kind]):  # queries or keys
                for writer in branch(signature, role):
                    found = signature.leaves(signature.tensors[writer])
                    yield writer, tuple(leaf for leaf in found if leaf.space in norm.parts)


def vectors(signature: Signature, role: str, tensor: Tensor, parts: tuple[Leaf, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Views of a tensor along leaves that are parts of one vector: one view for each, with its dimension last."""
    yield from zip(*(along(signature, role, tensor, leaf) for leaf in parts), strict=True)


def branch(signature: Signature, role: str) -> list[str]:
    """The tensors that write what the norm `role` normalises, where that is not the sum of all: those since the last
    norm or reader of the space."""
    norm, order = signature.tensors[role].norm, list(signature.tensors)
    assert norm is not None
    written = {Leaf(norm.source), Leaf(norm.source, dual=bool(signature.spaces[norm.source].batch))}  # keys: qk'
    found: list[str] = []
    for other in reversed(order[: order.index(role)]):
        entry = signature.tensors[other]
        if entry.norm and norm.source in (entry.norm.source, entry.norm.target):
            break
        leaves = set(signature.leaves(entry))
        if Leaf(norm.source, dual=True) in leaves - written:
            break
        if written & leaves:
            found.append(other)
    return found[::-1]


def noted(signature: Signature, note: str) -> Iterator[tuple[str, str | None]]:
    """Tensors with this note, and the space it speaks of. On a weight, `passes` and `invisible` speak of the constants
    that it makes of a norm's bias, not of its own numbers: see `audit`."""
    for role, entry in signature.tensors.items():
        if note in entry.notes and not (note in ("passes", "invisible") and role.endswith("weight")):
            yield role, entry.notes[note] or None


def speaks_of(signature: Signature, axes: tuple[Leaf, ...], word: str | None) -> bool:
    """Whether a block has the space that a note names as in the table: `qk'`."""
    return word is None or any(
        not leaf.constant and signature.spaces[leaf.space].name + "'" * leaf.dual == word for leaf in axes
    )


def downstream(signature: Signature, role: str, leaves: tuple[Leaf, ...]) -> list[tuple[str, str]] | None:
    """Where a constant that `role` adds can go instead: readers with their biases, and ('', bias) for the bias that
    is added to the same sum before the next norm. None where part of it has no place to go.
    """
    source = tuple(dual(signature, leaf) for leaf in leaves)
    if "padded" in signature.tensors[role].notes:
        return None
    outlet = next((found for found in outlets(signature) if found.bias == role), None)
    reading = outlet.readers if outlet else readers(signature, leaves[-1].space)
    biases = [bias_of(signature, reader, source) for reader in reading]
    summed = [r for r in outlet.writers if len(list(signature.leaves(signature.tensors[r]))) == 1] if outlet else []
    if not reading or None in biases or (outlet and not outlet.free and not summed):
        return None
    norms = [entry.norm for entry in signature.tensors.values() if entry.norm]
    if not outlet and any(norm.target == leaves[-1].space for norm in norms):
        return None
    return [*zip(reading, (b for b in biases if b), strict=True), *(("", bias) for bias in summed[:1])]


def summands(signature: Signature, entry: Entry) -> tuple[list[str], list[str]]:
    """Where the rows of a summed table can go: tensors that take one of the first rows each, and tensors that take
    what all other rows share. A tied table cannot take anything; another that is summed with it does instead."""
    rows = [role for role in entry.notes.get("rows", "").split() if role in signature.tensors]
    leaf = list(signature.leaves(entry))[-1]
    rest = [role for role in entry.notes["into"].split() if role in signature.tensors and has(signature, role, leaf)]
    if any(tied(signature, role) for role in rest):
        kin = [e.role for e in signature.tensors.values() if e.notes.get("into") == entry.notes["into"]]
        rest = [] if kin[0] == entry.role else kin[:1]
    return rows, rest


# --- the rewrites ---------------------------------------------------------------------------------------------


def _scales(signature: Signature) -> Iterator[Step]:
    for role, entry in signature.tensors.items():
        targets = [target for target in entry.scaled if target in signature.tensors]
        for target in targets:
            yield Step(target, (role,), partial(_multiply, signature, role, target))
        if targets:
            yield Step(role, (), partial(_fill, role, 1.0))


def _multiply(signature: Signature, role: str, target: str, tensors: Mapping[str, Tensor]) -> None:
    for view in along(signature, target, tensors[target], next(signature.leaves(signature.tensors[role]))):
        view *= tensors[role]


def _tables(signature: Signature) -> Iterator[Step]:
    for role, _ in noted(signature, "into"):
        rows, rest = summands(signature, signature.tensors[role])
        for i, target in enumerate(rows):
            yield Step(target, (role,), partial(_add_mean, signature, role, slice(i, i + 1), target))
        for target in rest:
            yield Step(target, (role,), partial(_add_mean, signature, role, slice(len(rows), None), target))
        yield Step(role, (), partial(_without_mean, signature, role, len(rows), bool(rest)))


def _table(signature: Signature, role: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Leaf]:
    ((table, axes),) = cut(signature, role, tensors[role])
    return table.reshape(-1, table.shape[-1]), axes[-1]  # (rows, stream)


def _add_mean(signature: Signature, role: str, rows: slice, target: str, tensors: Mapping[str, Tensor]) -> None:
    table, leaf = _table(signature, role, tensors)
    for view in along(signature, target, tensors[target], leaf):
        view += table[rows].mean(0)


def _without_mean(signature: Signature, role: str, rows: int, rest: bool, tensors: Mapping[str, Tensor]) -> None:
    table, _ = _table(signature, role, tensors)
    table[:rows] = 0
    if rest:
        table[rows:] -= table[rows:].mean(0)


def _norms(signature: Signature) -> Iterator[Step]:
    for outlet in outlets(signature):
        role, bias, leaf = outlet.role, outlet.bias, Leaf(outlet.norm.target)
        layer_norm = outlet.norm.kind == "layernorm"
        if bias is not None:
            places = downstream(signature, bias, (leaf,))
            yield from _moved(signature, bias, None, (leaf,), places)
            bias = None if places else bias
        if any(tied(signature, reader) for reader in outlet.readers):
            continue
        folds = outlet.free and (bias is None or layer_norm)
        for reader in outlet.readers if folds else ():
            given = (role,) if bias is None else (role, bias)
            yield Step(reader, given, partial(_fold, signature, outlet, reader, bias))
        if folds:
            yield Step(role, (), partial(_fill, role, outlet.norm.unit))
        if folds and bias is not None:
            yield Step(bias, (), partial(_fill, bias, (outlet.norm.copies * signature.sizes[leaf.space]) ** -0.5))
        elif layer_norm and (bias is None or "padded" not in signature.tensors[bias].notes):
            for reader in outlet.readers:
                yield from _unreach(signature, outlet, reader, bias)


def _fold(signature: Signature, outlet: Outlet, reader: str, bias: str | None, tensors: Mapping[str, Tensor]) -> None:
    """A norm's weight moves into a reader. So does the bias of a LayerNorm, for readers without a bias: the normed
    vector has no component along ones, so that direction is free to carry constants,
    (W + c 1^T / sqrt(d)) (x + 1 / sqrt(d)) = W x + c where W 1 = 0 and 1^T x = 0."""
    for view in fed(signature, outlet, reader, tensors[reader]):
        constant = None if bias is None else view @ tensors[bias]
        view *= tensors[outlet.role] + (1 - outlet.norm.unit)
        if constant is not None:
            view += constant.unsqueeze(-1) * view.shape[-1] ** -0.5 - view.mean(-1, keepdim=True)


def _fill(role: str, value: float, tensors: Mapping[str, Tensor]) -> None:
    tensors[role].fill_(value)


def unreached(gain: Tensor) -> Tensor:
    """The direction h that a LayerNorm's output (less its bias) never has: h D is a multiple of ones, or zero."""
    least = gain.abs().min()
    return (gain == 0).to(gain) if least == 0 else least / gain


def _unreach(signature: Signature, outlet: Outlet, reader: str, bias: str | None) -> Iterator[Step]:
    """Take from a reader what it reads along that direction. There it meets only the norm's bias, if any."""
    target = bias_of(signature, reader, outlet.source)
    if bias is not None:
        if target is None:
            return
        yield Step(target, (reader, outlet.role, bias), partial(_meet, signature, outlet, reader, bias, target))
    yield Step(reader, (outlet.role,), partial(_remove, signature, outlet, reader))


def _along_unreached(signature: Signature, outlet: Outlet, reader: str, tensors: Mapping[str, Tensor]) -> Tensor:
    h = unreached(tensors[outlet.role] + (1 - outlet.norm.unit)).to(tensors[reader])
    found = torch.zeros_like(tensors[reader])
    parts = fed(signature, outlet, reader, found)
    for view, part in zip(fed(signature, outlet, reader, tensors[reader]), parts, strict=True):
        part += (view @ h).unsqueeze(-1) * h / (h @ h)
    return found


def _meet(
    signature: Signature, outlet: Outlet, reader: str, bias: str, target: str, tensors: Mapping[str, Tensor]
) -> None:
    removed = {**tensors, reader: _along_unreached(signature, outlet, reader, tensors)}
    absorb(signature, removed, reader, target, tensors[bias], (Leaf(outlet.norm.target),))


def _remove(signature: Signature, outlet: Outlet, reader: str, tensors: Mapping[str, Tensor]) -> None:
    tensors[reader].sub_(_along_unreached(signature, outlet, reader, tensors))


def _passed(signature: Signature) -> Iterator[Step]:
    for role, word in noted(signature, "passes"):
        for number, (_, axes) in enumerate(cut(signature, role, _shape(signature, role))):
            if speaks_of(signature, axes, word):
                yield from _moved(signature, role, number, axes, downstream(signature, role, axes))


def _shape(signature: Signature, role: str) -> Tensor:
    return torch.empty(signature.tensors[role].shape, device="meta")


def _sums(signature: Signature) -> Iterator[Step]:
    for first, bias in traded(signature):
        yield from _moved(signature, bias, None, (), [("", first)])


def _moved(
    signature: Signature,
    role: str,
    number: int | None,
    leaves: tuple[Leaf, ...],
    places: list[tuple[str, str]] | None,
) -> Iterator[Step]:
    """Add what a constant (block `number` of a tensor, or all of it) becomes to the biases in `places`, and set it to
    zero; leave it where there are none."""
    for reader, bias in places or ():
        given = (reader, role) if reader else (role,)
        yield Step(bias, given, partial(_add_constant, signature, role, number, leaves, reader, bias))
    if places:
        yield Step(role, (), partial(_clear, signature, role, number))


def _constant(signature: Signature, role: str, number: int | None, tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors[role] if number is None else cut(signature, role, tensors[role])[number][0]


def _add_constant(
    signature: Signature,
    role: str,
    number: int | None,
    leaves: tuple[Leaf, ...],
    reader: str,
    bias: str,
    tensors: Mapping[str, Tensor],
) -> None:
    constant = _constant(signature, role, number, tensors)
    if reader:
        absorb(signature, tensors, reader, bias, constant, leaves)
    else:
        tensors[bias].add_(constant)


def _clear(signature: Signature, role: str, number: int | None, tensors: Mapping[str, Tensor]) -> None:
    _constant(signature, role, number, tensors).zero_()


def _unseen(signature: Signature) -> Iterator[Step]:
    for role, word in noted(signature, "invisible"):
        for number, (_, axes) in enumerate(cut(signature, role, _shape(signature, role))):
            if speaks_of(signature, axes, word):
                yield Step(role, (), partial(_clear, signature, role, number))
    for role, entry in signature.tensors.items():
        if "softmax" in entry.notes:
            yield Step(role, (), partial(_shift, signature, role))
        if "against" in entry.notes:
            yield Step(role, (entry.notes["against"],), partial(_project, role, entry.notes["against"]))


def _shift(signature: Signature, role: str, tensors: Mapping[str, Tensor]) -> None:
    for rows in sharing(signature, role):
        tensors[role][rows] -= tensors[role][rows].mean(0)


def sharing(signature: Signature, role: str) -> Iterator[Tensor]:
    """Which entries of the first axis a softmax compares with each other alone: their numbers."""
    entry = signature.tensors[role]
    parts = blocks(torch.arange(entry.shape[0]), entry.axes[:1], signature.sizes)
    for names in entry.notes["softmax"].split(","):
        yield torch.cat([rows for rows, (leaf, *_) in parts
                         if not names or signature.spaces[leaf.space].name in names.split()])  # fmt: skip


def differences(table: Tensor) -> Tensor:
    """(rows, *batch, n) -> (*batch, rows - 1, n), each row less the first."""
    return (table[1:] - table[:1]).movedim(0, -2)


def along_rows(vector: Tensor, rows: Tensor) -> Tensor:
    """The part of vectors (*batch, n) in the span of some rows (*batch, m, n)."""
    found: Tensor = (vector.unsqueeze(-2) @ torch.linalg.pinv(rows) @ rows).squeeze(-2)
    return found


def _project(role: str, table: str, tensors: Mapping[str, Tensor]) -> None:
    tensors[role].copy_(along_rows(tensors[role], differences(tensors[table])))


def _writers(signature: Signature) -> Iterator[Step]:
    for role, parts in writers(signature):
        if not tied(signature, role):
            yield Step(role, (), partial(_centre, signature, role, parts))


def _centre(signature: Signature, role: str, parts: tuple[Leaf, ...], tensors: Mapping[str, Tensor]) -> None:
    for views in vectors(signature, role, tensors[role], parts):
        mean = torch.cat(views, -1).mean(-1, keepdim=True)
        for view in views:
            view -= mean
