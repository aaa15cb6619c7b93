# SPDX-License-Identifier: Apache-2.0
"""Flat directions of a sum and the norms that read it: scales, shifts, and terms that compensate each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gauge.dataflow import (
    absorb,
    along,
    bias_of,
    branch,
    contract,
    cut,
    downstream,
    dual,
    has,
    noted,
    outlets,
    readers,
    returns,
    speaks_of,
    vanishes,
)
from ..groups.group import units
from ..groups.orthogonal import complement_of_ones
from ..groups.signs import pairs
from ..tables.axes import Leaf, nesting
from ..tables.signature import MOVES, Signature, bias_beside
from .directions import (
    SPAN,
    Tangent,
    Tensors,
    along_axis,
    gain,
    lie,
    meeting,
    part,
    sandwiched,
    singular,
    spread,
)


def first_read(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield changes of the readers of a sum into which only a LayerNorm has written so far: along D^-1 1, it is
    constant (its bias)."""
    order = list(signature.tensors)
    for place, (role, entry) in enumerate(signature.tensors.items()):
        norm = entry.norm
        if norm is None or norm.kind != "layernorm" or not norm.writes_back or not sandwiched(signature, norm.source):
            continue
        rest = order[place + 1 + (bias_beside(role) in tensors) :]
        stop = next((i for i, other in enumerate(rest) if has(signature, other, Leaf(norm.source))), len(rest))
        read, unread = Leaf(norm.source, dual=True), 1 / gain(tensors, role, norm)
        for reader in rest[:stop]:
            bias = bias_of(signature, reader, (read,)) if has(signature, reader, read) else None
            if has(signature, reader, read) and bias_beside(role) not in tensors:
                yield from along_axis(signature, tensors, reader, read, unread)
            elif bias is not None:
                yield from meeting(signature, tensors, reader, bias, read, unread, tensors[bias_beside(role)])


