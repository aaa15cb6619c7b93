# SPDX-License-Identifier: Apache-2.0
"""Indices into an axis: of the largest entries, and of nonzero ones."""

from __future__ import annotations

from typing import Any

from ..atoms import PERMUTE, fix, hold, joined, lower, new
from ..trace import Call, Trace
from .registry import rule


@rule("topk sort argsort")
def ranked(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    place = call.get(2 if call.name == "topk" else 1, "dim", -1) % source.dim()
    axes = trace.axes(source, call.name)
    lower(axes, PERMUTE, call.name)
    made = call.run()
    left = [None if d == place else a for d, a in enumerate(axes)]
    trace.mixed(left, [axes[place]])
    values, places = (None, made) if call.name == "argsort" else made
    if values is not None:
        label = trace.label(source)
        by = (
            label.by if label is not None and place == source.dim() - 1 else ()
        )  # a constant does not change the choice
        trace.put(values, left, source, by=by or None)
    trace.put(places, left, source, indexes=axes[place])
    return made


@rule("one_hot")
def one_hot(trace: Trace, call: Call) -> Any:
    source = call.get(0, "tensor", call.kwargs.get("input"))
    label = trace.label(source)
    out = call.run()
    assert label is not None
    axis = label.indexes
    if axis is not None and axis.size < out.shape[-1]:  # an extra class
        axis = joined([axis, new(out.shape[-1] - axis.size, frozenset())])
    elif axis is not None and axis.size > out.shape[-1]:
        fix(axis, call.name)
        axis = None
    return trace.put(out, [*trace.axes(source), axis], source)


@rule("nonzero argwhere")
def named(trace: Trace, call: Call) -> Any:
    """Return the places of nonzero entries, one column per dimension."""
    source = call.get(0, "input", call.kwargs.get("condition"))
    axes = trace.axes(source, call.name)
    made = call.run()
    lower(axes, PERMUTE, call.name)
    if isinstance(made, tuple):
        for one, axis in zip(made, axes, strict=True):
            trace.put(one, [None], source, indexes=axis)
        return made
    if source.dim() == 1 and axes[0] is not None:
        return trace.put(made, [None, None], source, indexes=axes[0])
    hold(axes, call.name)
    return made
