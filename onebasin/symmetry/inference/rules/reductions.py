# SPDX-License-Identifier: Apache-2.0
"""Sums, means, lengths and extremes over some dimensions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...tables.signature import MOVES
from ..atoms import PERMUTE, Axis, hold, lower, restrict
from ..trace import KEY, ONES, Call, Label, Trace
from .pointwise import pointwise
from .registry import rule


def _dims(call: Call, source: Tensor, place: int = 1) -> list[int]:
    dim = call.get(place, "dim", call.kwargs.get("axis"))
    if dim is None:
        return list(range(source.dim()))
    return [d % source.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _left(axes: list[Axis | None], dims: list[int], out: Tensor) -> list[Axis | None]:
    if out.dim() == len(axes):
        return [None if d in dims else a for d, a in enumerate(axes)]
    return [a for d, a in enumerate(axes) if d not in dims]


@rule("sum mean nanmean sum_to_size")
def total(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    label = trace.label(source)
    out = call.run()
    assert label is not None
    dims = _dims(call, source)
    if label.square is not None and dims == [source.dim() - 1]:
        axis = label.square
        label.square = None
        centred = getattr(source, "_centred", False)
        restrict(axis, MOVES["ones" if centred else "orthogonal"], "the length of a vector", norm=True)
        left = _left(label.axes, dims, out)
        trace.mixed(left, [axis])
        return trace.put(out, left, source, length=(axis, centred))
    axes = trace.axes(source, call.name)
    gone = [axes[d] for d in dims]
    within = dims == [source.dim() - 1] and call.name == "mean"
    for one in gone:
        if one is not None:
            restrict(one, ONES, call.name, norm=within)  # of a norm, computed step by step
    left = _left(axes, dims, out)
    trace.mixed(left, gone)
    trace.put(out, left, source)
    if within and axes[-1] is not None:
        out._mean_of = axes[-1]
        if trace.label(out) is None:
            setattr(out, KEY, Label([None] * out.dim(), within=trace.within(source)))
    return out


@rule("var std var_mean std_mean norm vector_norm linalg_norm linalg_vector_norm")
def spread(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input", call.kwargs.get("x"))
    named = call.name in ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm")
    dims = _dims(call, source, 2 if named else 1)
    euclidean = not named or call.get(1, "p" if call.name == "norm" else "ord", 2) in (2, 2.0, None, "fro")
    axes = trace.axes(source, call.name)
    made = call.run()
    out = made[0] if isinstance(made, tuple) else made
    gone = [axes[d] for d in dims]
    single = len(dims) == 1 and gone[0] is not None and euclidean
    lower(gone, ONES if not named else MOVES["orthogonal"] if euclidean else PERMUTE, call.name)
    left = _left(axes, dims, out)
    lower(left, PERMUTE, call.name)
    trace.mixed(left, gone)
    trace.put(out, left, source, length=(gone[0], not named) if single and dims[0] == source.dim() - 1 else None)
    if isinstance(made, tuple):
        trace.put(made[1], left, source)
        if single:
            made[1]._mean_of = gone[0]
            setattr(made[1], KEY, trace.label(made[1]) or Label([None] * made[1].dim()))
    return made


@rule("max min amax amin argmax argmin any all prod logsumexp median cummax count_nonzero")
def extreme(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    other = call.get(1, "other")
    if isinstance(other, Tensor):
        return pointwise(trace, call)
    dims = _dims(call, source)
    axes = trace.axes(source, call.name)
    lower(axes, PERMUTE, call.name)
    made = call.run()
    out = made if isinstance(made, Tensor) else made[0]
    left = _left(axes, dims, out)
    trace.mixed(left, [axes[d] for d in dims])
    places = made if call.name in ("argmax", "argmin") else None
    if places is None:
        trace.put(out, left, source)
        places = None if isinstance(made, Tensor) else made[1]
    if places is not None:
        which = axes[dims[0]] if len(dims) == 1 else None
        if len(dims) > 1:
            hold((axes[d] for d in dims), call.name)
        trace.put(places, left, source, indexes=which)
    return made
