# SPDX-License-Identifier: Apache-2.0
"""Directions that a norm removes from its input, and the constant part of its output.

No group acts there, and matching does not use them: the scale of everything that a norm reads, the ones that a
LayerNorm does not see, and the effect of the constant part of its output on its readers; the scale of each channel
around a batch norm, and around a norm of a stream that at most permutes, whose weight no table folds. Which of these
compensate each other depends on the tensors between two norms. So this file lists the directions of each tensor
alone, and the audit finds the sums of them that are flat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..gauge.dataflow import along, has
from ..groups.group import units
from ..tables.axes import Leaf, nesting
from ..tables.axes import leaves as leaves_of
from ..tables.signature import MOVES, Signature
from .directions import Tensors, gain, part


def around_norms(signature: Signature, tensors: Tensors, role: str) -> Tensor:
    """Return directions of a tensor, (directions, *its shape): its scale next to a norm, every entry of a vector,
    changes along a LayerNorm's ones, and scales of channels."""
    tensor = tensors[role]
    same = [other for other, entry in signature.tensors.items() if entry.alias == role]
    found = [each for other in (role, *same) for each in _given(signature, tensors, other, tensor)]
    return torch.stack(found) if found else tensor.new_zeros(0, *tensor.shape)


def _given(signature: Signature, tensors: Tensors, role: str, tensor: Tensor) -> Iterator[Tensor]:
    entry, order = signature.tensors[role], list(signature.tensors)
    if max(tensor.shape, default=1) == tensor.numel():  # a vector, also one with further dimensions of 1, or a number
        yield from units(tensor.shape)
        return
    for leaf in _by_channel(signature):
        for block, view in enumerate(along(signature, role, tensor, leaf)):
            for unit in units(view.shape[-1:]):
                found = torch.zeros_like(tensor)
                list(along(signature, role, found, leaf))[block].add_(view * unit)
                yield found
    for leaf, outer in _lengths(signature, role):
        for unit in units(tuple(signature.sizes[space] for space in outer)):
            yield part(signature, {role: tensor}, role, {leaf}, outer, unit)
    unseen: dict[Leaf, list[Tensor]] = {}
    for weight, other in signature.tensors.items():
        norm = other.norm
        if norm is None:
            continue
        own, read = Leaf(norm.source), Leaf(norm.target, dual=True)
        leaves = [leaf for leaf in dict.fromkeys([own, read, Leaf(norm.target)]) if has(signature, role, leaf)]
        if leaves:
            yield tensor
        several = norm.copies > 1 or norm.nested or norm.beside
        if norm.kind != "layernorm" or several or weight not in tensors:
            continue
        ones, constant = torch.ones_like(tensors[weight]), 1 / gain(tensors, weight, norm)
        first = entry.layer is None and order.index(role) < order.index(weight)
        near = not norm.writes_back or first or _follows(signature, weight, role)
        for leaf in leaves:
            unseen.setdefault(leaf, [ones])
            unseen[leaf] += [constant] if near else []
    for leaf, directions in unseen.items():
        alone = directions if 2 * len(directions) <= signature.sizes[leaf.space] else directions[:1]
        for block, view in enumerate(along(signature, role, tensor, leaf)):
            for unit in units(view.shape[:-1]):
                for direction in alone:  # at most half as many as dimensions, or they would span everything
                    found = torch.zeros_like(tensor)
                    list(along(signature, role, found, leaf))[block].add_(unit.unsqueeze(-1) * direction)
                    yield found


def _by_channel(signature: Signature) -> list[Leaf]:
    """Return the spaces that a batch norm normalizes, and those of norms that write back where at most permutations
    move, written and read."""
    spaces: list[str] = []
    for role, entry in signature.tensors.items():
        if role.endswith("running_var"):
            spaces += [leaf.space for leaf in signature.leaves(entry)]
        norm = entry.norm
        if norm is not None and norm.writes_back and signature.moves(norm.target) <= MOVES["permutation"]:
            spaces.append(norm.target)
    return [Leaf(space, dual) for space in dict.fromkeys(spaces) for dual in (False, True)]


def _lengths(signature: Signature, role: str) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
    """Yield the spaces of heads, of a table's rows, or of what a matrix writes, whose vectors may be divided by their
    length (no table says so), each with the spaces that number these vectors."""
    entry = signature.tensors[role]
    table = len(entry.axes) == 2 and all(isinstance(axis, Leaf) and not axis.dual for axis in entry.axes)
    rows = tuple(axis.space for axis in entry.axes[:1] if isinstance(axis, Leaf) and table)
    written = set(leaves_of(entry.axes[0]))  # queries and keys by themselves, unlike values, whose readers shrink
    for leaf, outer in nesting(entry.axes):
        kind = "" if leaf.constant or entry.norm else signature.spaces[leaf.space].kind
        if kind == "orthogonal" or (kind == "fixed" and leaf in written and (outer or not table)):
            yield leaf, outer or rows


def _follows(signature: Signature, weight: str, role: str) -> bool:
    """Whether a tensor comes after a norm that writes back, and either before the next norm of the same space (unless
    the same matrices read both: PEGASUS-X), or in another stack of layers, if this norm is the last of its own (a
    decoder that reads the output of its encoder)."""
    order = list(signature.tensors)
    norm, start = signature.tensors[weight].norm, order.index(weight)
    assert norm is not None
    reading = {one for one in order[start + 1 :] if len(signature.tensors[one].axes) > 1
               and any(has(signature, one, Leaf(norm.target, dual)) for dual in (False, True))}  # fmt: skip
    stop = next((i for i in range(start + 1, len(order)) if (other := signature.tensors[order[i]].norm) is not None
                 and other.source == norm.source and not reading.isdisjoint(order[start:i])), len(order))  # fmt: skip
    before, after = (re.sub(r"\d+.*", "", one) for one in (weight, order[stop] if stop < len(order) else ""))
    last = before not in (weight, after)  # of its layers
    return start < order.index(role) and (order.index(role) < stop or last)