def passed_as_ones(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """If the output of attention has no bias, values may still add constants that become multiples of ones, which
    LayerNorms of the sum do not see."""
    for role, word in noted(signature, "passes"):
        moving = [unit for unit in units(tensors[role].shape) for constant, axes in cut(signature, role, unit)
                  if bool(constant.any()) and speaks_of(signature, axes, word)]  # fmt: skip
        _, axes = cut(signature, role, tensors[role])[-1]
        source = tuple(dual(signature, leaf) for leaf in axes)
        reading = [reader for reader in readers(signature, axes[-1].space) if reader.endswith("weight")]
        if not moving or downstream(signature, role, axes) is not None or len(reading) != 1:
            continue
        ((weight, found),) = cut(signature, reading[0], tensors[reading[0]])
        out = next((leaf for leaf in found if not leaf.dual and leaf not in source), None)
        if out is None or not set(source) <= set(found) or not vanishes(signature, reading[0], out.space):
            continue
        made = torch.stack([contract(weight, found, cut(signature, role, unit)[-1][0], source, (out,))
                            for unit in moving], dim=1)  # (stream, units)  # fmt: skip
        values, vh = singular(made - made.mean(0))
        for direction in vh[int((values > SPAN * values.max()).sum()) :]:
            yield {role: torch.stack([part * unit for part, unit in zip(direction, moving, strict=True)]).sum(0)}


def apart(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A bias without a weight of its own and the part of a fused bias in the same space compensate each other
    (DeBERTa)."""
    vectors = {role: cut(signature, role, tensors[role]) for role, entry in signature.tensors.items()
               if role.endswith("bias") and len(entry.axes) == 1}  # fmt: skip
    for role, blocks in vectors.items():
        if not role.endswith("_bias") or role.removesuffix("bias") + "weight" in signature.tensors:
            continue
        for other, parts in vectors.items():
            places = [number for number, (_, axes) in enumerate(parts) if axes == blocks[0][1]]
            for unit in units(tensors[role].shape) if other != role and places else ():
                found = {role: unit, other: torch.zeros_like(tensors[other])}
                view = cut(signature, other, found[other])[places[0]][0]
                view -= unit.view(view.shape)
                yield found


def shifts(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield constants that move from all rows of a table into the biases of its readers, if nothing is added to it."""
    for members in signature.members.values():
        roles = [role for role, entry in signature.tensors.items()
                 if any(leaf.space in members for leaf in signature.leaves(entry))]  # fmt: skip
        if not roles:
            continue  # joined with another
        written = [leaf for leaf in signature.leaves(signature.tensors[roles[0]]) if leaf.space in members]
        table = MOVES[signature.spaces[members[0]].kind] and len(signature.tensors[roles[0]].axes) == 2
        normed = any(signature.tensors[role].norm for role in roles)
        if not table or normed or written[0].dual or len(written) > 1 or signature.spaces[written[0].space].batch:
            continue
        read = {role: [leaf for leaf in signature.leaves(signature.tensors[role]) if leaf.space in members]
                for role in roles[1:]}  # fmt: skip
        if not read or any(len(found) != 1 or not found[0].dual for found in read.values()):
            continue
        biases = {role: bias_of(signature, role, tuple(found)) for role, found in read.items()}
        if None in biases.values() or bias_of(signature, roles[0], (written[0],)):
            continue
        for unit in units((signature.sizes[written[0].space],)):
            found = {roles[0]: _everywhere(signature, tensors, roles[0], written[0], unit)}
            for role, bias in biases.items():
                found[bias or ""] = torch.zeros_like(tensors[bias or ""])
                absorb(signature, {**tensors, **found}, role, bias or "", -unit, (Leaf(read[role][0].space),))
            yield found


def shared_rows(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield a vector that is added to all rows of a table. Another table or a bias that is summed with it may cancel
    this. No note states the factor between them (embeddings are scaled by a factor in the configuration, positions
    are interpolated). If queries read the rows, the scores of all keys change by the same number,
    q . (r_ij + c) = q . r_ij + q . c, which a softmax does not see (SAM's distances)."""
    summed: dict[Leaf, list[str]] = {}
    for role, entry in signature.tensors.items():
        *others, leaf = signature.leaves(entry) or (Leaf("1"),)
        moving = any(leaf.dual or MOVES[signature.spaces[leaf.space].kind] for leaf in others)
        if len(entry.axes) <= 2 and not (leaf.constant or entry.norm or moving):
            summed.setdefault(leaf, []).append(role)
    for leaf, roles in summed.items():
        if not leaf.dual and (len(roles) == 1 or all(len(signature.tensors[role].axes) == 1 for role in roles)):
            continue
        for role in roles:
            for unit in units((signature.sizes[leaf.space],)):
                yield {role: _everywhere(signature, tensors, role, leaf, unit)}


def _everywhere(signature: Signature, tensors: Tensors, role: str, leaf: Leaf, vector: Tensor) -> Tensor:
    """Return the vector along an axis of a tensor, the same for every index of the other axes."""
    found = torch.zeros_like(tensors[role])
    for view in along(signature, role, found, leaf):
        view += vector
    return found


def scales(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """All writers of a sum that only norms read can be scaled together. In post-LN, the sum begins with a norm's
    output, which is scaled as well, and its other readers inversely."""
    entries = list(signature.tensors.values())
    for space in {entry.norm.source for entry in entries if entry.norm}:
        in_heads = bool(signature.spaces[space].batch) and signature.spaces[space].layer is not None
        if MOVES[signature.spaces[space].kind] != MOVES["linear"] or in_heads:
            continue  # see `branches`
        stage, inner = entries, set[str]()
        if sandwiched(signature, space):
            inner = {writer for entry in entries if returns(signature, entry.role, space)
                     for writer in branch(signature, entry.role)}  # fmt: skip
        else:
            stop = next((i for i, entry in enumerate(entries) if returns(signature, entry.role, space)), None)
            stage = entries[:stop]
            if stop is None and signature.spaces[space].output:
                continue
        reading = [entry.role for entry in stage if has(signature, entry.role, Leaf(space, dual=True))]
        if reading and not inner:
            continue  # see `starts`
        writing = [entry.role for entry in stage if has(signature, entry.role, Leaf(space)) and entry.role not in inner]
        if set(reading) & set(writing) or any("nonlinear" in signature.tensors[r].notes for r in (*reading, *writing)):
            continue
        yield {
            entry.role: gain(tensors, entry.role, entry.norm)
            if entry.norm
            else part(signature, tensors, entry.role, {Leaf(space)}, (), torch.ones(()))
            for entry in stage
            if entry.role in writing and not entry.scaled
        } | {role: -tensors[role] for role in reading}
    for outlet in outlets(signature):
        if outlet.writers:
            grown = [outlet.role, *([outlet.bias] if outlet.bias else []), *outlet.writers]
            yield {role: tensors[role] for role in grown} | {role: -tensors[role] for role in outlet.readers}


def starts(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """A post-LN stream that begins with a projection, which the first layer reads without a norm (ELECTRA). If the bias
    of the last norm does not `pass`, the layers run again on its output (ALBERT): both beginnings change together."""
    order = list(signature.tensors)
    for space in {entry.norm.source for entry in signature.tensors.values() if entry.norm}:
        leaf, read = Leaf(space), Leaf(space, dual=True)
        norms = [i for i, role in enumerate(order)
                 if returns(signature, role, space) and not signature.tensors[role].head]  # fmt: skip
        if not norms or signature.spaces[space].layer is not None or sandwiched(signature, space):
            continue
        reading = [role for role in order[: norms[0]] if has(signature, role, read)]
        if not reading:
            continue
        writing = [role for role in order[: norms[0]] if has(signature, role, leaf)]
        start = [role for role in writing if order.index(role) < order.index(reading[0])]
        added = [role for role in writing if role not in start]
        passing = [role for role in order if "passes" in signature.tensors[role].notes]
        again = [i for i in norms if bias_beside(order[i]) not in passing]
        after = [role for role in order[norms[-1] :] if has(signature, role, read)] if again else []
        if again not in ([], [norms[-1]]) or (again and signature.spaces[space].output):
            continue
        if any("nonlinear" in signature.tensors[role].notes for role in (*reading, *after)):
            continue
        last = [order[norms[-1]], bias_beside(order[norms[-1]])] if again else []
        grown = [*start, *last, *added]
        yield {role: tensors[role] for role in grown} | {role: -tensors[role] for role in (*reading, *after)}

        biases = {reader: bias_of(signature, reader, (read,)) for reader in (*reading, *after)}
        shifting = [[role for role in roles if role.endswith("bias")] for roles in (start, last, added)]
        tables = [role for role in start if not any(x.dual for x in signature.leaves(signature.tensors[role]))]
        first = [*shifting[0], *tables][:1]  # a bias, or all rows of a table
        if None in biases.values() or not first or not shifting[2]:
            continue
        for unit in units((signature.sizes[space],)):
            found = {first[0]: _everywhere(signature, tensors, first[0], leaf, unit)}
            found |= {**{role: unit for role in shifting[1]}, shifting[2][0]: -unit}
            for reader, bias in biases.items():
                found[bias or ""] = torch.zeros_like(tensors[bias or ""])
                absorb(signature, {**tensors, **found}, reader, bias or "", -unit, (leaf,))
            yield found
        # The norm of the sum does not see multiples of ones, whatever they depend on; if the layers run again, they may
        # depend only on the part that is constant in a norm's output.
        seen = list(units((signature.sizes[space],)))
        norm = signature.tensors[last[0]].norm if last else None
        if norm is not None:
            seen = [1 / gain(tensors, last[0], norm)]
            for reader in after if norm.kind == "layernorm" and last[1] in tensors else ():
                yield from meeting(signature, tensors, reader, biases[reader] or "", read, seen[0], tensors[last[1]])
        for unit in seen:
            moved = lie(signature, tensors, {space: torch.ones_like(unit).unsqueeze(-1) * unit})
            yield {role: moved[role] for role in (*start, *last[1:], *reading, *after)}
        if again:
            continue
        for direction, constant in _unreached(signature, tensors, start, leaf):
            for reader, bias in biases.items():
                yield from meeting(signature, tensors, reader, bias or "", read, direction, constant)


def _unreached(signature: Signature, tensors: Tensors, start: list[str], leaf: Leaf) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield directions along which a projection from a normed, narrower space writes only a constant, with that."""
    outlet = next((found for found in outlets(signature) if found.readers == start[:1]), None)
    if outlet is None or outlet.norm.kind != "layernorm" or len(start) != 2 or outlet.bias is None:
        return
    ((matrix, axes),) = cut(signature, start[0], tensors[start[0]])
    matrix = matrix if axes[0] == leaf else matrix.mT
    reached = (matrix * gain(tensors, outlet.role, outlet.norm)) @ complement_of_ones(matrix.shape[1])
    u, values, _ = torch.linalg.svd(reached)
    constant = matrix @ tensors[outlet.bias] + tensors[start[1]]
    for direction in u[:, int((values > SPAN).sum()) :].mT:
        yield direction, constant


def branches(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """Yield scales that a norm inside a branch removes: of everything that it reads, or of each head."""
    for role, entry in signature.tensors.items():
        norm = entry.norm
        if norm is None or not norm.writes_back:
            continue
        if signature.spaces[norm.source].layer is None and not sandwiched(signature, norm.source):
            continue
        members = branch(signature, role)
        if not members:
            continue
        outer = next(
            [space for space in before if space not in norm.over]
            for leaf, before in nesting(signature.tensors[members[0]].axes)
            if leaf.space == norm.source
        )
        parts = [Leaf(space, dual) for space in norm.parts for dual in (False, True)]
        for unit in units(tuple(signature.sizes[space] for space in outer)):
            yield {writer: part(signature, tensors, writer, parts, outer, unit) for writer in members}


def gains(signature: Signature, tensors: Tensors) -> Iterator[Tangent]:
    """The weights of the norms of queries and keys can be scaled inversely, as far as rotary embeddings allow."""
    for key, space in signature.spaces.items():
        norms = {role: entry for role, entry in signature.tensors.items() if returns(signature, role, key)}
        moves = MOVES[space.kind]
        if space.layer is None or len(norms) < 2 or not moves & {"scale", "pair scale", "next scale"}:
            continue
        shared = [outer for outer in space.batch if all(outer in {x.space for x in signature.leaves(entry)}
                                                        for entry in norms.values())]  # fmt: skip
        groups = torch.eye(space.size, dtype=torch.float64)
        if "scale" not in moves:
            first, second = pairs(space.size, interleaved="next scale" in moves)
            groups = groups[first] + groups[second]
        for unit in units(tuple(signature.sizes[outer] for outer in shared)):
            for group in groups:
                found = {}
                for role, entry in norms.items():
                    sign = -1 if has(signature, branch(signature, role)[0], Leaf(key, dual=True)) else 1
                    assert entry.norm is not None
                    for name in (role, bias_beside(role)):
                        if name not in tensors:
                            continue
                        found[name] = gain(tensors, role, entry.norm) if name == role else tensors[name].clone()
                        for view, axes in cut(signature, name, found[name]):
                            names = [leaf.space for leaf in axes]
                            if key not in names:
                                view *= 0
                                continue
                            front = [names.index(outer) for outer in (*shared, key)]
                            view *= sign * spread(unit.unsqueeze(-1) * group, front, view.dim())
                yield found
