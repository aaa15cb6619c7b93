# SPDX-License-Identifier: Apache-2.0
"""Tensors that a class divides among several parameters: fused projections, whose queries, keys and values (or gates
and values) it keeps apart.

Nothing here knows a class: such tensors are filled with their own indices before they are loaded, which show which part
of them each parameter has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, and the entries along an axis of the tensor that it consists of, in its order: a class may also sort
    queries and keys by the halves of their rotary pairs."""

    parameter: str
    axis: int
    entries: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the whole."""
        return tensor.index_select(self.axis, self.entries.to(tensor.device))


def joined(model: nn.Module, pieces: Sequence[Piece]) -> Tensor:
    """Return the whole tensor."""
    parts = torch.cat([model.get_parameter(piece.parameter) for piece in pieces], pieces[0].axis)
    return parts.index_select(pieces[0].axis, _entries(pieces).argsort().to(parts.device))


def _entries(pieces: Sequence[Piece]) -> Tensor:
    return torch.cat([piece.entries for piece in pieces])


def divided(
    load: Callable[[dict[str, Tensor]], nn.Module], state: Mapping[str, Tensor], among: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Piece, ...]]:
    """Return tensor -> its pieces, for tensors that a class divides along one axis.

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
            known = [piece for piece in pieces if piece is not None]
            every = torch.arange(state[name].shape[axis])
            if len(known) == len(pieces) and torch.equal(_entries(known).sort().values, every):
                found[name] = tuple(known)
    return found


def _indices(tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor of the same shape in which every entry is its index along an axis."""
    index = torch.arange(tensor.shape[axis], dtype=tensor.dtype)
    return index.view(-1, *[1] * (tensor.dim() - axis - 1)).expand(tensor.shape).contiguous()


def _piece(name: str, filled: Tensor, axis: int) -> Piece | None:
    """Return the part that a parameter has of a tensor of indices; None if it divides it along another axis."""
    if filled.dim() <= axis:
        return None
    entries = filled.detach().movedim(axis, 0).reshape(filled.shape[axis], -1)
    return Piece(name, axis, entries[:, 0].long()) if torch.equal(entries, entries[:, :1].expand_as(entries)) else None
