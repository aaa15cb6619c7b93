# SPDX-License-Identifier: Apache-2.0
"""Blocks of spaces that the descent solves together, and components: sets of blocks that share no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from onebasin.symmetry import Group, Signature
from onebasin.symmetry.tables.axes import blocks as blocks_of
from onebasin.symmetry.tables.axes import nesting, size
from onebasin.symmetry.tables.classes import Classes

from .nested import chains

SMALL = 1 << 17  # entries of a tensor: 128 x 512 has fewer, 256 x 1024 more


@dataclass(frozen=True)
class Block:
    """Spaces that are optimised together: a single one, or a permutation of heads with the spaces inside them.

    member: the inner space that precedes others but does not batch them (`group` in `(kv group qk)`). nested: whether
    each space is inside the one before, and all but the last are permuted.
    """

    root: str
    inner: tuple[str, ...] = ()
    member: str | None = None
    nested: bool = False

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.root, *self.inner)


@dataclass(frozen=True)
class Component:
    blocks: list[Block]
    roles: list[str]

    @property
    def name(self) -> str:
        """Return the name by which its result is kept: that of its first space."""
        return self.blocks[0].root


def present(signature: Signature, roles: Sequence[str], groups: Mapping[str, Group]) -> dict[str, Group]:
    """Return the groups of those spaces that a tensor in `roles` touches."""
    touched = {signature.root[leaf.space] for role in roles for leaf in signature.leaves(signature.tensors[role])}
    return {root: group for root, group in groups.items() if root in touched}


def components_of(signature: Signature, roles: Sequence[str], active: Mapping[str, Group]) -> list[Component]:
    """Split the active spaces into sets that share no block of a tensor.

    Within a set, layers are in order and spaces shared by all layers last: after the start has placed these, every
    layer adapts to them before it influences them.
    """
    met = _met(signature, roles, active)
    before: dict[str, set[str]] = {}
    for role in roles:
        for leaf, around in nesting(signature.tensors[role].axes):
            if not leaf.constant:
                before.setdefault(signature.root[leaf.space], set()).update(signature.root[key] for key in around)
    inside: dict[str, list[str]] = {}
    for root in active:
        *still, outer = signature.spaces[root].batch or ("",)
        if (
            outer in active
            and tuple(still) == signature.spaces[outer].batch
            and not any(one in active for one in still)
        ):
            inside.setdefault(outer, []).append(root)
    for outer in list(inside):
        inside[outer] = _apart(inside[outer], [here for _, here in met], active)
        # Groups of heads inside fixed spaces are solved one space at a time.
        if signature.spaces[outer].batch and _member(inside[outer], before):
            del inside[outer]
    nested = chains(signature, active)
    inside |= {root: list(chain[1:]) for root, chain in nested.items()}
    joint = {root for inner in inside.values() for root in inner}
    classes = Classes(active)
    for carrier, inner in inside.items():
        for root in inner:
            classes.join(carrier, root)
    touched: dict[str, list[str]] = {root: [] for root in active}
    for role, here in met:
        for root in here:
            classes.join(here[0], root)
            if not touched[root] or touched[root][-1] != role:
                touched[root].append(role)

    def order(root: str) -> tuple[int, int]:
        layer = signature.spaces[root].layer
        return (1, 0) if layer is None else (0, layer)

    def block(root: str) -> Block:
        within = inside.get(root, [])
        if root in nested:
            return Block(root, tuple(within), nested=True)
        return Block(root, tuple(within), _member(within, before))

    components = []
    for members in classes.all():
        blocks = [block(root) for root in sorted(members, key=order) if root not in joint]
        mine = set(members)
        ordered = [role for role in roles if any(role in touched[root] for root in mine)]
        components.append(Component(blocks, ordered))
    return components


def workers_for(signature: Signature, asked: int | None) -> int | None:
    """Return the number of workers that was asked for; by default, one if all tensors are so small that threads wait
    longer for each other than they compute."""
    small = all(prod(entry.shape) < SMALL for entry in signature.tensors.values())
    return asked or (1 if small else None)


def _met(signature: Signature, roles: Sequence[str], active: Mapping[str, Group]) -> list[tuple[str, list[str]]]:
    """Return, for every block of every tensor, its role and the active spaces that it touches."""
    found = []
    for role in roles:
        entry = signature.tensors[role]
        meta = torch.empty([size(axis, signature.sizes) for axis in entry.axes], device="meta")
        for _, leaves in blocks_of(meta, entry.axes, signature.sizes):
            roots = dict.fromkeys(signature.root.get(leaf.space, "") for leaf in leaves)
            found.append((role, [root for root in roots if root in active]))
    return found


def _apart(within: Sequence[str], met: Sequence[Sequence[str]], active: Mapping[str, Group]) -> list[str]:
    """Return the spaces whose best elements do not depend on one another: of several factors on one axis (the gates
    around a short convolution), the first. The others are solved alone."""
    found: list[str] = []
    for root in within:
        beside = {other for here in met if root in here for other in here}
        if active[root].permutes or not any(one in beside and not active[one].permutes for one in found):
            found.append(root)
    return found


def _member(within: Sequence[str], before: Mapping[str, set[str]]) -> str | None:
    """Return the space inside heads that precedes others, if any."""
    return next((one for one in within if any(one in before[other] for other in within)), None)
