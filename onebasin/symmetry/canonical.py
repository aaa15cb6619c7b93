# SPDX-License-Identifier: Apache-2.0
"""The canonical form: freedom that the function does not see, removed before any search.

Every rewrite is exact, local to a few tensors, and derived from the signature alone:

    tables    the mean row of a summed table moves into the table it is summed with
    norms     weight and bias of a norm move into what reads its output; readers of a LayerNorm lose the all-ones
              direction, which a centred vector cannot reach
    passed    a value bias moves through attention into the output bias, a post-LN bias into the biases up to the
              next norm
    unseen    a key bias under softmax is set to zero
    writers   what only ever enters LayerNorms loses its all-ones direction

Nothing is divided by a norm's weight, so a weight of zero is as good as any other. A second run changes nothing.
After it any orthogonal O with O 1 = 1 commutes with a stock LayerNorm, and the result is an ordinary model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .axes import Leaf, blocks
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
    signature = with_ties(signature)
    untied = _in_the_way(signature)
    log = [f"'{role}' no longer shares its numbers: the norm before it moves into it" for role in untied]
    if untied:
        signature = separate(signature)
    copies = {role: tensor.clone(memory_format=torch.contiguous_format) for role, tensor in tensors.items()}
    tensors = share(signature, copies)
    for rewrite in (_tables, _norms, _passed, _unseen, _writers):
        rewrite(signature, tensors)
    if not untied:  # ties that the file leaves out stay out
        signature = without_ties(signature)
        tensors = {role: tensors[role] for role in signature.tensors}
    return Canonical(signature, tensors, {"tie_word_embeddings": False} if untied else {}, log)


# --- ties -----------------------------------------------------------------------------------------------------


def with_ties(signature: Signature) -> Signature:
    """The signature with the tied tensors that the file leaves out."""
    return replace(signature, tensors={**signature.tensors, **signature.absent}, absent={})


def without_ties(signature: Signature) -> Signature:
    stored = {role: entry for role, entry in signature.tensors.items() if entry.stored}
    absent = {role: entry for role, entry in signature.tensors.items() if not entry.stored}
    return replace(signature, tensors=stored, absent=absent)


def separate(signature: Signature) -> Signature:
    """The signature in which every tied tensor has numbers of its own."""
    tensors = {role: replace(entry, alias=None, stored=True) for role, entry in signature.tensors.items()}
    return replace(signature, tensors=tensors)


def share(signature: Signature, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every role's tensor. Tied ones are the same object, so that writing into one writes into both; one that the
    file left out and that is tied no longer gets a copy."""
    found = dict(tensors)
    for role, entry in signature.tensors.items():
        if entry.alias is not None:
            found[role] = found[entry.alias]
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


# --- who reads and writes -------------------------------------------------------------------------------------


def cut(signature: Signature, role: str, tensor: Tensor) -> list[Block]:
    """Views of a tensor with one dimension per leaf."""
    return blocks(tensor, signature.tensors[role].axes, signature.sizes)


def along(signature: Signature, role: str, tensor: Tensor, leaf: Leaf) -> Iterator[Tensor]:
    """Views of the parts of a tensor that have this leaf, with its dimension last."""
    for view, axes in cut(signature, role, tensor):
        if leaf in axes:
            yield view.movedim(axes.index(leaf), -1)


def has(signature: Signature, role: str, leaf: Leaf) -> bool:
    return leaf in signature.leaves(signature.tensors[role])


def readers(signature: Signature, space: str) -> list[str]:
    """Roles of the tensors that read from exactly this space."""
    return [role for role in signature.tensors if has(signature, role, Leaf(space, dual=True))]


