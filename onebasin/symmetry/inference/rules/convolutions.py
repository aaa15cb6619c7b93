# SPDX-License-Identifier: Apache-2.0
"""Convolutions, pooling, padding and sums along time or pixels: only channels move."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, flat, hold, lower, restrict, write
from ..products import product
from ..trace import ONES, Call, Trace
from ..unification import split, unify
from .registry import rule
from .summands import vectors_of


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d")
def convolution(trace: Trace, call: Call) -> Any:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    groups = call.get(6, "groups", 1)
    out = call.run()
    mine, its = trace.axes(x, "conv"), trace.axes(weight)
    hold(its[2:], "a kernel")
    batched = x.dim() == weight.dim()
    here = 1 if batched else 0
    for d, axis in enumerate(mine):
        if axis is not None and d > here:
            fix(axis, "conv along it")
    reads, writes = (1, 0) if "transpose" not in call.name else (0, 1)
    channels = mine[here]
    if channels is not None and call.get(4, "padding", 0) not in (0, (0,) * (x.dim() - here - 1), "valid"):
        trace.padded.append(channels)
    rest: list[Axis | None] = [a if d < here else None for d, a in enumerate(mine)]
    if its[0] is None and its[1] is None and channels is not None:
        fix(channels, "conv with constants")
        return trace.put(out, [None] * out.dim(), x)
    if groups == 1:
        read = its[reads]
        if channels is not None and read is not None:
            unify(channels, ~read, "conv")
            trace.mixed([*rest, its[writes]], [channels])
        elif channels is not None or its[reads] is not None:
            one = channels if channels is not None else its[reads]
            if x.shape[here] > 1 and one is not None:
                fix(one, "conv on data")
        written = its[writes]
    elif groups == x.shape[here] == out.shape[here] and reads == 1:  # each channel by itself
        written = (
            product(channels, its[0], "conv of each channel") if channels is not None and its[0] is not None else None
        )
    elif reads == 1 and channels is not None and its[0] is not None:
        outer, inner = split(channels, [groups, x.shape[here] // groups], "grouped conv")
        same, made = split(its[0], [groups, out.shape[here] // groups], "grouped conv")
        unify(outer, same, "grouped conv")
        restrict(outer, PERMUTE, "grouped conv")
        if its[1] is not None:
            unify(inner, ~its[1], "grouped conv")
        written = flat([outer, made])
    else:
        hold((channels, *its), "grouped conv")
        written = None
    write([written])
    axes: list[Axis | None] = [None] * out.dim()
    axes[:here] = rest[:here]
    axes[here] = written
    if isinstance(bias, Tensor) and (its_bias := trace.axes(bias)[0]) is not None:
        if written is None:
            fix(its_bias, "conv")
        else:
            unify(written, its_bias, "conv")
    trace.put(out, axes, x, weight)
    if (label := trace.label(out)) is not None:
        label.vectors = vectors_of(bias)
    return out


@rule(
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate upsample pad cumsum triu tril "
    "max_pool1d max_pool2d adaptive_max_pool2d max_pool2d_with_indices _pad constant_pad_nd fold "
    "logcumsumexp cumprod scaled_modified_bessel fft rfft irfft"
)
def along(trace: Trace, call: Call) -> Any:
    """Operations along time or pixels: linear ones do not restrict channels."""
    source = call.get(0, "input")
    if trace.label(source) is None:
        return trace.unruled(call)
    axes = trace.axes(source, call.name)
    out = call.run()
    if call.name in ("cumsum", "cumprod", "logcumsumexp"):
        touched = [call.get(1, "dim") % source.dim()]
    elif "pad" in call.name:
        amounts = list(call.get(1, "pad"))
        touched = [source.dim() - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    elif call.name in ("triu", "tril"):
        touched = [source.dim() - 2, source.dim() - 1]
    elif "2d" in call.name or call.name in ("interpolate", "upsample"):
        touched = list(range(2, source.dim())) if "2d" not in call.name else [source.dim() - 2, source.dim() - 1]
    else:
        touched = [source.dim() - 1]
    for d, axis in enumerate(axes):
        if axis is not None and d in touched:
            fix(axis, f"{call.name} along it")
        elif axis is not None and ("max" in call.name or call.name in ("cumprod", "logcumsumexp")):
            restrict(axis, PERMUTE, call.name)
        elif axis is not None and "pad" in call.name and call.get(3, "value", 0):
            restrict(axis, ONES, call.name)
    if out.dim() != len(axes):
        return trace.unruled(call.ran(out))
    return trace.put(out, [None if d in touched else a for d, a in enumerate(axes)], source)


@rule("grid_sample")
def sampled(trace: Trace, call: Call) -> Any:
    """Values of images at places that are computed, too: (n, channels, pixels), (n, places, coordinates) ->
    (n, channels, places)."""
    source, grid = call.get(0, "input"), call.get(1, "grid")
    (first, channels, *pixels), (same, *places, coordinates) = trace.axes(source), trace.axes(grid)
    out = call.run()
    hold([*pixels, coordinates], call.name)
    lower([first, same, *places], PERMUTE, call.name)
    if first is not None and same is not None:
        unify(first, same, call.name)
    else:  # one of them is the same for all, or differs in a way that does not move along
        hold([first, same], call.name)
    return trace.put(out, [first or same, channels, *places], source, grid)
