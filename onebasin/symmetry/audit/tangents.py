# SPDX-License-Identifier: Apache-2.0
"""A signature's continuous symmetries to first order: directions in parameter space that leave all outputs unchanged.

These are the Lie algebra of every space's group; the gauge freedom that the canonical form removes, by the derivative
of the form; and others, such as the scale of a sum that only norms read. They are linearly dependent; `audit` takes
their span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..gauge.dataflow import cut, joined, noted, outlets, speaks_of
from ..gauge.rewrites import steps
from ..groups.group import units
from ..levels import largest_group
from ..tables.axes import Leaf, leaves
from ..tables.signature import MOVES, Entry, Norm, Signature, bias_beside
from .directions import SPAN, Tangent, Tensors, gain, lie, singular, spread
from .special import (
    batch_norms,
    between_zeros,
    circles,
    constant_ones,
    constants,
    gated_convolutions,
    idle,
    leaning,
    lone_products,
    lone_readers,
    lone_rows,
    on_an_ellipsoid,
    overlooked,
    twice_normed,
    unscaled,
)
from .sums import apart, branches, first_read, gains, passed_as_ones, scales, shared_rows, shifts, starts


def tangents(signature: Signature, tensors: Tensors, stated: bool = False, tried: bool = False) -> Iterator[Tangent]:
    """Yield all directions that are flat according to the signature; they may be linearly dependent.

    Inputs are assumed to have no padding: directions that only padding excludes are flat.

    Args:
        signature: Of the model, without ties.
        tensors: Role -> tensor.
        stated: Only yield those that follow from its groups, its canonical form and its notes. Others are guessed from
            the readers and writers of a space, and need not be flat.
        tried: Also yield those that are flat in a few models only, which no table tells: see which ones are.
    """
    whole = {role: replace(e, notes={k: v for k, v in e.notes.items() if k != "padded"})
             for role, e in signature.tensors.items()}  # fmt: skip
    signature = joined(replace(signature, tensors=whole))
    implied = dict(_implied(signature, tensors))
    biases = {bias: entry for bias, (entry, _, _) in implied.items()}
    signature = replace(signature, tensors={**signature.tensors, **biases})
    tensors = {**tensors, **{bias: torch.zeros(entry.shape, dtype=torch.float64) for bias, entry in biases.items()}}
    noted_so = (_unseen, unscaled, idle, constants, batch_norms, gated_convolutions, between_zeros)
    sums = (passed_as_ones, circles, apart, lone_rows, shifts)
    norms = (first_read, constant_ones, leaning, overlooked, twice_normed)
    guessed = () if stated else (*norms, *sums, scales, starts, branches, gains)
    rare = (shared_rows, lone_products, lone_readers, on_an_ellipsoid) if tried else ()
    for generate in (_groups, _gauge, *noted_so, *guessed, *rare):
        for found in generate(signature, tensors):
            for bias in biases.keys() & found.keys():
                _, reader, direction = implied[bias]
                found[reader] = found.get(reader, 0) + _outer(signature, reader, bias, found.pop(bias), direction)
            yield found


def _implied(signature: Signature, tensors: Tensors) -> Iterator[tuple[str, tuple[Entry, str, tuple[Leaf, Tensor]]]]:
    """Yield implicit biases of the readers of a LayerNorm: a normed vector x = D xhat + b has the constant part h.b
    along h = D^-1 1, so that W + u h^T / (h.b) adds u. Role -> entry, the reader, its leaf and h / (h.b)."""
    for outlet in outlets(signature):
        if outlet.norm.kind != "layernorm" or outlet.bias is None:
            continue
        h = 1 / gain(tensors, outlet.role, outlet.norm)
        for reader in outlet.readers:
            entry, bias = signature.tensors[reader], bias_beside(reader)
            if bias in signature.tensors or bias == reader:
                continue
            found = [leaves(axis) for axis in entry.axes]
            kept = [i for i, parts in enumerate(found)
                    if outlet.source[0] not in parts and not all(leaf.constant for leaf in parts)]  # fmt: skip
            axes, shape = tuple(entry.axes[i] for i in kept), tuple(entry.shape[i] for i in kept)
            notes = {word: text for word, text in entry.notes.items() if word != "degree"}  # of a matrix
            yield bias, (replace(entry, role=bias, axes=axes, shape=shape, notes=notes), reader,
                         (outlet.source[0], _side_by_side(h / (h @ tensors[outlet.bias]), outlet.norm)))  # fmt: skip


def _side_by_side(vector: Tensor, norm: Norm) -> Tensor:
    """Return the vector with a dimension for the copies that the norm takes as one, if there are several."""
    return vector if norm.copies == 1 else vector.reshape(norm.copies, -1)


def _outer(signature: Signature, reader: str, bias: str, constant: Tensor, along: tuple[Leaf, Tensor]) -> Tensor:
    """Return u h^T in the shape of the reader."""
    leaf, direction = along
    out = torch.zeros(signature.tensors[reader].shape, dtype=torch.float64)
    written = ((target, axes) for target, axes in cut(signature, reader, out) if leaf in axes)
    for (target, axes), (part, names) in zip(written, cut(signature, bias, constant), strict=True):
        last = axes.index(leaf) + 1
        factors = (spread(part, [axes.index(name) for name in names], len(axes)),
                   spread(direction, list(range(last - direction.dim(), last)), len(axes)))  # fmt: skip
        target += factors[0] * factors[1]
    return out


def _groups(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield the Lie algebra of each space's largest group. A norm y = D xhat + b turns X into D X D^-1 in its output,
    where D is the same for all copies that it takes as one."""
    for root, kind in signature.kinds.items():
        space, members = signature.spaces[root], signature.members[root]
        inner = {e.norm.target: gain(tensors, r, e.norm)[-space.size :] for r, e in signature.tensors.items()
                 if e.norm and signature.root[e.norm.source] == root and "ones" in MOVES[kind]}  # fmt: skip
        batch = tuple(signature.sizes[outer] for outer in space.batch)
        for x in largest_group(kind).algebra(space.size, batch):
            maps = {key: x if key not in inner else inner[key].unsqueeze(-1) * x / inner[key] for key in members}
            yield lie(signature, tensors, maps)


