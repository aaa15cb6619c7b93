# SPDX-License-Identifier: Apache-2.0
"""Components of tangents: maps to first order, changes along an axis, factors of norms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..gauge.dataflow import absorb, along, cut
from ..groups.elements import Linear, act_on
from ..groups.group import units
from ..tables.axes import Leaf
from ..tables.signature import Norm, Signature, bias_beside

Tensors = Mapping[str, Tensor]
Tangent = dict[str, Tensor]

SPAN = 1e-9  # vectors of norm 1 are linearly dependent below this singular value


def lie(signature: Signature, tensors: Tensors, maps: Mapping[str, Tensor]) -> Tangent:
    """Return the tangent of x -> (1 + X) x in every space of `maps`, without norm weights. X: (*batch, n, n)."""
    found: Tangent = {}
    for role, entry in signature.tensors.items():
        if entry.diagonal or not any(leaf.space in maps for leaf in signature.leaves(entry)):
            continue
        found[role] = torch.zeros_like(tensors[role])
        pieces = zip(cut(signature, role, tensors[role]), cut(signature, role, found[role]), strict=True)
        for (piece, axes), (target, _) in pieces:
            roots = [signature.root.get(leaf.space, "") for leaf in axes]
            for dim, leaf in enumerate(axes):
                if leaf.space in maps:
                    batch = tuple(roots.index(outer) for outer in signature.spaces[roots[dim]].batch)
                    x = maps[leaf.space]
                    target += act_on(piece, Linear(x, -x.mT), batch, dim, leaf.dual)
    return found


def gain(tensors: Tensors, role: str, norm: Norm) -> Tensor:
    """Return the factors by which the norm multiplies."""
    factors = norm.weight(tensors[role])
    if bool((factors == 0).any()):
        raise ValueError(f"'{role}' contains zeros; an audit needs a generic point")
    return factors


def singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return all singular values and right singular vectors."""
    return decomposed(matrix, whole=True)[1:]


def decomposed(matrix: Tensor, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition (u, values, vh), by the slower of two algorithms if the other fails, as
    it may for many equal values. whole: include the vectors of the null space."""
    try:
        u, values, vh = torch.linalg.svd(matrix, full_matrices=whole)
    except RuntimeError:  # it did not converge
        from scipy.linalg import svd

        found = svd(matrix.numpy(), full_matrices=whole, lapack_driver="gesvd")
        u, values, vh = map(torch.from_numpy, found)
    return u, values, vh


def along_axis(signature: Signature, tensors: Tensors, role: str, leaf: Leaf, direction: Tensor) -> Iterator[Tangent]:
    """Yield one direction along the axis of `leaf` (and along those before it, if it has several dimensions), for every
    index of the others."""
    for block, view in enumerate(along(signature, role, tensors[role], leaf)):
        for unit in units(view.shape[: -direction.dim()]):
            found = torch.zeros_like(tensors[role])
            target = list(along(signature, role, found, leaf))[block]
            target += unit[(..., *[None] * direction.dim())] * direction
            yield {role: found}


def meeting(
    signature: Signature, tensors: Tensors, reader: str, bias: str, leaf: Leaf, direction: Tensor, constant: Tensor
) -> Iterator[Tangent]:
    """Yield changes of a reader along a direction in which its input is constant."""
    for tangent in along_axis(signature, tensors, reader, leaf, direction):
        tangent[bias] = torch.zeros_like(tensors[bias])
        absorb(signature, tangent, reader, bias, -constant, (Leaf(leaf.space),))
        yield tangent


def part(
    signature: Signature, tensors: Tensors, role: str, wanted: Collection[Leaf], outer: Sequence[str], unit: Tensor
) -> Tensor:
    """Return the blocks of a tensor that have one of some leaves (not `rope'` in `[latent | rope']`, say), times a
    factor for each index of the outer spaces; 0 elsewhere."""
    found = torch.zeros_like(tensors[role])
    for (piece, axes), (target, _) in zip(
        cut(signature, role, tensors[role]), cut(signature, role, found), strict=True
    ):
        names = [leaf.space for leaf in axes]
        if not set(wanted).isdisjoint(axes):
            target += piece * spread(unit, [names.index(space) for space in outer], piece.dim())
    return found


def spread(unit: Tensor, dims: list[int], count: int) -> Tensor:
    """Return a tensor with its dimensions at `dims` out of `count`, to broadcast."""
    shape = [1] * count
    for dim, size in zip(dims, unit.shape, strict=True):
        shape[dim] = size
    return unit.permute([dims.index(dim) for dim in sorted(dims)]).reshape(shape)


def passes_on(signature: Signature, role: str) -> bool:
    """Return whether a norm writes back a vector that is read up to the next norm and summed there: its bias has the
    note `passes`."""
    bias = signature.tensors.get(bias_beside(role))
    return bias is not None and "passes" in bias.notes


def sandwiched(signature: Signature, space: str) -> bool:
    """Return whether norms that write back into a space normalize the beginning of the sum (BLOOM) or the output of a
    branch (Gemma 2), and not the sum itself (BERT). Other norms then read the sum later."""
    norms = {role: e.norm for role, e in signature.tensors.items() if e.norm and not e.head and e.norm.source == space}
    if any(norm.writes_back and passes_on(signature, role) for role, norm in norms.items()):
        return False
    back = [norm.writes_back for norm in norms.values()]
    return True in back and False in back[back.index(True) :]
