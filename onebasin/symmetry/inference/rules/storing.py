# SPDX-License-Identifier: Apache-2.0
"""Writing into another tensor, by an index or a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, data, fix, hold, is_data, joined, lower, restrict
from ..selecting import pick
from ..trace import Call, Trace, tensors
from ..unification import unify
from .constants import beside, constant, lined_up
from .places import coordinates, line_of, moved
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
    dim = dim % target.dim()
    level = trace.label(target) is None and constant(target, dim)  # the same number everywhere along the dimension
    mine = trace.axes(target, call.name)
    if trace.label(target) is None and not empty and trace.label(value) is None and trace.label(places) is None:
        return call.run()
    if target._is_view() and trace.label(target) is None and call.name.endswith("_"):
        base = target._base
        if base is None or base.numel() != target.numel():
            return trace.unruled(call)
    out = call.run()
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
            elif named_by is not None and not level:
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
    """Store into a tensor, or into a part of one, which changes the axes of the whole."""
    target, value = call.args[0], call.args[-1]
    view = target._is_view()
    whole = target._base if view else target
    if call.name == "fill_":
        return trace.unruled(call)
    everywhere = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.long)
    everywhere.copy_(torch.arange(whole.numel()).view(whole.shape))
    here = everywhere.as_strided(target.shape, target.stride(), target.storage_offset()) if view else everywhere
    slot = here
    if call.name == "__setitem__":
        what = call.args[1]
        if any(trace.label(one) is not None for one in tensors(what)):
            return trace.unruled(call)
        slot = here[what]
        if not slot.numel() and isinstance(what, Tensor) and what.dtype == torch.bool:
            slot = here[torch.ones_like(what)]  # the places depend on data: with other tokens there are some
    if not slot.numel():  # a range without entries, such as padding where there is none
        return call.run()
    mine = list(trace.axes(whole, call.name))
    rest = torch.zeros_like(whole).copy_(whole).flatten()
    rest[slot.flatten()] = 0
    rest = rest.view(whole.shape)
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
    places = coordinates(slot, whole.shape)
    for j in range(slot.dim()):
        if slot.shape[j] == 1:
            continue
        dims = [d for d in range(whole.dim()) if bool((places[d] != places[d].narrow(j, 0, 1)).any())]
        axis = theirs[j]
        labelled = [d for d in dims if mine[d] is not None]
        if axis is None and not labelled:
            continue
        d, line = dims[0], line_of(places[dims[0]], j)
        found = _beside(mine[d], line, whole.shape[d]) if len(dims) == 1 else None
        if found is None:
            hold([axis, *(mine[d] for d in labelled)], "stored in part")
            continue
        before, taken, after = found
        if axis is not None and not is_data(taken):
            unify(axis, taken, call.name)
        elif axis is not None:
            beside(axis, rest.narrow(d, int(line[0]), len(line)), d, call.name)
            mine[d] = joined([*before, axis, *after])
        else:
            beside(taken, value.expand(slot.shape), j, call.name)
    trace.put(whole, mine, whole, value)
    if view:
        moved(trace, whole, target, here, call)
    return out


def _beside(axis: Axis | None, line: Tensor, size: int) -> tuple[list[Axis], Axis, list[Axis]] | None:
    """Return the parts of an axis before these entries, the entries, and those after, if they are a range of it. Parts
    into which nothing was stored yet are data."""
    start, end = int(line[0]), int(line[0]) + len(line)
    if not bool((line == torch.arange(start, end)).all()):
        return None
    axis = data(size) if axis is None else axis
    pieces = [pick(axis, at, [(length, 1)], "stored") if length else []
              for at, length in ((0, start), (start, end - start), (end, size - end))]  # fmt: skip
    before, taken, after = pieces
    return None if before is None or not taken or after is None else (before, taken[0], after)