def _gauge(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield the freedom that the canonical form removes: since f(x) = f(C(x)), f is constant along the kernel of the
    derivative of C."""
    found = list(steps(signature))
    together = {step.role: {step.role} for step in found}  # sets of tensors that depend on one another
    for step in found:
        joint = set().union(*(together[role] for role in (step.role, *step.given) if role in together))
        together |= dict.fromkeys(joint, joint)
    for roles in {min(joint): sorted(joint) for joint in together.values()}.values():
        sizes = [tensors[role].numel() for role in roles]

        def form(numbers: Tensor, roles: list[str] = roles, sizes: list[int] = sizes) -> Tensor:
            parts = zip(roles, torch.split(numbers, sizes), strict=True)
            moved = {**tensors, **{role: part.reshape(tensors[role].shape).clone() for role, part in parts}}
            for step in found:
                if step.role in roles:
                    step.run(moved)
            return torch.cat([moved[role].flatten() for role in roles])

        derivative = torch.func.jacfwd(form)(torch.cat([tensors[role].flatten() for role in roles]))
        values, vh = singular(derivative)
        for direction in vh[int((values > SPAN * max(1.0, float(values[0]))).sum()) :]:
            parts = zip(roles, torch.split(direction, sizes), strict=True)
            yield {role: part.reshape(tensors[role].shape) for role, part in parts}


def _unseen(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    for role, word in (found for note in ("unused", "chooses") for found in noted(signature, note)):
        for unit in units(tensors[role].shape):
            parts = [axes for view, axes in cut(signature, role, unit) if bool(view.any())]
            if (
                bool(unit[: int(word)].any())
                if word and word.isdigit()
                else all(speaks_of(signature, axes, word) for axes in parts)
            ):
                yield {role: unit}
