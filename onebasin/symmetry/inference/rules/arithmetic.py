# SPDX-License-Identifier: Apache-2.0
"""Sums, products and quotients, entry by entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, lower, product, restrict, unify
from ..linear import Linear, once
from ..trace import KEY, ONES, Call, Label, Trace
from .constants import constant, entrywise, lined_up, through_view
from .maps import sum_of_maps, times_constants
from .norms import bias_of_norm, gain_of, over_length, squared, weight_of_norm
from .pointwise import pointwise
from .registry import rule
from .silent import same
from .summands import note_places, note_rows


@rule(
    "add sub add_ sub_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ rsub lerp subtract __ior__ logical_or "
    "maximum_ copysign_"
)
def summed(trace: Trace, call: Call) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    if call.kwargs.get("alpha", 1) != 1 and len(call.args) > 3:
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    before = a.clone() if isinstance(a, Tensor) and call.name.endswith("_") and not call.name.startswith("__") else a
    la, lb = trace.label(a), trace.label(b)
    view = through_view(trace, call)
    scalar = None if isinstance(b, Tensor) and isinstance(a, Tensor) else (a if isinstance(b, Tensor) else b)
    if (
        scalar is not None
        or (isinstance(b, Tensor) and b.numel() == 1 and lb is None)
        or (isinstance(a, Tensor) and a.numel() == 1 and la is None)
    ):
        tensor, label = (a, la) if la is not None else (b, lb)
        value = scalar if scalar is not None else (b if la is not None else a)
        out = call.run()
        assert label is not None
        if label.length is not None or (label.indexes is not None and float(value) == 0):
            return _inherit(trace, out, tensor, label)
        if label.indexes is not None:
            fix(label.indexes, call.name)
        if float(value) == 0:
            return _inherit(trace, out, tensor, label)
        if float(value) == 1 and label.name and "sub" not in call.name:
            setattr(out, KEY, Label(list(label.axes), name=label.name, plus=1.0, within=label.within))
            return out
        axes = trace.axes(tensor, call.name)
        lower(axes, ONES, f"{call.name} of a number")
        return trace.put(out, axes, tensor)
    out = call.run()
    if view:
        return out
    linear = sum_of_maps(trace, a, b, out, call)
    if linear is not None:
        return linear
    bias = bias_of_norm(trace, a, b, out)
    if bias is not None:
        return bias
    x, y = trace.axes(a, call.name), trace.axes(b, call.name)
    mean = getattr(b, "_mean_of", None)
    centred = "sub" in call.name and mean is not None and bool(x) and x[-1] is not None and mean.top == x[-1].top
    axes = entrywise(trace, before, b, x, y, out, call.name, sums=not centred)
    known: dict[str, Any] = {}
    for label in (la, lb):
        if label is not None and label.length is not None:
            known["length"] = label.length
    if la is not None and lb is not None and la.rows and lb.rows and "sub" not in call.name:
        known |= note_rows(trace, la.rows, lb.rows)
    if biases := tuple(bias for label in (la, lb) if label is not None for bias in label.biases):
        known["biases"] = biases
    if "sub" not in call.name:
        known |= note_places(trace, a, b, out)
    for one, other in ((la, lb), (lb, la)):
        if one is not None and other is not None and len(one.by) == 1 and other.name and "sub" not in call.name:
            trace.biases[other.name] = one.by[0]
    if centred:
        out._centred = True
    return trace.put(out, axes, a, b, **known)


def _inherit(trace: Trace, out: Tensor, source: Tensor, label: Label) -> Tensor:
    if out is not source:
        setattr(out, KEY, replace(label, axes=list(label.axes), name="", made=True))
    return out


@rule(
    "mul mul_ __mul__ __rmul__ __imul__ multiply div div_ __truediv__ __itruediv__ true_divide divide "
    "__rtruediv__ __and__ __iand__ logical_and bitwise_and"
)
def scaled(trace: Trace, call: Call) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    if call.kwargs.get("rounding_mode"):
        return pointwise(trace, call)
    la, lb = trace.label(a), trace.label(b)
    divides = "div" in call.name
    if call.name == "__rtruediv__":
        return pointwise(trace, call)
    if through_view(trace, call):
        return call.run()
    if a is b and la is not None and not divides:
        out = call.run()
        return squared(trace, a, out)
    one_number = not isinstance(b, Tensor) or (b.numel() == 1 and lb is None)
    other_number = not isinstance(a, Tensor) or (a.numel() == 1 and la is None)
    if (one_number and la is not None) or (other_number and lb is not None and not divides):
        tensor, label = (a, la) if one_number and la is not None else (b, lb)
        assert label is not None
        value = b if one_number and la is not None else a
        if isinstance(value, Tensor) and value.is_complex():
            return trace._unruled(call.name, call.func, call.args, call.kwargs)
        if float(value) == 1 and tensor.is_floating_point():
            return same(trace, call)
        out = call.run()
        if label.indexes is not None and float(value) != 1:
            fix(label.indexes, call.name)
        if label.linear is not None and out is not tensor:
            factor = 1 / value if divides else value
            images = (once(label.linear.images) * factor).expand(-1, *out.shape)
            linear = Linear(label.linear.axis, images)
            setattr(out, KEY, Label(list(label.axes), linear, label.dims, label.within))
            return out
        if label.plus:
            trace.axes(tensor, call.name)
        if out is not tensor:
            setattr(out, KEY, Label(list(label.axes), within=label.within, normed=label.normed, square=label.square,
                                    length=label.length, name=""))  # fmt: skip
        return out
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return pointwise(trace, call)
    out = call.run()
    normed = over_length(trace, a, b, out, divides)
    if normed is not None:
        return normed
    weighted = None if divides else weight_of_norm(trace, a, b, out)
    if weighted is not None:
        return weighted
    gained = None if divides else gain_of(trace, a, b, out)
    if gained is not None:
        return gained
    for one, other in ((a, b), (b, a)):
        diagonal = (
            times_constants(trace, one, other, out, divides and other is b) if not (divides and other is a) else None
        )
        if diagonal is not None:
            return diagonal
    x, y = lined_up(a, trace.axes(a, call.name), out.dim()), lined_up(b, trace.axes(b, call.name), out.dim())
    axes: list[Axis | None] = []
    for d, (p, q) in enumerate(zip(x, y, strict=True)):
        if p is not None and q is not None:
            if divides:
                restrict(p, PERMUTE, call.name)
                unify(p, q, call.name)
                axes.append(p)
            else:
                axes.append(product(p, q, call.name))
        elif p is None and q is None:
            axes.append(None)
        else:
            axis, tensor = (p, b) if p is not None else (q, a)
            assert axis is not None
            wide = tensor.dim() >= out.dim() - d and tensor.shape[d - out.dim()] > 1
            if divides and axis is q:
                restrict(axis, PERMUTE, call.name)
            if wide and not constant(tensor, d - out.dim()):
                fix(axis, f"a constant ({call.name})")
            axes.append(axis)
    known: dict[str, Any] = {}
    lengths = [label.length for label in (la, lb) if label is not None and label.length is not None]
    if (
        lengths
        and not all(label is not None and label.length is None and any(label.axes) for label in (la, lb))
        and (la is None or lb is None or (la.length and lb.length))
    ):
        known["length"] = lengths[0]
    return trace.put(out, axes, a, b, **known)


@rule("neg __neg__ neg_")
def negative(trace: Trace, call: Call) -> Any:
    source = call.args[0]
    label = trace.label(source)
    out = call.run()
    assert label is not None
    if label.linear is not None and out is not source:
        linear = Linear(label.linear.axis, (-once(label.linear.images)).expand(-1, *out.shape))
        setattr(out, KEY, Label(list(label.axes), linear, label.dims, label.within))
        return out
    return trace.put(out, trace.axes(source), source)
