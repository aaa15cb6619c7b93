# SPDX-License-Identifier: Apache-2.0
"""Concatenation and stacking: axes are joined along one dimension, and unified in all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..atoms import Axis, data, joined, new, restrict
from ..trace import ONES, Call, Trace
from ..unification import unify
from .constants import beside
from .maps import joined_maps
from .registry import rule
from .summands import tokens_of, vectors_of


@rule("cat concat concatenate stack hstack vstack")
def together(trace: Trace, call: Call) -> Any:
    given = list(call.get(0, "tensors"))
    out = call.run()
    dim = call.get(1, "dim", call.kwargs.get("axis", 0)) if call.name not in ("hstack", "vstack") else 0
    dim = dim % out.dim()
    stacking = call.name == "stack"
    if call.name == "hstack":
        dim = 1 if out.dim() > 1 else 0
    given = [g for g in given if g.numel() or g.dim() == out.dim() - stacking]
    lined = [trace.label(g).linear if trace.label(g) else None for g in given]  # type: ignore[union-attr]
    if any(lined):
        maps = joined_maps(trace, given, out, dim, stacking)
        if maps is not None:
            return maps
    axes: list[Axis | None] = []
    every = [trace.axes(g, call.name) for g in given]
    if stacking:
        every = [[*each[:dim], None, *each[dim:]] for each in every]
    shown = [g.unsqueeze(dim) if stacking else g for g in given]
    for d in range(out.dim()):
        here = [each[d] for each in every]
        if d == dim:
            if all(axis is None for axis in here):
                some = stacking and any(axis is not None for each in every for axis in each)
                axes.append(new(out.shape[d], frozenset()) if some else None)
            else:
                axes.append(
                    joined([axis or data(g.shape[d]) for axis, g in zip(here, shown, strict=True) if g.shape[d]])
                )
        else:
            axes.append(_together(here, shown, d, call.name))
    label_of = next((trace.label(g) for g in given if trace.label(g) is not None), None)
    known: dict[str, Any] = {}
    if label_of is not None and label_of.indexes is not None:
        known["indexes"] = label_of.indexes
    known["made"] = any(label.made for g in given if (label := trace.label(g)) is not None)
    if not stacking and dim == out.dim() - 2:
        known["side"] = tuple((g.shape[dim], vectors_of(g) or tokens_of(g)) for g in given)
    return trace.put(out, axes, *given, **known)


def _together(here: Sequence[Axis | None], given: Sequence[Tensor], dim: int, why: str) -> Axis | None:
    """Return the axis of a dimension in which the entries of several tensors correspond."""
    first = next((axis for axis in here if axis is not None), None)
    if first is None:
        return None
    for axis, tensor in zip(here, given, strict=True):
        if axis is not None and axis is not first:
            unify(first, axis, why)
        elif axis is None and tensor.shape[dim] > 1:
            beside(first, tensor, dim, why)
        elif axis is None and bool(tensor.any()):
            restrict(first, ONES, why)
    return first
