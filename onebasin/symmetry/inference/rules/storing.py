# SPDX-License-Identifier: Apache-2.0
"""What is written into another tensor, by an index or a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, hold, lower, restrict, unify
from ..trace import Call, Trace, tensors
from .constants import beside, lined_up
from .places import coordinates, line_of
from .registry import rule


@rule(
    "scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy_ index_fill_ put_ index_put_ "
    "index_put scatter_reduce_"
)
def scattered(trace: Trace, call: Call) -> Any:
    target, dim, places = call.get(0, "input"), call.get(1, "dim"), call.get(2, "index")
    value = call.get(3, "src", call.kwargs.get("source", call.kwargs.get("value")))
    if "put" in call.name or "fill" in call.name:
        return trace.unruled(call)
    empty = trace.label(target) is None and not bool(target.any())
    mine = trace.axes(target, call.name)
    if trace.label(target) is None and not empty and trace.label(value) is None and trace.label(places) is None:
        return call.run()
    if target._is_view() and trace.label(target) is None and call.name.endswith("_"):
        base = target._base
        if base is None or base.numel() != target.numel():
            return trace.unruled(call)
    out = call.run()
    dim = dim % target.dim()
    label = trace.label(places)
    theirs = trace.axes(value, call.name) if isinstance(value, Tensor) else [None] * target.dim()
    spots = trace.axes(places, call.name) if places.dim() == target.dim() else [None] * target.dim()
    axes: list[Axis | None] = []
    for d in range(target.dim()):
        if d == dim:
            axis = mine[d]
            named_by = label.indexes if label is not None else None
            if named_by is not None and axis is not None:
                unify(axis, named_by, call.name)
            elif named_by is not None and not empty:
                fix(named_by, call.name)
                named_by = None
            elif axis is not None and named_by is None:
                fix(axis, "an index from outside")
                axis = None
            axis = axis if axis is not None else named_by
            if axis is not None:
                restrict(axis, PERMUTE, call.name)
            axes.append(axis)
            continue
        here = [a for a in (mine[d], theirs[d], spots[d]) if a is not None]
        for other in here[1:]:
            unify(here[0], other, call.name)
        if here and not empty and mine[d] is None and target.shape[d] > 1:
            beside(here[0], target, d, call.name)
        axes.append(here[0] if here else None)
        lower([spots[d]], PERMUTE, call.name)
    trace.put(out, axes)
    return out


@rule("__setitem__ copy_ fill_")
def stored(trace: Trace, call: Call) -> Any:
    target = call.args[0]
    value = call.args[-1]
    if call.name == "fill_" or (call.name == "copy_" and trace.label(target) is None and target._is_view()):
        return trace.unruled(call)
    empty = trace.label(target) is None and not bool(target.any())
    mine = list(trace.axes(target, call.name))
    where = torch.arange(target.numel()).view(target.shape)
    if call.name == "copy_":
        slot = where
    else:
        what = call.args[1]
        if any(trace.label(one) is not None for one in tensors(what)):
            return trace.unruled(call)
        slot = where[what]
    out = call.run()
    if not isinstance(value, Tensor) or (trace.label(value) is None and value.numel() == 1):
        if float(value) != 0:
            hold(mine, "a number stored along it")
        return out
    if value.dim() > slot.dim() or any(
        a not in (1, b) for a, b in zip(value.shape[::-1], slot.shape[::-1], strict=False)
    ):
        return trace.unruled(call.ran(out))
    theirs = lined_up(trace.axes(value, call.name), slot.dim())
    places = coordinates(slot, target.shape)
    for j in range(slot.dim()):
        if slot.shape[j] == 1:
            continue
        dims = [d for d in range(target.dim()) if bool((places[d] != places[d].narrow(j, 0, 1)).any())]
        axis = theirs[j]
        labelled = [d for d in dims if mine[d] is not None]
        if axis is None and not labelled:
            continue
        full = len(dims) == 1 and slot.shape[j] == target.shape[dims[0]] and bool(
            (line_of(places[dims[0]], j) == torch.arange(target.shape[dims[0]])).all())  # fmt: skip
        if not full:
            for one in [axis, *(mine[d] for d in labelled)]:
                if one is not None:
                    fix(one, "stored in part")
            continue
        d = dims[0]
        if axis is not None and mine[d] is not None:
            unify(axis, mine[d], call.name)  # type: ignore[arg-type]
        elif axis is not None:
            if not empty:
                beside(axis, target, d, call.name)
            mine[d] = axis
        elif mine[d] is not None:
            beside(mine[d], value.expand(slot.shape), j, call.name)  # type: ignore[arg-type]
    trace.put(target, mine, target, value)
    return out
