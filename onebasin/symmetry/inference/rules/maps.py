# SPDX-License-Identifier: Apache-2.0
"""Linear images of an axis that are not yet analysed: sums, products with constants, and complex numbers.

A rotation by position (rotary embeddings) is computed in such steps; only the result shows its maps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..atoms import Axis, hold
from ..linear import Linear, basis, once, peeled
from ..trace import KEY, Call, Label, Trace
from ..unification import unify
from .constants import constant
from .registry import rule


@rule("view_as_complex view_as_real")
def as_complex(trace: Trace, call: Call) -> Any:
    (tensor,) = call.args
    label = trace.label(tensor)
    out = call.run()
    assert label is not None
    last = tensor.dim() - 1
    if call.name == "view_as_complex":
        if label.linear is None and label.axes[last] is None:
            return trace.put(out, label.axes[:last], tensor)
        if label.linear is None or last not in label.dims:
            hold(trace.axes(tensor), call.name)
            return out
        real, imaginary = (once(part.double()) for part in label.linear.images.unbind(-1))
        dims = tuple(dim for dim in label.dims if dim != last)
        return remapped(out, replace(label, axes=label.axes[:last], dims=dims), torch.complex(real, imaginary))
    if label.linear is None or not label.linear.images.is_complex():
        return trace.put(out, [*trace.axes(tensor), None], tensor)
    wider = replace(label, axes=[*label.axes, None], dims=(*label.dims, last + 1))
    return remapped(out, wider, torch.view_as_real(once(label.linear.images)))


def remapped(out: Tensor, label: Label, images: Tensor) -> Tensor:
    """Give `out` the map of a label with other images."""
    assert label.linear is not None
    linear = Linear(label.linear.axis, images.expand(-1, *out.shape))
    setattr(out, KEY, Label(list(label.axes), linear, label.dims, label.within))
    return out


def joined_maps(trace: Trace, given: list[Tensor], out: Tensor, dim: int, stacking: bool) -> Any:
    """Concatenate several linear images of the same axis."""
    labels = [trace.label(g) for g in given]
    first = next(label.linear for label in labels if label is not None and label.linear is not None)
    images, dims = [], None
    for g, label in zip(given, labels, strict=True):
        if label is None:
            return None
        linear, mine = label.linear, label.dims
        if linear is None:
            where = [d for d, axis in enumerate(label.axes) if axis is not None and axis.top == first.axis.top]
            if len(where) != 1:
                return None
            linear, mine = basis(first.axis, g, where[0]), (where[0],)
        if linear.axis.top != first.axis.top or (dims is not None and mine != dims):
            return None
        dims = mine
        images.append(linear.images)
    assert dims is not None
    if not stacking and dim not in dims:
        return None
    axes = [axis if d not in dims else None for d, axis in enumerate(labels[0].axes)]  # type: ignore[union-attr]
    for label in labels[1:]:
        for d, axis in enumerate(label.axes):  # type: ignore[union-attr]
            if d not in dims and axis is not None and axes[d] is not None:
                unify(axis, axes[d], "cat")  # type: ignore[arg-type]
            elif d not in dims and (axis is None) != (axes[d] is None):
                return None
    for d in range(1, images[0].dim()):
        if (stacking or d != dim + 1) and all(one.stride(d) == 0 for one in images):
            images = [one.narrow(d, 0, 1) for one in images]
    made = (torch.stack if stacking else torch.cat)(images, dim + 1).expand(-1, *out.shape)
    if stacking:
        axes.insert(dim, None)
        dims = (*(d + (d >= dim) for d in dims), dim)
    setattr(out, KEY, Label(axes, Linear(first.axis, made), tuple(sorted(dims)), trace.within(*given)))
    return out


def sum_of_maps(trace: Trace, a: Tensor, b: Tensor, out: Tensor, call: Call) -> Tensor | None:
    """Add or subtract two linear images of the same axis."""
    la, lb = trace.label(a), trace.label(b)
    if la is None or lb is None or (la.linear is None and lb.linear is None) or a.shape != b.shape:
        return None
    one = la.linear or lb.linear
    dims = la.dims or lb.dims
    assert one is not None
    both = []
    for tensor, label in ((a, la), (b, lb)):
        linear = label.linear
        if linear is None:
            if len(dims) != 1 or (axis := label.axes[dims[0]]) is None or axis.top != one.axis.top:
                return None
            linear = basis(one.axis, tensor, dims[0])
        elif label.dims != dims or linear.axis.top != one.axis.top:
            return None
        both.append(linear.images)
    axes: list[Axis | None] = []
    for d in range(out.dim()):
        x, y = la.axes[d], lb.axes[d]
        if d in dims:
            axes.append(None)
        elif (x is None) != (y is None):
            return None
        else:
            if x is not None and y is not None:
                unify(x, y, call.name)
            axes.append(x)
    sign = -1 if "sub" in call.name else 1
    if call.name in ("rsub", "__rsub__"):
        return None
    images = (once(both[0]) + sign * once(both[1])).expand(-1, *out.shape)
    setattr(out, KEY, Label(axes, Linear(one.axis, images), dims, trace.within(a, b)))
    return out


def is_still(label: Label) -> bool:
    """Return whether a tensor is made of parameters alone, none of which anything moves: it is a constant."""
    moving = any(leaf.moves for axis in label.axes if axis is not None for leaf in axis.leaves)
    return not (moving or label.made or label.name or label.linear or label.square or label.plus)


def times_constants(trace: Trace, a: Tensor, b: Tensor, out: Tensor, divides: bool) -> Tensor | None:
    """Multiply an axis of `a`, or a map of one, by constants that vary along it: rotations by position."""
    label, theirs = trace.label(a), trace.label(b)
    if label is None or not (theirs is None or is_still(theirs)) or (out.shape != a.shape and label.linear is None):
        return None
    if label.square is not None or label.plus:
        return None
    offset = out.dim() - b.dim()
    varied = [d for d in range(out.dim()) if d >= offset and b.shape[d - offset] > 1 and not constant(b, d - offset)]
    shift = out.dim() - a.dim()
    axes = [None] * shift + list(label.axes)
    linear, dims = label.linear, tuple(d + shift for d in label.dims)
    mine = [d for d in varied if axes[d] is not None]
    if linear is None and (not mine or b.is_complex()):
        return None
    for d in mine if linear is not None else mine[:-1]:  # positions with different constants
        hold([axes[d]], "constants along it")
        axes[d] = None
    if linear is None:
        axis = axes[mine[-1]]
        assert axis is not None
        linear, dims = _unsqueezed(basis(axis, a, mine[-1] - shift), shift), (mine[-1],)
        axes[mine[-1]] = None
    else:
        linear, dims, off = peeled(_unsqueezed(linear, shift), dims, varied)
        for d, one in off.items():
            axes[d] = one
    factor = 1 / b if divides else b
    factor = factor.to(torch.complex128) if b.is_complex() else factor.double()
    images = (once(linear.images) * factor).expand(-1, *out.shape)
    setattr(out, KEY, Label(axes, Linear(linear.axis, images), dims, label.within))
    return out


def _unsqueezed(linear: Linear, count: int) -> Linear:
    """Return a map with so many more dimensions in front."""
    return Linear(linear.axis, linear.images[(slice(None), *[None] * count)])
