# SPDX-License-Identifier: Apache-2.0
"""The readers and writers of spaces: a signature as a circuit, and constants that move along it.

The order of a signature's tensors is that of execution, so it shows which tensors are between two norms. The canonical
form, the audit's flat directions and the factors of adapters all use this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from ..tables.axes import Axis, Cat, Flat, Leaf, blocks, size
from ..tables.axes import leaves as leaves_of
from ..tables.signature import MOVES, Entry, Norm, Signature, bias_beside

Block = tuple[Tensor, tuple[Leaf, ...]]


def joined(signature: Signature) -> Signature:
    """Return the signature with the spaces that a norm takes as one vector, `(band inside)`, as one space, if they can
    only be permuted. Tensors that read just the inner one (a grouped convolution) get a note that they read it."""
    outer: dict[str, tuple[Axis, ...]] = {}
    for entry in signature.tensors.values():
        if entry.norm and isinstance(entry.axes[0], Flat) and entry.norm.nested:
            root = signature.root[entry.norm.source]
            if MOVES[signature.kinds[root]] <= {"permute"}:
                outer |= dict.fromkeys(signature.members[root], entry.axes[0].parts[:-1])

    def one(axis: Axis) -> Axis:
        if isinstance(axis, Cat):
            return Cat(tuple(map(one, axis.parts)))
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


def cut(signature: Signature, role: str, tensor: Tensor) -> list[Block]:
    """Return views of a tensor with one dimension per leaf."""
    return blocks(tensor, signature.tensors[role].axes, signature.sizes)


def along(signature: Signature, role: str, tensor: Tensor, leaf: Leaf) -> Iterator[Tensor]:
    """Yield views of the parts of a tensor that have this leaf, with its dimension last."""
    for view, axes in cut(signature, role, tensor):
        if leaf in axes:
            yield view.movedim(axes.index(leaf), -1)


def fed(signature: Signature, outlet: Outlet, reader: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of the parts of a reader of a norm's output, with that output last: one vector, or several side by
    side that are normalized together."""
    for view, axes in cut(signature, reader, tensor):
        if outlet.source[0] in axes:
            dim = axes.index(outlet.source[0])
            if outlet.norm.copies == 1:
                yield view.movedim(dim, -1)
            else:
                yield (pair := view.movedim((dim - 1, dim), (-2, -1))).view(*pair.shape[:-2], -1)


def has(signature: Signature, role: str, leaf: Leaf) -> bool:
    return role in signature.having.get(leaf, ())


def moves(signature: Signature, role: str) -> bool:
    """Return whether redundant parts of this tensor may move into others."""
    return "stays" not in signature.tensors[role].notes


def readers(signature: Signature, space: str) -> list[str]:
    """Return the roles of the tensors that read from exactly this space."""
    return list(signature.having.get(Leaf(space, dual=True), ()))


