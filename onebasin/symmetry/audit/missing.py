# SPDX-License-Identifier: Apache-2.0
"""Where the flat directions are that a table does not generate: the smallest sets of tensors that hold one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

NEAR = 1e-6  # accuracy of null vectors, which depends on the width of the gap


def smallest_sets(null: Tensor, known: Tensor, places: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield sets of tensors, each with the number of missing directions that it adds to those of the sets before.

    A set holds a missing direction if more flat directions than known ones are zero everywhere else. Tensor after
    tensor is left out, large ones first, as long as that is so: no tensor of the set that remains can be spared. Its
    directions then count as known, until all do.

    Args:
        null: Orthonormal basis of all flat directions, (parameters, n).
        known: Orthonormal basis of those that are generated, (parameters, k), a part of their span.
        places: Role -> the places of its parameters.
    """
    order = sorted(places, key=lambda role: -len(places[role]))
    while known.shape[1] < null.shape[1]:
        kept = list(places)
        bases, turns = (null, known), [torch.eye(basis.shape[1], dtype=basis.dtype) for basis in (null, known)]
        for role in order:
            rest = [turn @ _kernel(basis[places[role]] @ turn) for basis, turn in zip(bases, turns, strict=True)]
            if rest[0].shape[1] > rest[1].shape[1]:
                turns = rest
                kept.remove(role)
        yield tuple(kept), turns[0].shape[1] - turns[1].shape[1]
        flat = null @ turns[0]
        u, values, _ = torch.linalg.svd(flat - known @ (known.mT @ flat), full_matrices=False)
        known = torch.cat([known, u[:, values > NEAR]], dim=1)


def _kernel(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the vectors that a matrix maps to zero."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = torch.linalg.qr(matrix, mode="r").R
    values, vh = torch.linalg.svd(matrix)[1:]
    found: Tensor = vh[int((values > NEAR).sum()) :].mT
    return found
