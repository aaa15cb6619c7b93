# SPDX-License-Identifier: Apache-2.0
"""Flat directions that only a few architectures have: see the notes in their tables, and `tangents`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from ..gauge.dataflow import absorb, along, bias_of, cut, has, noted, outlets, readers, returns, summands, vanishes
from ..groups.group import units
from ..groups.orthogonal import complement_of_ones
from ..tables.axes import Leaf
from ..tables.signature import MOVES, Signature, bias_beside
from .directions import SPAN, Tangent, Tensors, along_axis, gain, lie, meeting, sandwiched, singular, spread


def constant_ones(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield constants along ones in a sum that only LayerNorms read. If the sum leaves the model (CLIP's image tower),
    they compensate each other; a norm of several vectors as one (Swin) does not see constants that all of them
    share."""
    order = list(signature.tensors)
    for space in {e.norm.source for e in signature.tensors.values() if e.norm}:
        norms = [e.norm for e in signature.tensors.values() if e.norm and e.norm.source == space]
        if any(norm.kind != "layernorm" for norm in norms) or readers(signature, space):
            continue
        start = max((i for i, role in enumerate(order) if returns(signature, role, space)), default=-1)
        entries = (signature.tensors[role] for role in order[start + 1 :])
        constants = [e.role for e in entries
                     if e.axes == (Leaf(space),) and not e.diagonal and "nonlinear" not in e.notes]  # fmt: skip
        ones = torch.ones(signature.sizes[space], dtype=torch.float64)
        if signature.spaces[space].output or not MOVES[signature.spaces[space].kind]:
            yield from ({constants[0]: ones, other: -ones} for other in constants[1:])
        elif "ones" in MOVES[signature.spaces[space].kind] and (start < 0 or sandwiched(signature, space)):
            yield from ({role: ones} for role in constants)


