# SPDX-License-Identifier: Apache-2.0
"""Tensors that a class divides among several parameters: fused projections, whose queries, keys and values (or gates
and values) it keeps apart.

Nothing here knows a class: such tensors are filled with their own indices before they are loaded, which show which part
of them each parameter has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """A parameter, and the entries [first, last) along an axis of the tensor that it is a part of."""

    parameter: str
    axis: int
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the whole as a view."""
        return tensor.narrow(self.axis, self.first, self.last - self.first)


def joined(model: nn.Module, pieces: Sequence[Piece]) -> Tensor:
    """Return the whole tensor."""
    return torch.cat([model.get_parameter(piece.parameter) for piece in pieces], pieces[0].axis)


def divided(
    load: Callable[[dict[str, Tensor]], nn.Module], state: Mapping[str, Tensor], among: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Piece, ...]]:
    """Return tensor -> its pieces in order, for tensors that a class divides along one axis.

    load: makes the model from its tensors, name -> tensor. state: any such tensors. among: tensor -> the parameters
    that have entries of it.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    for axis in (0, 1):
        left = [name for name in among if name not in found and state[name].dim() > axis]
        if not left:
            break
        model = load({**state, **{name: _indices(state[name], axis) for name in left}})
        for name in left:
            pieces = [_piece(one, model.get_parameter(one), axis) for one in among[name]]
            ordered = sorted((piece for piece in pieces if piece is not None), key=lambda piece: piece.first)
            ends = [0, *(end for piece in ordered for end in (piece.first, piece.last)), state[name].shape[axis]]
            if len(ordered) == len(pieces) and all(a == b for a, b in list(pairwise(ends))[::2]):
                found[name] = tuple(ordered)
    return found


def _indices(tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor of the same shape in which every entry is its index along an axis."""
    index = torch.arange(tensor.shape[axis], dtype=tensor.dtype)
    return index.view(-1, *[1] * (tensor.dim() - axis - 1)).expand(tensor.shape).contiguous()


def _piece(name: str, filled: Tensor, axis: int) -> Piece | None:
    """Return the part that a parameter has of a tensor of indices; None if its entries do not follow one another."""
    if filled.dim() <= axis:
        return None
    first = int(filled.flatten()[0])
    expected = first + _indices(filled.detach(), axis)
    return Piece(name, axis, first, first + filled.shape[axis]) if torch.equal(filled.detach(), expected) else None
