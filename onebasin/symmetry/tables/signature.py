# SPDX-License-Identifier: Apache-2.0
"""The signature of a model: its tensors, their axes, the spaces of the axes, and the groups that may act on them.

A signature is the result of fitting a table to a checkpoint. Everything downstream (matching, canonical form,
distances, audit) uses signatures and never a model family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .axes import Axis, Leaf, blocks, space_leaves

# The moves of a space are those that all tensors which touch it allow. A kind is a set of moves; `ones` only rotates
# the complement of the all-ones vector. `pair` moves act equally on the two dimensions of a RoPE pair: (i, i + n / 2),
# or (2 i, 2 i + 1) for the `next` ones.
_PAIRS = frozenset({"pair sign", "pair turn", "pair scale"})
_NEXT = frozenset({"next sign", "next turn", "next scale"})
_SIGNS = frozenset({"sign", "pair sign", "next sign"})
_TURNS = frozenset({"pair turn", "next turn"})
MOVES: dict[str, frozenset[str]] = {
    "fixed": frozenset(),
    "rows": frozenset(),  # fixed, but two models may have different numbers of them (positions)
    "labels": frozenset(),  # fixed, and its tensors belong to one task (classes)
    "permutation": frozenset({"permute"}),  # pointwise nonlinearity (GELU, SiLU, softmax over heads)
    "odd": frozenset({"permute"}) | _SIGNS,  # odd nonlinearity (tanh), or an RMSNorm with a weight
    "relu": frozenset({"permute", "scale"}),  # positively homogeneous nonlinearity
    "ones": frozenset({"permute", "ones"}),  # a LayerNorm without weight reads the space
    "orthogonal": frozenset({"permute", "ones", "rotate"}) | _SIGNS | _TURNS,  # an RMSNorm without weight reads it
    "signs": _SIGNS,  # an RMSNorm inside each head, with one weight for all heads
    "factor": frozenset({"sign", "scale"}),  # a number of either sign (the ungated half of a gated FFN, per neuron)
    "rotary": _PAIRS,  # queries and keys under rotary embeddings that pair i with i + n / 2
    "interleaved": _NEXT,  # the same for pairs 2 i, 2 i + 1
    "pair turns": frozenset({"pair sign", "pair turn"}),  # rotary and an RMSNorm without weight
    "next turns": frozenset({"next sign", "next turn"}),
    "pair signs": frozenset({"pair sign"}),  # rotary and an RMSNorm with a weight
    "next signs": frozenset({"next sign"}),
    "linear": frozenset({"permute", "scale", "ones", "rotate", "shear"}) | _SIGNS | _PAIRS | _NEXT,  # only matrices
}


def kind_of(moves: frozenset[str]) -> str:
    """Return the widest kind that has only these moves."""
    return max((kind for kind in MOVES if MOVES[kind] <= moves), key=lambda kind: len(MOVES[kind]))


def bias_beside(role: str) -> str:
    """Return the name of the bias beside a weight: `bias` beside `weight`, `beta` beside `gamma`."""
    weight, bias = ("gamma", "beta") if role.endswith("gamma") else ("weight", "bias")
    return role.removesuffix(weight) + bias


@dataclass(frozen=True)
class Space:
    """A named space.

    Attributes:
        key: Its name in this model, with the number of its layer, if it has one.
        name: Its name in the table.
        size: Its dimension.
        kind: The moves that the table allows, one of `MOVES`.
        part: attention, ffn, stream or head.
        layer: The layer that it belongs to, if any.
        batch: The spaces for each of whose entries it has its own map (heads, for qk).
        output: Whether its vectors are outputs of the model (hidden states without a head), so that nothing may act.
    """

    key: str
    name: str
    size: int
    kind: str
    part: str
    layer: int | None
    batch: tuple[str, ...] = ()
    output: bool = False


@dataclass(frozen=True)
class Norm:
    """A norm `source -> target`; its weight is diagonal in `target`. A norm over several spaces, as in
    `rmsnorm: (head qk) -> (head qk)` or `layernorm: [rope | nope] -> (head [rope | nope])`, is known by the last.

    Attributes:
        kind: layernorm or rmsnorm.
        source: The space that it normalizes.
        target: The space of the normed vectors.
        copies: How many vectors side by side are normalized as one, as in `layernorm: (4 stream) -> (4 merged)`.
        over: The spaces whose entries are normalized together, in order: (head, qk) and (rope, nope) above; a norm of
            `qk` alone, or of `rope` and `nope`, normalizes each head by itself.
        beside: Those of them that are parts of the same vector as the source (rope).
        unit: The stored value of a weight of 1. It is 0 for `rmsnorm1p` and `layernorm1p`, which store weight - 1, as
            Gemma and Nemotron do.
        even: Whether all entries of its weight are equal, so that it commutes with rotations, as if it had none.
    """

    kind: str
    source: str
    target: str
    copies: int = 1
    over: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    unit: float = 1.0
    even: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the spaces of which its vector consists: the source, and those beside it."""
        return (*self.beside, self.source)

    @property
    def nested(self) -> bool:
        """Return whether it normalizes several such vectors as one: those of all heads, in `(head qk)`."""
        return len(self.over) > len(self.parts)

    def weight(self, stored: Tensor) -> Tensor:
        """Return its weight, given what is stored of it."""
        return stored + (1 - self.unit)

    @property
    def writes_back(self) -> bool:
        """Return whether the normed vector is in the same space, so that its weight has no reader to move into."""
        return self.source == self.target


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Attributes:
        role: Its name in the table.
        name: Its name on disk.
        shape: Its shape, as the table describes it.
        axes: The spaces on each of its axes.
        layer: The layer that it belongs to, if any.
        norm: The norm whose weight it is, if any.
        alias: Another role with the same numbers (tied weights).
        head: Whether it belongs to a task head.
        notes: Its gauge freedom, see `canonical`.
        stored: Whether it is in the file, which may omit a tied tensor.
        pieces: If a file has a tensor for every expert, their names.
        joint: The axis along which the pieces are joined.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    layer: int | None = None
    norm: Norm | None = None
    alias: str | None = None
    head: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    stored: bool = True
    pieces: tuple[str, ...] = ()
    joint: int = 0

    @property
    def diagonal(self) -> bool:
        """Return whether it multiplies entry by entry: the weight of a norm, or a factor per channel (LayerScale)."""
        return self.norm is not None or "scales" in self.notes

    @property
    def scaled(self) -> list[str]:
        """Return the tensors whose output it multiplies, if it is such a factor."""
        return self.notes.get("scales", "").split()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names on disk: one, or those of all experts."""
        return self.pieces or (self.name,)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor, given its parts in the order of `names`."""
        return parts[0] if len(parts) == 1 else torch.cat([*parts], self.joint)

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every name on disk with its part of the tensor, as it is stored."""
        parts = tensor.chunk(len(self.pieces), self.joint) if self.pieces else (tensor,)
        yield from zip(self.names, parts, strict=True)


@dataclass(frozen=True)
class Signature:
    """All tensors and spaces of one model.

    Attributes:
        family: The name of the table.
        tensors: Role -> tensor, in the order of execution.
        spaces: Key -> space.
        root: Every space -> the one whose element it shares: the target of a norm -> its source, the space of a tied
            head -> that of the embedding.
        absent: The tied tensors that the file omits, and norms without weights (`bare`: the role that follows).
        temperature: The names of the spaces whose size sets the scale of attention's logits.
        eps: The config key of the norms' eps.
    """

    family: str
    tensors: Mapping[str, Entry]
    spaces: Mapping[str, Space]
    root: Mapping[str, str]
    absent: Mapping[str, Entry] = field(default_factory=dict)
    temperature: tuple[str, ...] = ()
    eps: str = ""

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {key: space.size for key, space in self.spaces.items()}

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """Return root space -> all spaces that share its element."""
        found: dict[str, list[str]] = {}
        for key in self.spaces:
            found.setdefault(self.root[key], []).append(key)
        return found

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Return root space -> kind: the moves that its members and the norms that read them allow."""
        moves = {
            root: frozenset.intersection(
                *(MOVES["fixed" if self.spaces[key].output else self.spaces[key].kind] for key in keys)
            )
            for root, keys in self.members.items()
        }
        for entry in (*self.tensors.values(), *self.absent.values()):
            if entry.norm is not None:
                for root in (self.root[part] for part in entry.norm.parts):
                    moves[root] &= self._left_by(entry, entry.norm, root)
            if "nonlinear" in entry.notes:
                for leaf in self.leaves(entry):
                    moves[self.root[leaf.space]] &= MOVES["permutation" if not leaf.dual else "linear"]
        for entry in (*self.tensors.values(), *self.absent.values()):
            tied = self.tensors.get(entry.alias or "")
            for mine, theirs in zip(self.leaves(entry), self.leaves(tied) if tied else (), strict=False):
                if mine.dual != theirs.dual:  # the same tensor writes and reads
                    moves[self.root[mine.space]] &= MOVES["orthogonal"]
        for space in self.spaces.values():
            for outer in space.batch:  # a space with others inside it can only be permuted
                moves[outer] &= MOVES["permutation"]
        return {root: kind_of(found) for root, found in moves.items()}

    def moves(self, space: str) -> frozenset[str]:
        """Return the moves of a space that its tensors and the norms that read them allow."""
        return MOVES[self.kinds[self.root[space]]]

    def _left_by(self, entry: Entry, norm: Norm, root: str) -> frozenset[str]:
        """Return the moves that a norm allows in the space that it normalizes."""
        layer_norm = norm.kind == "layernorm"
        if not set(self.spaces[root].batch) <= {self.root[leaf.space] for leaf in self.leaves(entry)}:
            return MOVES["fixed" if layer_norm else "signs"]  # one weight for all heads
        if norm.writes_back and not norm.even:
            return MOVES["permutation" if layer_norm else "odd"]
        return MOVES["ones" if layer_norm else "orthogonal"]

    @cached_property
    def sharing(self) -> set[str]:
        """Return the roles of tensors that share their numbers with another, so that one use cannot change alone."""
        copies = {role: entry.alias for role, entry in self.tensors.items() if entry.alias is not None}
        return {*copies, *copies.values()}

    @cached_property
    def touching(self) -> dict[str, list[str]]:
        """Return root space -> roles of the tensors with it on an axis (without aliases)."""
        found: dict[str, list[str]] = {root: [] for root in self.members}
        for role, entry in self.tensors.items():
            if entry.alias is None:
                for key in dict.fromkeys(self.root[leaf.space] for leaf in self.leaves(entry)):
                    found[key].append(role)
        return found

    @cached_property
    def having(self) -> dict[Leaf, dict[str, None]]:
        """Return leaf -> roles of the tensors with it on an axis, or that read it according to a note, in order."""
        found: dict[Leaf, dict[str, None]] = {}
        for role, entry in self.tensors.items():
            noted = (Leaf(space, dual=True) for space in entry.notes.get("reads", "").split())
            for leaf in (*self.leaves(entry), *noted):
                found.setdefault(leaf, {})[role] = None
        return found

    @property
    def norms(self) -> list[Norm]:
        return [entry.norm for entry in (*self.tensors.values(), *self.absent.values()) if entry.norm]

    @property
    def layers(self) -> list[int]:
        return sorted({entry.layer for entry in self.tensors.values() if entry.layer is not None})

    def leaves(self, entry: Entry) -> tuple[Leaf, ...]:
        """Return the leaves of a tensor that are spaces, without constants."""
        return space_leaves(entry.axes)

    def views(self, role: str, tensor: Tensor, root: str) -> Iterator[tuple[Tensor, Leaf, tuple[str, ...]]]:
        """Yield every occurrence of a space in a tensor.

        Args:
            role: The role of the tensor.
            tensor: The tensor.
            root: The root of the space.

        Yields:
            A view (*batch, n, *rest) that can be written to, its leaf, and the roots of all dimensions of its block.
        """
        batch = self.spaces[root].batch
        for block, found in blocks(tensor, self.tensors[role].axes, self.sizes):
            roots = tuple(self.root.get(leaf.space, "") for leaf in found)
            for dim, leaf in enumerate(found):
                # A norm's weight that all heads share has no axis for them; only maps that do not change it may act.
                if roots[dim] == root and set(batch) <= set(roots):
                    front = (*(roots.index(outer) for outer in batch), dim)
                    rest = (other for other in range(len(found)) if other not in front)
                    yield block.permute(*front, *rest), leaf, roots

    def part(self, entry: Entry) -> str:
        """Return the part of the model to which a tensor belongs: attention, ffn, norm, embedding, head or other.

        A bias belongs to the part of its weight, a factor per channel to that of the tensor it multiplies.
        """
        if entry.head:
            return "head"
        made = [entry.role.removesuffix("bias") + "weight"] if entry.role.endswith("bias") else entry.scaled
        entries = (entry, *(self.tensors[role] for role in made if role in self.tensors))
        parts = {self.spaces[leaf.space].part for one in entries for leaf in self.leaves(one)}
        for part in ("attention", "ffn"):
            if part in parts:
                return part
        if entry.norm is not None or entry.role.removesuffix(".bias") + ".weight" in self._norm_roles:
            return "norm"
        kinds = {self.spaces[leaf.space].kind for leaf in self.leaves(entry)}
        return "embedding" if kinds & {"fixed", "rows"} else "other"

    @cached_property
    def _norm_roles(self) -> frozenset[str]:
        return frozenset(role for role, entry in self.tensors.items() if entry.norm is not None)