@dataclass(frozen=True)
class Outlet:
    """Where a norm's output goes.

    readers: what reads it, and nothing else. writers: what is added to it before the next norm (post-LN), with that
    norm's sum as their only way out. free: nothing but the readers sees it, so the norm's weight can move into them.
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
    back and whose bias `passes`: what they put out is read up to the next norm that writes back, and summed there.
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
            stop = next((i for i in range(start, len(order)) if returns(signature, order[i], norm.target)), None)
        stage = order[start:stop] if norm.writes_back else order
        reading = [reader for reader in stage if has(signature, reader, Leaf(norm.target, dual=True))]
        added = [r for r in stage if has(signature, r, Leaf(norm.target))] if norm.writes_back else []
        normed = any(n and n.source == norm.target for n in (signature.tensors[r].norm for r in stage))
        linear = not any("nonlinear" in signature.tensors[reader].notes for reader in reading)
        if reading and linear and not normed:
            free = stop is None and not added and not signature.spaces[norm.target].output
            yield Outlet(role, norm, own, reading, added, free)


def returns(signature: Signature, role: str, space: str) -> bool:
    """Whether this is a norm of the space that writes back into it."""
    norm = signature.tensors[role].norm
    return norm is not None and norm.writes_back and norm.source == space


def bias_of(signature: Signature, reader: str, source: tuple[Leaf, ...]) -> str | None:
    """The bias added to what `reader` makes of the leaves `source`, if the reader has one throughout."""
    bias = reader.removesuffix("weight") + "bias"
    nonlinear = "nonlinear" in signature.tensors[reader].notes
    if nonlinear or not reader.endswith("weight") or bias not in signature.tensors:
        return None
    shapes = (torch.empty(signature.tensors[role].shape, device="meta") for role in (reader, bias))
    weights, biases = (cut(signature, role, shape) for role, shape in zip((reader, bias), shapes, strict=True))
    whole = all(any(set(out) < set(axes) for _, out in biases) for _, axes in weights if set(source) <= set(axes))
    return bias if whole else None


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
        fitting = [(target, out) for target, out in cut(signature, bias, tensors[bias]) if set(out) < set(axes)]
        for target, out in fitting if set(source) <= set(axes) else ():
            # In `[ffn | (ffn lift)]` the first part of the bias also fits the second of the weight.
            if not any(set(out) < set(other) for _, other in fitting):
                target += contract(weight, axes, constant, source, out)


def dual(signature: Signature, leaf: Leaf) -> Leaf:
    """The leaf of a reader: primed, except for what batches (heads), which reads and writes alike."""
    batching = {outer for space in signature.spaces.values() for outer in space.batch}
    return leaf if leaf.space in batching else Leaf(leaf.space, dual=True)


def contract(
    weight: Tensor, axes: tuple[Leaf, ...], other: Tensor, source: tuple[Leaf, ...], out: tuple[Leaf, ...]
) -> Tensor:
    """Einstein sum over all leaves of `weight` and `other` that are not in `out`."""
    number = {leaf: i for i, leaf in enumerate(dict.fromkeys(axes))}
    # A constant axis has no name to be told by: it gets a number of its own and is summed over.
    first = [len(number) + i if leaf.constant else number[leaf] for i, leaf in enumerate(axes)]
    return torch.einsum(weight, first, other, [number[leaf] for leaf in source], [number[leaf] for leaf in out])


def vanishes(signature: Signature, role: str, space: str) -> bool:
    """Whether the all-ones direction of what `role` writes into `space` only ever enters LayerNorms.

    The order of the tensors is that of execution. A norm that writes back ends the sum that `role` writes into;
    where none does, the sum runs through all layers, and everything that reads it counts.
    """
    if "ones" not in MOVES[signature.spaces[space].kind] or "nonlinear" in signature.tensors[role].notes:
        return False
    entries = list(signature.tensors.values())
    norms = {e.role.removesuffix("weight") + "bias" for e in entries if e.norm and e.norm.writes_back}
    after = entries[list(signature.tensors).index(role) + 1 :]
    for entry in after:
        if entry.norm and entry.norm.source == space and entry.norm.writes_back:
            # What a norm puts out is read or summed before the next: the next is another branch's.
            return entry.norm.kind == "layernorm" and role not in norms
        if has(signature, entry.role, Leaf(space, dual=True)):
            return False
    reading = [entry.norm for entry in entries if entry.norm and entry.norm.source == space]
    kinds = {norm.kind for norm in reading if not norm.writes_back}
    return kinds == {"layernorm"} and not readers(signature, space) and not signature.spaces[space].output


def writers(signature: Signature) -> Iterator[tuple[str, Leaf]]:
    """Tensors (norms left out) and the leaf along which their all-ones direction is invisible."""
    for role, entry in signature.tensors.items():
        for leaf in signature.leaves(entry):
            if entry.norm is None and not leaf.dual and vanishes(signature, role, leaf.space):
                yield role, leaf


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
    rest = [role for role in entry.notes["into"].split() if role in signature.tensors]
    if any(tied(signature, role) for role in rest):
        kin = [e.role for e in signature.tensors.values() if e.notes.get("into") == entry.notes["into"]]
        rest = [] if kin[0] == entry.role else kin[:1]
    return rows, rest


# --- the rewrites ---------------------------------------------------------------------------------------------


def _tables(signature: Signature, tensors: dict[str, Tensor]) -> None:
    for role, _ in noted(signature, "into"):
        rows, rest = summands(signature, signature.tensors[role])
        ((table, leaf),) = ((view, axes[-1]) for view, axes in cut(signature, role, tensors[role]))
        table = table.reshape(-1, table.shape[-1])  # (rows, stream)
        for i, target in enumerate(rows):
            _add(signature, tensors, target, leaf, table[i])
            table[i] = 0
        if rest:
            mean = table[len(rows) :].mean(0)
            for target in rest:
                _add(signature, tensors, target, leaf, mean)
            table[len(rows) :] -= mean


def _add(signature: Signature, tensors: Mapping[str, Tensor], role: str, leaf: Leaf, vector: Tensor) -> None:
    for view in along(signature, role, tensors[role], leaf):
        view += vector


def _norms(signature: Signature, tensors: dict[str, Tensor]) -> None:
    for outlet in outlets(signature):
        weight, leaf = tensors[outlet.role], Leaf(outlet.norm.target)
        beta = None if outlet.bias is None else tensors[outlet.bias]
        if beta is not None:
            places = downstream(signature, outlet.bias or "", (leaf,))
            _move(signature, tensors, beta, (leaf,), places)
            beta = None if places else beta
        if any(tied(signature, reader) for reader in outlet.readers):
            continue
        reading = (along(signature, reader, tensors[reader], outlet.source[0]) for reader in outlet.readers)
        views = [view for parts in reading for view in parts]
        constants = [] if beta is None else [view @ beta for view in views]
        if outlet.free and (beta is None or outlet.norm.kind == "layernorm"):
            for view in views:
                view *= weight + (1 - outlet.norm.unit)
            weight.fill_(outlet.norm.unit)
        if outlet.norm.kind != "layernorm":
            continue
        if beta is None or not outlet.free:
            for reader in outlet.readers:
                _unreach(signature, tensors, outlet, reader, beta)
            continue
        # The normed vector has no component along ones, so this direction is free to carry the constants of readers
        # without a bias: (W + c 1^T / sqrt(d)) (x + 1 / sqrt(d)) = W x + c where W 1 = 0 and 1^T x = 0.
        root = beta.numel() ** 0.5
        for view, constant in zip(views, constants, strict=True):
            view += constant.unsqueeze(-1) / root - view.mean(-1, keepdim=True)
        beta.fill_(1 / root)


def unreached(gain: Tensor) -> Tensor:
    """The direction h that a LayerNorm's output (less its bias) never has: h D is a multiple of ones, or zero."""
    least = gain.abs().min()
    return (gain == 0).to(gain) if least == 0 else least / gain


