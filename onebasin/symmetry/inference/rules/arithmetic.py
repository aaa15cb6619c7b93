# SPDX-License-Identifier: Apache-2.0
"""Sums, products and quotients, entry by entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, lower, restrict
from ..linear import once
from ..products import product
from ..trace import KEY, ONES, Call, Label, Trace, is_nothing
from ..unification import unify
from .constants import beside, entrywise, is_number, lined_up, through_view
from .maps import remapped, sum_of_maps, times_constants
from .norms import bias_of_norm, gain_of, over_length, squared, weight_of_norm
from .pointwise import pointwise
from .registry import rule
from .silent import as_it_was
from .summands import note_places, note_rows


@rule(
    "add sub add_ sub_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ rsub lerp subtract __ior__ logical_or "
    "maximum_ copysign_"
)
def summed(trace: Trace, call: Call) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    if call.kwargs.get("alpha", 1) != 1 and len(call.args) > 3:
        return trace.unruled(call)
    before = a.clone() if isinstance(a, Tensor) and call.name.endswith("_") and not call.name.startswith("__") else a
    la, lb = trace.label(a), trace.label(b)
    view = through_view(trace, call)
    if is_number(trace, a) or is_number(trace, b):
        tensor, label, value = (a, la, b) if la is not None else (b, lb, a)
        out = call.run()
        assert label is not None
        if label.length is not None or float(value) == 0:
            if out is not tensor:
                setattr(out, KEY, replace(label, axes=list(label.axes), name="", made=True))
            return out
        if label.indexes is not None:
            fix(label.indexes, call.name)
        if float(value) == 1 and label.name and "sub" not in call.name:
            setattr(out, KEY, Label(list(label.axes), name=label.name, plus=1.0, within=label.within))
            return out
        axes = trace.axes(tensor, call.name)
        lower(axes, ONES, f"{call.name} of a number")
        return trace.put(out, axes, tensor)
    out = call.run()
    if view:
        return out
    if (added := sum_of_maps(trace, a, b, out, call)) is not None:
        return added
    if (added := bias_of_norm(trace, a, b, out)) is not None:
        return added
    x, y = trace.axes(a, call.name), trace.axes(b, call.name)
    mean = getattr(b, "_mean_of", None)
    centred = "sub" in call.name and mean is not None and bool(x) and x[-1] is not None and mean.top == x[-1].top
    axes = entrywise(before, b, x, y, out, call.name, sums=not centred)
    labels = [label for label in (la, lb) if label is not None]
    known: dict[str, Any] = {
        "length": next((label.length for label in reversed(labels) if label.length is not None), None),
        "biases": tuple(bias for label in labels for bias in label.biases) or None,
    }
    if "sub" not in call.name:
        known["vectors"] = note_places(trace, a, b, out)
        if la is not None and lb is not None:
            if la.rows and lb.rows:
                known["rows"] = note_rows(trace, la.rows, lb.rows)
            for one, other in ((la, lb), (lb, la)):
                if len(one.by) == 1 and other.name:
                    trace.biases[other.name] = one.by[0]
    if centred:
        out._centred = True
    return trace.put(out, axes, a, b, **known)


@rule(
    "mul mul_ __mul__ __rmul__ __imul__ multiply div div_ __truediv__ __itruediv__ true_divide divide "
    "__rtruediv__ __and__ __iand__ logical_and bitwise_and"
)
def scaled(trace: Trace, call: Call) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    if call.kwargs.get("rounding_mode") or call.name == "__rtruediv__":
        return pointwise(trace, call)
    la, lb = trace.label(a), trace.label(b)
    divides = "div" in call.name
    if through_view(trace, call):
        return call.run()
    if a is b and la is not None and not divides:
        return squared(trace, a, call.run())
    for tensor, label, value in ((a, la, b), (b, lb, a)):
        if label is None or not is_number(trace, value) or (divides and value is a):
            continue
        if isinstance(value, Tensor) and value.is_complex():
            return trace.unruled(call)
        if float(value) == 1 and tensor.is_floating_point():
            return as_it_was(trace, call, tensor)
        out = call.run()
        if label.indexes is not None and float(value) != 1:
            fix(label.indexes, call.name)
        if label.linear is not None and out is not tensor:
            return remapped(out, label, once(label.linear.images) * (1 / value if divides else value))
        if label.plus:
            trace.axes(tensor, call.name)
        if out is not tensor:
            kept = Label(list(label.axes), within=label.within)
            kept.normed, kept.square, kept.length = label.normed, label.square, label.length
            setattr(out, KEY, kept)
        return out
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return pointwise(trace, call)
    out = call.run()
    if out is not a and (is_nothing(a) or is_nothing(b)):
        return out  # what a recurrence begins with stays zeros whatever moves
    if (made := over_length(trace, a, b, out, divides)) is not None:
        return made
    if not divides and (made := weight_of_norm(trace, a, b, out)) is not None:
        return made
    if not divides and (made := gain_of(trace, a, b, out)) is not None:
        return made
    for one, other in ((a, b),) if divides else ((a, b), (b, a)):
        if (made := times_constants(trace, one, other, out, divides)) is not None:
            return made
    x, y = lined_up(trace.axes(a, call.name), out.dim()), lined_up(trace.axes(b, call.name), out.dim())
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
            if wide:
                beside(axis, tensor, d - out.dim(), call.name, sums=False)
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
        return remapped(out, label, -once(label.linear.images))
    return trace.put(out, trace.axes(source), source)