@dataclass(frozen=True)
class Outlet:
    """The destination of a norm's output.

    readers: the tensors that read it, and nothing else. writers: the tensors that are added to it before the next norm
    (post-LN); only that norm reads them. free: whether only the readers use it, so that the norm's weight, if it has
    one, can move into them.
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
    """Yield the outlets of all norms whose readers the signature knows: norms with an output space of their own, and
    norms that write back and whose bias `passes`. The output of the latter is read up to the next norm, and summed
    there."""
    for role in signature.tensors:
        if (found := outlet_of(signature, role)) is not None:
            yield found


def outlet_of(signature: Signature, role: str) -> Outlet | None:
    """Return the outlet of a norm, if this is one and its readers are known, see `outlets`."""
    entry, bias = signature.tensors[role], bias_beside(role)
    norm = entry.norm
    if norm is None or Leaf(norm.target) not in signature.leaves(entry):  # of a part of a vector, see `joined`
        return None
    own = bias if has(signature, bias, Leaf(norm.target)) else None
    stage: Collection[str] = signature.tensors
    stop = None
    if norm.writes_back:
        if own is None or "passes" not in signature.tensors[own].notes:
            return None
        order = list(signature.tensors)
        start = order.index(own) + 1
        stop = next((i for i in range(start, len(order)) if normalizes(signature, order[i], norm.target)), None)
        stage = set(order[start:stop])
    reading = [reader for reader in readers(signature, norm.target) if reader in stage]
    added = [r for r in signature.having.get(Leaf(norm.target), ()) if r in stage] if norm.writes_back else []
    normed = not norm.writes_back and any(n.source == norm.target for e in signature.tensors.values() if (n := e.norm))
    if not reading or normed or any("nonlinear" in signature.tensors[reader].notes for reader in reading):
        return None
    target = signature.spaces[norm.target]
    unseen = stop is None and not added and not target.output and bool(MOVES[target.kind])
    return Outlet(role, norm, own, reading, added, unseen and "bare" not in entry.notes and moves(signature, role))


def normalizes(signature: Signature, role: str, space: str) -> bool:
    norm = signature.tensors[role].norm
    return norm is not None and norm.source == space


def returns(signature: Signature, role: str, space: str) -> bool:
    """Return whether this is a norm of the space that writes back into it."""
    norm = signature.tensors[role].norm
    return norm is not None and norm.writes_back and space in norm.parts


def bias_of(signature: Signature, reader: str, source: tuple[Leaf, ...]) -> str | None:
    """Return the bias that is added to the output of `reader` from the leaves `source`, if it has one throughout: its
    own, or another one in the same sum (the FFN's, if attention beside it has none)."""
    if {"nonlinear", "glu"} & signature.tensors[reader].notes.keys() or not reader.endswith("weight"):
        return None
    named = (role for role, entry in signature.tensors.items() if entry.notes.get("biases") == reader)
    bias = next(named, bias_beside(reader))
    if bias not in signature.tensors:
        written = [a for a in signature.tensors[reader].axes if not set(leaves_of(a)) & set(source)]
        one = written[0] if len(written) == 1 else None
        summed = beside(signature, reader, one.space) if isinstance(one, Leaf) and not one.dual else []
        if not summed:
            return None
        bias = summed[0]
    shapes = (torch.empty(signature.tensors[role].shape, device="meta") for role in (reader, bias))
    weights, biases = (_added(signature, role, shape) for role, shape in zip((reader, bias), shapes, strict=True))
    added = [set(out) for _, out in biases if not set(out) & set(source)]
    whole = all(any(out < set(axes) for out in added) for _, axes in weights if set(source) <= set(axes))
    return bias if whole else None


def _added(signature: Signature, role: str, tensor: Tensor) -> list[Block]:
    """Return `cut` without dimensions of size 1, as in BART's `1 vocab`."""
    one = Leaf("1")
    return [
        (view.squeeze([i for i, leaf in enumerate(axes) if leaf == one]), tuple(leaf for leaf in axes if leaf != one))
        for view, axes in cut(signature, role, tensor)
    ]


def beside(signature: Signature, role: str, space: str) -> list[str]:
    """Return the biases in the sum in `space` to which `role` adds, without a norm, gain or reader in between."""
    order = list(signature.tensors)
    if not any(entry.norm and entry.norm.source == space for entry in signature.tensors.values()):
        return []

    def added(some: list[str]) -> Iterator[str]:
        for other in some:
            entry = signature.tensors[other]
            found = signature.leaves(entry)
            if Leaf(space, dual=True) in found or (entry.norm and space in (entry.norm.source, entry.norm.target)):
                return
            if found == (Leaf(space),) and other.endswith("weight"):
                return  # a gain, as in wav2vec 2.0's convolutions: its input is normed and scaled
            normed = signature.tensors.get(other.removesuffix("bias") + "weight", entry).norm is not None
            if found == (Leaf(space),) and other.endswith("bias") and not normed and "nonlinear" not in entry.notes:
                yield other

    place = order.index(role)
    return [*list(added(order[:place][::-1]))[::-1], *added(order[place:])]


def traded(signature: Signature) -> Iterator[tuple[str, str]]:
    """Yield (first, other) for biases that enter the same sum."""
    for role, entry in signature.tensors.items():
        vector = len(entry.axes) == 1 and moves(signature, role) and role not in signature.sharing
        if vector and isinstance(entry.axes[0], Leaf):
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
    """bias += W c, where c has one dimension for each of `leaves` (primal), or consists of several vectors."""
    if constant.dim() == 1 and len(constant) > (length := signature.sizes.get(leaves[0].space, len(constant))):
        constant, leaves = constant.view(-1, length), (Leaf(str(len(constant) // length)), *leaves)
    source = tuple(dual(signature, leaf) for leaf in leaves)
    for weight, axes in cut(signature, reader, tensors[reader]):
        fitting = [(target, out) for target, out in _added(signature, bias, tensors[bias]) if set(out) < set(axes)]
        for target, out in fitting if set(source) <= set(axes) else ():
            # In `[ffn | (ffn lift)]` the first part of the bias also fits the second of the weight.
            if not any(set(out) < set(other) for _, other in fitting):
                target += contract(weight, axes, constant, source, out)


def dual(signature: Signature, leaf: Leaf) -> Leaf:
    """Return the leaf of a reader: primed, except for spaces that batch others (heads), where both are the same."""
    batching = {outer for space in signature.spaces.values() for outer in space.batch}
    return leaf if leaf.space in batching or leaf.constant else Leaf(leaf.space, dual=True)


def contract(
    weight: Tensor, axes: tuple[Leaf, ...], other: Tensor, source: tuple[Leaf, ...], out: tuple[Leaf, ...]
) -> Tensor:
    """Return the Einstein sum over all leaves of `weight` and `other` that are not in `out`."""
    number = {leaf: i for i, leaf in enumerate(dict.fromkeys(axes))}
    # A constant axis of `weight` alone has no unique name: it gets a number of its own and is summed over.
    stay = [axes.index(leaf) for leaf in out]
    alone = [leaf.constant and leaf not in source and i not in stay for i, leaf in enumerate(axes)]
    first = [len(number) + i if alone[i] else number[leaf] for i, leaf in enumerate(axes)]
    return torch.einsum(weight, first, other, [number[leaf] for leaf in source], [number[leaf] for leaf in out])


def vanishes(signature: Signature, role: str, space: str) -> bool:
    """Return whether the all-ones direction of the output of `role` in `space` only enters LayerNorms.

    The order of the tensors is that of execution. A norm that writes back ends the sum to which `role` adds; without
    one, the sum runs through all layers, and all norms and later readers count.
    """
    if "ones" not in MOVES[signature.spaces[space].kind] or "nonlinear" in signature.tensors[role].notes:
        return False
    entries = list(signature.tensors.values())
    norms = {bias_beside(e.role) for e in entries if e.norm and e.norm.writes_back}
    after = entries[list(signature.tensors).index(role) + 1 :]
    for entry in after:
        if entry.norm and entry.norm.source == space and entry.norm.writes_back:
            # The output of a norm is read or summed before the next one, which belongs to another branch.
            return entry.norm.kind == "layernorm" and not entry.norm.beside and role not in norms
        if has(signature, entry.role, Leaf(space, dual=True)):
            return False
    reading = [entry.norm for entry in entries if entry.norm and entry.norm.source == space]
    # A norm of several vectors side by side subtracts a common mean, so it sees ones that are added to one of them.
    kinds = {norm.kind if norm.copies == 1 else "" for norm in reading if not norm.writes_back}
    return kinds == {"layernorm"} and not signature.spaces[space].output


def writers(signature: Signature) -> Iterator[tuple[str, tuple[Leaf, ...]]]:
    """Yield tensors (except norms) and the leaves, parts of one vector, along which their all-ones direction has no
    effect."""
    for role, entry in signature.tensors.items():
        if not moves(signature, role):
            continue
        for leaf in signature.leaves(entry):
            if not entry.diagonal and not leaf.dual and vanishes(signature, role, leaf.space):
                yield role, (leaf,)
        norm = entry.norm
        if norm and norm.kind == "layernorm" and norm.writes_back and not norm.nested:
            space = signature.spaces[norm.source]
            if space.layer is not None and (norm.beside or "ones" not in MOVES[space.kind]):  # queries or keys
                for writer in branch(signature, role):
                    found = signature.leaves(signature.tensors[writer])
                    yield writer, tuple(leaf for leaf in found if leaf.space in norm.parts)


def vectors(signature: Signature, role: str, tensor: Tensor, parts: tuple[Leaf, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of a tensor along leaves that are parts of one vector: one view for each, with its dimension last."""
    yield from zip(*(along(signature, role, tensor, leaf) for leaf in parts), strict=True)


def branch(signature: Signature, role: str) -> list[str]:
    """Return the tensors that write the input of the norm `role`, if that is not the whole stream: those since the last
    norm or reader of the space."""
    norm, order = signature.tensors[role].norm, list(signature.tensors)
    assert norm is not None
    space = signature.spaces[norm.source]
    written = {Leaf(norm.source), Leaf(norm.source, dual=bool(space.batch) or space.layer is not None)}  # keys: qk'
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
    """Yield tensors with this note, and the space to which it applies. On a weight, `passes` and `invisible` apply to
    the constants that it makes of a norm's bias, not to its own entries: see `audit`."""
    for role, entry in signature.tensors.items():
        constant = note in ("passes", "invisible")
        if note in entry.notes and not (constant and (role.endswith("weight") or not moves(signature, role))):
            yield role, entry.notes[note] or None


def speaks_of(signature: Signature, axes: tuple[Leaf, ...], word: str | None) -> bool:
    """Return whether a block has the space in a note, which is written as in the table: `qk'`."""
    return word is None or any(
        not leaf.constant and signature.spaces[leaf.space].name + "'" * leaf.dual == word for leaf in axes
    )


def downstream(signature: Signature, role: str, leaves: tuple[Leaf, ...]) -> list[tuple[str, str]] | None:
    """Return where a constant that `role` adds can move: readers with their biases, and ('', bias) for a bias that is
    added to the same sum before the next norm. None if part of it cannot move."""
    source = tuple(dual(signature, leaf) for leaf in leaves)
    if "padded" in signature.tensors[role].notes or not moves(signature, role):
        return None
    before = (norm for norm in signature.tensors if bias_beside(norm) == role)
    outlet = next((found for norm in before if (found := outlet_of(signature, norm)) and found.bias == role), None)
    reading = outlet.readers if outlet else readers(signature, leaves[-1].space)
    biases = [bias_of(signature, reader, source) for reader in reading]
    summed = [r for r in outlet.writers if len(signature.leaves(signature.tensors[r])) == 1] if outlet else []
    if not reading or None in biases or (outlet and not outlet.free and not summed):
        return None
    norms = [entry.norm for entry in signature.tensors.values() if entry.norm]
    if not outlet and any(norm.target == leaves[-1].space for norm in norms):
        return None
    return [*zip(reading, (b for b in biases if b), strict=True), *(("", bias) for bias in summed[:1])]


def summands(signature: Signature, entry: Entry) -> tuple[list[tuple[str, slice]], list[str]]:
    """Return where the rows of a summed table can move: the tensors that absorb some of the first rows each, with these
    rows, and those that absorb the mean of all other rows. A tied table absorbs nothing, but another one that is summed
    with it may."""
    taking = [role for role in entry.notes.get("rows", "").split() if role in signature.tensors]
    ends = list(accumulate((prod(signature.tensors[role].shape[:-1]) for role in taking), initial=0))
    rows = [(role, slice(*some)) for role, some in zip(taking, pairwise(ends), strict=True)]
    leaf = signature.leaves(entry)[-1]
    rest = [role for role in entry.notes["into"].split() if role in signature.tensors and has(signature, role, leaf)]
    if not signature.sharing.isdisjoint(rest):
        kin = [e.role for e in signature.tensors.values() if e.notes.get("into") == entry.notes["into"]]
        rest = [] if kin[0] == entry.role else kin[:1]
    return rows, rest


def sharing(signature: Signature, role: str) -> Iterator[Tensor]:
    """Yield the indices of the first axis over which a softmax runs."""
    entry = signature.tensors[role]
    parts = blocks(torch.arange(entry.shape[0]), entry.axes[:1], signature.sizes)
    for names in entry.notes["softmax"].split(","):
        yield torch.cat([rows for rows, (leaf, *_) in parts
                         if not names or signature.spaces[leaf.space].name in names.split()])  # fmt: skip