def _unreach(
    signature: Signature, tensors: dict[str, Tensor], outlet: Outlet, reader: str, beta: Tensor | None
) -> None:
    """Take from a reader what it reads along that direction. There it meets only the norm's bias, if any."""
    bias = bias_of(signature, reader, outlet.source)
    if beta is not None and bias is None:
        return
    h = unreached(tensors[outlet.role] + (1 - outlet.norm.unit))
    removed = torch.zeros_like(tensors[reader])
    parts = along(signature, reader, removed, outlet.source[0])
    for view, part in zip(along(signature, reader, tensors[reader], outlet.source[0]), parts, strict=True):
        part += (view @ h).unsqueeze(-1) * h / (h @ h)
        view -= part
    if beta is not None and bias is not None:
        absorb(signature, {**tensors, reader: removed}, reader, bias, beta, (Leaf(outlet.norm.target),))


def _passed(signature: Signature, tensors: dict[str, Tensor]) -> None:
    for role, word in noted(signature, "passes"):
        for constant, axes in cut(signature, role, tensors[role]):
            if speaks_of(signature, axes, word):
                _move(signature, tensors, constant, axes, downstream(signature, role, axes))


def _move(
    signature: Signature,
    tensors: dict[str, Tensor],
    constant: Tensor,
    leaves: tuple[Leaf, ...],
    places: list[tuple[str, str]] | None,
) -> None:
    """Add what a constant becomes to the biases in `places`, and set it to zero; leave it where there are none."""
    for reader, bias in places or ():
        if reader:
            absorb(signature, tensors, reader, bias, constant, leaves)
        else:
            tensors[bias] += constant
    if places:
        constant.zero_()


def _unseen(signature: Signature, tensors: dict[str, Tensor]) -> None:
    for role, word in noted(signature, "invisible"):
        for view, axes in cut(signature, role, tensors[role]):
            if speaks_of(signature, axes, word):
                view.zero_()


def _writers(signature: Signature, tensors: dict[str, Tensor]) -> None:
    for role, leaf in writers(signature):
        if not tied(signature, role):
            for view in along(signature, role, tensors[role], leaf):
                view -= view.mean(-1, keepdim=True)