def leaning(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A sum x that LayerNorms and matrices read, as the neck of SAM's tower reads the last one: norms do not see
    x -> x + (a . x) 1, which the matrices undo."""
    for space in {e.norm.source for e in signature.tensors.values() if e.norm}:
        norms = [e.norm for e in signature.tensors.values() if e.norm and e.norm.source == space]
        moving = "ones" in MOVES[signature.spaces[space].kind] and not signature.spaces[space].output
        if not moving or not readers(signature, space):
            continue
        if all(norm.kind == "layernorm" and norm.copies == 1 and not norm.writes_back for norm in norms):
            for unit in units((signature.sizes[space],)):
                yield lie(signature, tensors, {space: torch.ones_like(unit).unsqueeze(-1) * unit})


def overlooked(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes v of what is written into a sum after its last norm. Its one reader W maps v to zero, or to a
    multiple of ones, which a LayerNorm does not see: W (x + v) = W x (the neck of SAM's tower)."""
    order = list(signature.tensors)
    for space in {e.norm.source for e in signature.tensors.values() if e.norm}:
        last = max(
            i for i, e in enumerate(signature.tensors.values()) if e.norm and space in (e.norm.source, e.norm.target)
        )
        reading, read = readers(signature, space), Leaf(space, dual=True)
        writing = [role for role in order[last + 1 :] if has(signature, role, Leaf(space))]
        pieces = cut(signature, reading[0], tensors[reading[0]]) if len(reading) == 1 and writing else []
        if len(pieces) != 1 or signature.spaces[space].output or order.index(writing[-1]) > order.index(reading[0]):
            continue
        ((view, axes),) = pieces
        matrix = view.movedim(axes.index(read), -1)
        if not axes[0].constant and axes[0] != read and vanishes(signature, reading[0], axes[0].space):
            matrix = matrix - matrix.mean(0)
        values, vh = singular(matrix.reshape(-1, matrix.shape[-1]))
        for direction in vh[int((values > SPAN).sum()) :]:
            for role in writing:
                yield from along_axis(signature, tensors, role, Leaf(space), direction)


def lone_rows(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield scales: a norm of just a special token (CLIP's class token) and its position does not see their scale."""
    order = list(signature.tensors)
    for role, _ in noted(signature, "rows"):
        space = signature.leaves(signature.tensors[role])[-1].space
        sources = {other: e.norm.source for other, e in signature.tensors.items() if e.norm}
        reading = [other for other in order[order.index(role) :]
                   if has(signature, other, Leaf(space, dual=True)) or sources.get(other) == space]  # fmt: skip
        alone = len(reading) == 1 or (reading and returns(signature, reading[0], space))
        if not alone or reading[0] not in sources:
            continue
        for target, some in summands(signature, signature.tensors[role])[0]:
            row, own = (tensors[one].reshape(-1, signature.sizes[space]) for one in (role, target))
            for i in range(some.start, some.stop):
                found = torch.zeros_like(row)
                found[i] = row[i] + own[i - some.start]
                yield {role: found.view(tensors[role].shape)}


def lone_readers(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes around a parameter p that matrices read, the same for all inputs (a probe that asks for a summary).
    Such a matrix makes the constant W p + c of it, so c can undo a change of p or of a row of W."""
    for role, entry in signature.tensors.items():
        leaf = next(iter(signature.leaves(entry)), None)
        if leaf is None or leaf.dual or entry.diagonal or role.endswith("bias"):
            continue
        if not max(entry.shape) == tensors[role].numel() == signature.sizes[leaf.space]:
            continue
        p, read = tensors[role].reshape(-1), Leaf(leaf.space, dual=True)
        for reader in readers(signature, leaf.space):
            bias = bias_of(signature, reader, (read,))
            if bias is None:
                continue
            for unit in units(p.shape):
                yield from meeting(signature, tensors, reader, bias, read, unit, p)
                made = torch.zeros_like(tensors[bias])
                absorb(signature, {**tensors, bias: made}, reader, bias, -unit, (leaf,))
                for number in range(len(cut(signature, bias, made))):
                    part = torch.zeros_like(made)
                    cut(signature, bias, part)[number][0].add_(cut(signature, bias, made)[number][0])
                    yield {role: unit.view(entry.shape), bias: part}


def lone_products(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes of a vector p and of a matrix W that have a space for themselves and keep W p: of W along whatever
    is orthogonal to p, and of both, dp and -W dp p^T / |p|^2."""
    for own in signature.having:
        read = Leaf(own.space, dual=not own.dual)
        role, *others = signature.having[own]
        reader, *more = signature.having.get(read, {role: None})
        alone = signature.tensors[role].axes == (own,) and not (others or more) and reader != role
        if not alone or signature.moves(own.space) != MOVES["linear"]:
            continue
        p = tensors[role]
        for rest in torch.linalg.svd(p.unsqueeze(0)).Vh[1:]:
            yield from along_axis(signature, tensors, reader, read, rest)
        for unit in units(p.shape):
            found = torch.zeros_like(tensors[reader])
            views = (along(signature, reader, tensor, read) for tensor in (tensors[reader], found))
            for view, taken in zip(*views, strict=True):
                taken -= (view @ unit).unsqueeze(-1) * p / (p @ p)
            yield {role: unit, reader: found}


def unscaled(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    for role, word in noted(signature, "unscaled"):
        ((view, axes),) = cut(signature, role, found := tensors[role].clone())
        dim = next(i for i, leaf in enumerate(axes) if not leaf.constant and signature.spaces[leaf.space].name == word)
        for unit in units((view.shape[dim],)):
            yield {role: (view * spread(unit, [dim], view.dim())).reshape(found.shape)}


def batch_norms(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A batch norm w (x - m) / sqrt(v) + b has two redundant numbers in each channel, and one more together with the
    convolution that reads it. Adding ones to x does not change it if m follows, and LayerNorms that read x do not see
    them."""
    order = list(signature.tensors)
    for weight, reader in noted(signature, "batch"):
        stem, space = weight.removesuffix("weight"), signature.leaves(signature.tensors[weight])[0].space
        bias, mean, variance = (f"{stem}{name}" for name in ("bias", "running_mean", "running_var"))
        kernel = tensors[reader or ""]  # (groups * out, in, taps)
        for unit in units(tensors[weight].shape):
            yield {weight: unit * tensors[weight], variance: 2 * unit * tensors[variance]}
            yield {mean: unit, bias: unit * tensors[weight] / tensors[variance].sqrt()}
            inputs = unit.view(-1, 1, kernel.shape[1], 1)
            read = (kernel.view(len(inputs), -1, *kernel.shape[1:]) * inputs).view(kernel.shape)
            yield {weight: unit * tensors[weight], bias: unit * tensors[bias], reader or "": -read}
        norms = [entry.norm for entry in signature.tensors.values() if entry.norm and entry.norm.source == space]
        others = [role for role in readers(signature, space) if role != reader]
        if all(norm.kind == "layernorm" for norm in norms) and (norms[0].writes_back or not others):
            before = (role for role in order[: order.index(weight)] if signature.tensors[role].axes == (Leaf(space),))
            yield dict.fromkeys([*before, mean], torch.ones_like(tensors[mean]))


def gated_convolutions(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """The half of a convolution's channels that does not enter the sigmoid can be scaled, and its readers inversely."""
    order = list(signature.tensors)
    for weight, _ in noted(signature, "glu"):
        bias, space = bias_beside(weight), signature.leaves(signature.tensors[weight])[0].space
        after = [role for role in order[order.index(weight) + 1 :] if has(signature, role, Leaf(space, dual=True))]
        reading = after[:1] if after and "glu" in signature.tensors[after[0]].notes else after
        for unit in units((signature.sizes[space],)) if reading else ():
            half = torch.cat([unit, torch.zeros_like(unit)])
            found = {weight: half.view(-1, 1, 1) * tensors[weight], bias: half * tensors[bias]}
            yield found | {role: -tensors[role] * spread(unit, [1], tensors[role].dim()) for role in reading}


def between_zeros(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A convolution over the output of a LayerNorm, padded with a zero at both ends. The part of x = D xhat + b along
    h = D^-1 1 is the constant h.b, so W_t + u h^T adds u (h.b) wherever tap t is not over a zero, as inner taps never
    are. So D moves into all taps, b into their parts along h, and these parts of inner taps into the bias."""
    order = list(signature.tensors)
    for weight, _ in noted(signature, "glu"):
        source = next((leaf.space for leaf in signature.leaves(signature.tensors[weight]) if leaf.dual), "")
        writing = (role for role in reversed(order[: order.index(weight)]) if has(signature, role, Leaf(source)))
        bias = next(writing, "")
        gain = bias.removesuffix("bias") + "weight"
        norm = signature.tensors[gain].norm if gain in order else None
        if norm is None or norm.kind != "layernorm" or not bias.endswith("bias"):
            continue
        kernel, own, h = tensors[weight], bias_beside(weight), 1 / tensors[gain]
        h = h / (h @ tensors[bias])
        for unit in units(tensors[gain].shape):
            yield {gain: unit * tensors[gain], bias: unit * tensors[bias], weight: -kernel * unit.view(1, -1, 1)}
            yield {bias: unit, weight: -torch.einsum("oit,i,j->ojt", kernel, unit, h)}
        for tap in range(1, kernel.shape[-1] - 1):
            for unit in units(kernel.shape[:1]):
                found = torch.zeros_like(kernel)
                found[..., tap] = unit.unsqueeze(-1) * h
                yield {weight: found, own: -unit}


def idle(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    headed = any(entry.head for entry in signature.tensors.values())
    for role, word in noted(signature, "idle"):
        if headed and word and signature.tensors[role].layer == signature.layers[-1]:
            for unit in units(tensors[role].shape):
                parts = [axes[0] for view, axes in cut(signature, role, unit) if bool(view.any())]
                if all(signature.spaces[leaf.space].name in word.split() for leaf in parts):
                    yield {role: unit}


def constants(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield constants that a projection passes on, and that vectors added to its output compensate (XLNet's
    queries)."""
    for role, entry in signature.tensors.items():
        bias = bias_of(signature, role, tuple(signature.leaves(entry))) if role.endswith("weight") else None
        if bias is None or "constant" not in entry.notes:
            continue
        for unit in units(tensors[bias].shape):
            yield {bias: unit, **dict.fromkeys(entry.notes["constant"].split(), -unit)}


def circles(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A post-LN sum without a bias: constants that values add to it, or ones, can be subtracted from the bias of the
    norm with which the sum begins, if all readers of that norm can absorb constants (XLNet)."""
    for outlet in outlets(signature):
        values = [role for role in outlet.readers if "passes" in signature.tensors[role].notes]
        bias = bias_of(signature, values[0], outlet.source) if len(values) == 1 else None
        vectors = [writer for writer in outlet.writers if len(signature.tensors[writer].axes) == 1]
        if outlet.bias is None or bias is None or vectors or not outlet.writers:
            continue
        ones = torch.ones_like(tensors[outlet.bias])
        for value in [*units(tensors[bias].shape), torch.zeros_like(tensors[bias])]:
            found = {bias: value.clone(), outlet.bias: torch.zeros_like(ones) if bool(value.any()) else ones}
            for writer in outlet.writers if bool(value.any()) else ():
                for constant, axes in cut(signature, bias, -value):
                    absorb(signature, {**tensors, **found}, writer, outlet.bias, constant, axes)
            for reader in outlet.readers:
                own = bias_of(signature, reader, outlet.source)
                named = signature.tensors[reader].notes.get("constant")
                for place in named.split() if named else [own] if own else []:
                    found.setdefault(place, torch.zeros_like(tensors[place]))
                    constant, leaves = -found[outlet.bias], (Leaf(outlet.norm.target),)
                    absorb(signature, {**tensors, **found}, reader, place, constant, leaves)
            yield found


def twice_normed(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes of a norm that only another norm reads, which sees neither the scale of its output nor, if it is a
    LayerNorm, the mean."""
    order = list(signature.tensors)
    for place, (role, entry) in enumerate(signature.tensors.items()):
        bias = bias_beside(role)
        if entry.norm is None or not entry.norm.writes_back or signature.tensors.get(bias, entry).norm is not None:
            continue
        space = entry.norm.target
        after = next((r for r in order[place + 1 :] if r != bias and _touches(signature, r, space)), role)
        if after == role or not returns(signature, after, space):
            continue
        yield {role: entry.norm.weight(tensors[role]), bias: tensors[bias]}
        if (norm := signature.tensors[after].norm) is not None and norm.kind == "layernorm":
            yield {bias: torch.ones_like(tensors[bias])}


def on_an_ellipsoid(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes of a LayerNorm that only an RMSNorm reads. Its output is y = D n + b with n . 1 = 0 and |n|^2 = d.

    With h = D^-1 1, over b . D^-1 1, it is h . y = 1, so changes of y are linear in y: T = dD D^-1 (1 - b h^T) for D,
    db h^T for b, and D A D^-1 (1 - b h^T) where A rotates n and all that it is made of. The RMSNorm's output changes by
    T y - y (y . T y) / |y|^2, over |y|. Its readers undo T y. The rest is a scale for sums of such T with a symmetric
    part of a multiple of the identity and of the ellipsoid |D^-1 (y - b)|^2 - d (h . y)^2 = 0. This yields every T; the
    audit finds the sums.
    """
    normed = [(entry.norm, role) for role, entry in signature.tensors.items() if entry.norm]
    for (norm, role), (reading, after) in combinations(normed, 2):
        bias, both = bias_beside(role), (norm.kind, reading.kind) == ("layernorm", "rmsnorm")
        if not both or reading.source != norm.target or bias not in tensors:
            continue
        factors, root = gain(tensors, role, norm), signature.root[norm.source]
        h = 1 / factors / (tensors[bias] / factors).sum()
        linear = torch.eye(len(h), dtype=h.dtype) - torch.outer(tensors[bias], h)
        inner = {other.target: gain(tensors, one, other) for other, one in normed
                 if signature.root[other.source] == root and one not in (role, after)}  # fmt: skip
        behind = gain(tensors, after, reading)

        def taken(change: Tensor, target: str = reading.target, behind: Tensor = behind) -> Tangent:
            return lie(signature, tensors, {target: behind.unsqueeze(-1) * change / behind})

        for unit in units(h.shape):
            yield {role: unit, **taken(torch.diag(unit / factors) @ linear)}
            yield {bias: unit, **taken(torch.outer(unit, h))}
        plane = complement_of_ones(len(h))
        for i, j in combinations(range(plane.shape[1]), 2):
            turn = torch.outer(plane[:, i], plane[:, j]) - torch.outer(plane[:, j], plane[:, i])
            maps = {target: values.unsqueeze(-1) * turn / values for target, values in inner.items()}
            moved = lie(signature, tensors, {**maps, norm.source: turn})
            moved.pop(bias, None)
            yield {**moved, **taken(factors.unsqueeze(-1) * turn / factors @ linear)}


def _touches(signature: Signature, role: str, space: str) -> bool:
    norm = signature.tensors[role].norm
    return has(signature, role, Leaf(space)) or has(signature, role, Leaf(space, dual=True)) or (
        norm is not None and norm.source == space)  # fmt: skip
