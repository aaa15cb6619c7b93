# SPDX-License-Identifier: Apache-2.0
"""Entries that integers choose.

Where they name entries of an axis, as experts that a router picked, the axis may be permuted; an index from outside
fixes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, hold, lower, restrict, unify
from ..trace import KEY, Call, Label, Trace
from .constants import constant
from .places import moved
from .registry import rule
from .summands import as_biases, note_rows


def by_index(trace: Trace, call: Call) -> Any:
    """Entries that integers choose, where these name entries of an axis: experts that a router picked."""
    if call.name == "__getitem__":
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
        # Which dimension each item takes.
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
                if its.indexes is None:
                    fix(axis, "an index from outside")
                else:
                    unify(axis, among(its.indexes, axis), call.name)
                    restrict(axis, PERMUTE, call.name)
                    within.append(axis)
                gone.append(dims[i])
        # The same without those dimensions' axes: shapes and other dimensions as ever.
        bare = Label(
            [None if d in gone else a for d, a in enumerate(trace.axes(tensor))], within=(*label.within, *within)
        )
        setattr(tensor, KEY, bare)
        plain = [item.clone() if isinstance(item, Tensor) else item for item in items]
        stripped = Call("getitem", call.func, (tensor, tuple(plain)), {})
        if all(axis is None for axis in bare.axes):
            out = stripped.run()
        else:
            where = torch.arange(tensor.numel()).view(tensor.shape)
            out = stripped.run()
            moved(trace, tensor, out, where[tuple(plain)], stripped)
        setattr(tensor, KEY, label)
        got = trace.label(out)
        if got is None:
            got = Label([None] * out.dim())
            setattr(out, KEY, got)
        got.within = tuple(dict.fromkeys((*label.within, *within, *trace.within(*items))))
        return out
    if call.name in ("gather", "take_along_dim", "index_select"):
        tensor = call.get(0, "input")
        dim, chosen = (
            (call.get(1, "dim"), call.get(2, "index"))
            if call.name != "take_along_dim"
            else (call.get(2, "dim"), call.get(1, "indices"))
        )
        label, its = trace.label(tensor), trace.label(chosen)
        dim = dim % tensor.dim()
        axes = trace.axes(tensor)
        axis = axes[dim] if label else None
        if label is None and its is None:
            return NotImplemented
        if axis is not None:
            if its is None or its.indexes is None:
                fix(axis, "an index from outside")
            else:
                unify(axis, among(its.indexes, axis), call.name)
                restrict(axis, PERMUTE, call.name)
        out = call.run()
        if call.name == "index_select":
            left = [a if d != dim else None for d, a in enumerate(axes)] if label else [None] * out.dim()
            return trace.put(out, left, tensor, chosen)
        theirs = trace.axes(chosen)
        left = list[Axis | None]()
        for d in range(out.dim()):
            mine = axes[d] if d != dim and label else None
            other = theirs[d] if its else None
            if mine is not None and other is not None:
                unify(mine, other, call.name)
            elif mine is not None and chosen.shape[d] > 1 and not constant(chosen, d):
                fix(mine, "an index from outside")
                mine = None
            for one in (mine, other):
                if one is not None and other is not None:
                    restrict(one, PERMUTE, call.name)
            left.append(mine or other)
        return trace.put(out, left, tensor, chosen)
    return NotImplemented


def among(named: Axis, axis: Axis) -> Axis:
    """Return the axis that indices name, without the class for what is left out."""
    if named.cat and named.size > axis.size and named.parts[0].size == axis.size:
        return named.parts[0]
    return named


def _masked(trace: Trace, call: Call, tensor: Tensor, items: list[Any]) -> Any:
    """x[mask]: the mask's dimensions become one, in which nothing is named."""
    if len(items) != 1 or items[0].dtype != torch.bool:
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    mask = items[0]
    hold((*trace.axes(mask), *trace.axes(tensor)[: mask.dim()]), "a mask along it")
    out = call.run()
    return trace.put(out, [None, *trace.axes(tensor)[mask.dim() :]], tensor)


def _looked_up(trace: Trace, call: Call) -> Any:
    """Constants looked up by what names entries of an axis: the constants fix them, unless all are alike."""
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
        if label is not None and label.indexes is not None:
            unify(table, among(label.indexes, table), "embedding")
            restrict(table, PERMUTE, "embedding")
        else:
            fix(table, "token ids")
    if inner is not None:
        for leaf in inner.leaves:
            leaf.atom.written = True
    its = trace.label(weight)
    known = {**note_rows(trace, (its.name,)), "biases": as_biases(its)} if its is not None else note_rows(trace)
    if its is not None and ids.dim() and bool((ids == torch.arange(ids.shape[-1])).all()):
        known["whole"] = its.name
    return trace.put(out, [*trace.axes(ids), inner], weight, ids, **known)
