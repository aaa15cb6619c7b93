# SPDX-License-Identifier: Apache-2.0
"""Entries chosen by integers.

If these are indices into an axis, such as experts chosen by a router, the axis may be permuted; an index from outside
fixes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, hold, lower, restrict, write
from ..trace import KEY, Call, Label, Trace
from ..unification import unify
from .constants import constant
from .places import moved
from .registry import rule
from .summands import as_biases, note_rows


def by_index(trace: Trace, call: Call) -> Any:
    """Choose entries by integers or a mask; return NotImplemented if there are only slices."""
    return _by_items(trace, call) if call.name == "__getitem__" else _gathered(trace, call)


def _by_items(trace: Trace, call: Call) -> Any:
    tensor, what = call.args
    label = trace.label(tensor)
    items = list(what) if isinstance(what, tuple) else [what]
    named = [(i, its) for i, item in enumerate(items) if (its := trace.label(item)) is not None]
    if not named:
        return NotImplemented
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items):
        return _masked(trace, call, tensor, items)
    if label is None:
        return _looked_up(trace, call)
    # The dimension of each item.
    dims, at = {}, 0
    count = sum(item is not None and item is not Ellipsis for item in items)
    for i, item in enumerate(items):
        if item is Ellipsis:
            at += tensor.dim() - count
        elif item is not None:
            dims[i] = at
            at += 1
    gone: list[int] = []
    within: list[Axis] = []
    for i, its in named:
        if its.indexes is None:
            lower(trace.axes(items[i]), PERMUTE, call.name)
        axis = trace.axes(tensor)[dims[i]]
        if axis is not None:
            _choose(axis, its, call.name)
            if its.indexes is not None:
                within.append(axis)
            gone.append(dims[i])
    # Apply the same to a label without the axes of those dimensions.
    bare = Label([None if d in gone else a for d, a in enumerate(trace.axes(tensor))], within=(*label.within, *within))
    setattr(tensor, KEY, bare)
    plain = [item.clone() if isinstance(item, Tensor) else item for item in items]
    stripped = Call("getitem", call.func, (tensor, tuple(plain)), {})
    if all(axis is None for axis in bare.axes):
        out = stripped.run()
    else:
        where = torch.arange(tensor.numel()).view(tensor.shape)
        out = stripped.run()
        moved(trace, tensor, out, where[tuple(plain)], stripped, where)
    setattr(tensor, KEY, label)
    got = trace.label(out)
    if got is None:
        got = Label([None] * out.dim())
        setattr(out, KEY, got)
    got.within = tuple(dict.fromkeys((*label.within, *within, *trace.within(*items))))
    return out


def _gathered(trace: Trace, call: Call) -> Any:
    tensor = call.get(0, "input")
    if call.name == "take_along_dim":
        chosen, dim = call.get(1, "indices"), call.get(2, "dim") % tensor.dim()
    else:
        dim, chosen = call.get(1, "dim") % tensor.dim(), call.get(2, "index")
    label, its = trace.label(tensor), trace.label(chosen)
    if label is None and its is None:
        return NotImplemented
    axes = trace.axes(tensor)
    if (axis := axes[dim]) is not None:
        _choose(axis, its, call.name)
    out = call.run()
    if call.name == "index_select":
        return trace.put(out, [a if d != dim else None for d, a in enumerate(axes)], tensor, chosen)
    left: list[Axis | None] = []
    for d, other in enumerate(trace.axes(chosen)):
        mine = axes[d] if d != dim else None
        if mine is not None and other is not None:
            unify(mine, other, call.name)
        elif mine is not None and chosen.shape[d] > 1 and not constant(chosen, d):
            fix(mine, "an index from outside")
            mine = None
        if other is not None:
            lower((mine, other), PERMUTE, call.name)
        left.append(mine or other)
    return trace.put(out, left, tensor, chosen)


def _choose(axis: Axis, its: Label | None, why: str, outside: str = "an index from outside") -> None:
    """Restrict an axis whose entries are chosen by integers: if these are indices into another axis, unify both."""
    if its is None or its.indexes is None:
        return fix(axis, outside)
    named = its.indexes
    if named.cat and named.size > axis.size and named.parts[0].size == axis.size:
        named = named.parts[0]  # without the extra class
    unify(axis, named, why)
    restrict(axis, PERMUTE, why)


def _masked(trace: Trace, call: Call, tensor: Tensor, items: list[Any]) -> Any:
    """x[mask]: the mask's dimensions become one, without an axis."""
    if len(items) != 1 or items[0].dtype != torch.bool:
        return trace.unruled(call)
    mask = items[0]
    hold((*trace.axes(mask), *trace.axes(tensor)[: mask.dim()]), "a mask along it")
    out = call.run()
    return trace.put(out, [None, *trace.axes(tensor)[mask.dim() :]], tensor)


def _looked_up(trace: Trace, call: Call) -> Any:
    """Constants looked up by indices into an axis: they fix it, unless all are equal."""
    tensor, what = call.args
    items = list(what) if isinstance(what, tuple) else [what]
    out = call.run()
    axes: list[Axis | None] = [None] * out.dim()
    for item in items:
        label = trace.label(item)
        if label is not None:
            if label.indexes is not None and tensor.numel() > 1 and not bool((tensor == tensor.flatten()[0]).all()):
                fix(label.indexes, "constants by index")
            if out.shape == item.shape:
                axes = trace.axes(item)
            else:
                hold(trace.axes(item), "constants by index")
    return trace.put(out, axes, *items)


@rule("embedding")
def embedding(trace: Trace, call: Call) -> Any:
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    out = call.run()
    label = trace.label(ids)
    table, inner = trace.axes(weight)
    if table is not None:
        _choose(table, label, "embedding", outside="token ids")
    write([inner])
    its = trace.label(weight)
    if its is None:
        return trace.put(out, [*trace.axes(ids), inner], weight, ids, rows=note_rows(trace))
    whole = ids.dim() and bool((ids == torch.arange(ids.shape[-1])).all())
    known = {"rows": note_rows(trace, (its.name,)), "biases": as_biases(its), "whole": its.name if whole else None}
    return trace.put(out, [*trace.axes(ids), inner], weight, ids, **known)
