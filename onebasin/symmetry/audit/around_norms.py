# SPDX-License-Identifier: Apache-2.0
"""What a norm takes off what enters it, and what is constant in what it puts out.

No group acts there and matching has no use for it: the scale of all that a norm reads, the ones that a LayerNorm does
not see, and what its readers make of the constant part of its output. Which of these trade with each other depends on
what stands between two norms, so here is what each tensor may give alone; the audit finds the sums that are flat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..gauge.dataflow import along, has
from ..groups.group import units
from ..tables.axes import Leaf
from ..tables.signature import Signature
from .directions import Tensors, gain


def around_norms(signature: Signature, tensors: Tensors, role: str) -> Tensor:
    """Return what a tensor may give: its scale beside a norm, every entry of a vector, and along a LayerNorm's ones.

    Returns:
        (directions, *its shape).
    """
    tensor = tensors[role]
    same = [other for other, entry in signature.tensors.items() if entry.alias == role]
    found = [each for other in (role, *same) for each in _given(signature, tensors, other, tensor)]
    return torch.stack(found) if found else tensor.new_zeros(0, *tensor.shape)


def _given(signature: Signature, tensors: Tensors, role: str, tensor: Tensor) -> Iterator[Tensor]:
    entry = signature.tensors[role]
    if max(tensor.shape) == tensor.numel():  # a vector, as one row too
        yield from units(tensor.shape)
        return
    unseen: dict[Leaf, list[Tensor]] = {}
    for weight, other in signature.tensors.items():
        norm = other.norm
        if norm is None:
            continue
        own, read = Leaf(norm.source), Leaf(norm.target, dual=True)
        leaves = [leaf for leaf in dict.fromkeys([own, read, Leaf(norm.target)]) if has(signature, role, leaf)]
        if leaves:
            yield tensor
        if norm.kind != "layernorm" or norm.copies > 1 or weight not in tensors:
            continue
        ones, constant = torch.ones_like(tensors[weight]), 1 / gain(tensors, weight, norm)
        near = not norm.writes_back or entry.layer is None or _follows(signature, weight, role)
        for leaf in leaves:
            unseen.setdefault(leaf, [ones])
            unseen[leaf] += [constant] if near else []
    for leaf, directions in unseen.items():
        alone = directions if 2 * len(directions) <= signature.sizes[leaf.space] else directions[:1]
        for block, view in enumerate(along(signature, role, tensor, leaf)):
            for unit in units(view.shape[:-1]):
                for direction in alone:  # of fewer than there are: else they would span all
                    found = torch.zeros_like(tensor)
                    list(along(signature, role, found, leaf))[block].add_(unit.unsqueeze(-1) * direction)
                    yield found


def _follows(signature: Signature, weight: str, role: str) -> bool:
    """Whether a tensor comes after a norm that writes back, and before the next norm of the same space, or in other
    layers than those that this norm is the last of (a decoder that reads what its encoder puts out)."""
    order = list(signature.tensors)
    norm, start = signature.tensors[weight].norm, order.index(weight)
    stop = next((i for i in range(start + 1, len(order)) if (other := signature.tensors[order[i]].norm) is not None
                 and norm is not None and other.source == norm.source), len(order))  # fmt: skip
    before, after = (re.sub(r"\d+.*", "", one) for one in (weight, order[stop] if stop < len(order) else ""))
    return start < order.index(role) and (order.index(role) < stop or before != after)
