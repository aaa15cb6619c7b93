# SPDX-License-Identifier: Apache-2.0
"""The choice between two tensors, entry by entry, by a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, hold, lower
from ..trace import ONES, Call, Trace
from .constants import entrywise, is_number, lined_up, through_view
from .registry import rule
from .routing import named


@rule("where")
def where(trace: Trace, call: Call) -> Any:
    if len(call.args) + len(call.kwargs) == 1:
        return named(trace, call)
    condition, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
    if not isinstance(condition, Tensor) or condition.dtype != torch.bool:
        a, b, condition = call.get(0, "self"), call.get(2, "other"), call.get(1, "condition")
    return _either(trace, call, condition, a, b)


@rule("masked_fill masked_fill_")
def filled(trace: Trace, call: Call) -> Any:
    if through_view(trace, call):
        return call.run()
    return _either(trace, call, call.get(1, "mask"), call.get(2, "value"), call.get(0, "input"))


@rule("masked_scatter masked_scatter_")
def filled_in(trace: Trace, call: Call) -> Any:
    """Replace whole vectors by others: images among tokens."""
    x, mask, source = call.get(0, "input"), call.get(1, "mask"), call.get(2, "source")
    shown = mask.expand(x.shape)
    whole = bool((shown == shown[..., :1]).all()) and source.shape[-1] == x.shape[-1]
    if not whole or trace.label(mask) is not None or through_view(trace, call):
        return trace.unruled(call)
    out = call.run()
    mine, theirs = trace.axes(x, call.name), trace.axes(source, call.name)
    hold(mine[:-1], "vectors in other places")
    hold(theirs[:-1], "vectors in other places")
    last = entrywise(x.flatten(0, -2), source.flatten(0, -2), [None, mine[-1]], [None, theirs[-1]],
                     out.flatten(0, -2), call.name)  # fmt: skip
    return trace.put(out, [*[None] * (out.dim() - 1), last[-1]], x, source)


def _either(trace: Trace, call: Call, condition: Any, a: Any, b: Any) -> Any:
    out = call.run()
    axes: list[Axis | None] = [None] * out.dim()
    so_far: Tensor | None = None
    for one in (a, b):
        if is_number(trace, one):
            continue
        if so_far is None:
            axes, so_far = lined_up(trace.axes(one, call.name), out.dim()), one.expand(out.shape) if one.dim() else one
        else:
            axes = entrywise(so_far, one, axes, trace.axes(one, call.name), out, call.name)
    if any(is_number(trace, one) and float(one) != 0 for one in (a, b)):
        lower(axes, ONES, call.name)
    choosing = lined_up(trace.axes(condition, call.name), out.dim())
    lower(choosing, PERMUTE, call.name)
    axes = entrywise(out, condition, axes, choosing, out, call.name, sums=False)
    indexes = (label.indexes for one in (a, b) if (label := trace.label(one)) and label.indexes is not None)
    return trace.put(out, axes, a, b, condition, indexes=next(indexes, None))
