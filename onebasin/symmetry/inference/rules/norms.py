# SPDX-License-Identifier: Apache-2.0
"""Norms, as one operation or step by step: a vector divided by its length, a weight, a bias.

Orthogonal maps preserve the length, and also that without the mean if they preserve the vector of ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ...tables.signature import MOVES
from ..atoms import PERMUTE, Axis, fix, hold, lower, new, restrict
from ..trace import KEY, Call, Gain, Label, Normed, Trace
from ..unification import split, unify
from .constants import beside, entrywise
from .registry import rule


@rule("layer_norm rms_norm")
def normalized(trace: Trace, call: Call) -> Any:
    x, shape = call.get(0, "input"), call.get(1, "normalized_shape")
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None
    out = call.run()
    axes = trace.axes(x, call.name)
    kind = "layernorm" if call.name == "layer_norm" else "rmsnorm"
    count = len(shape) if not isinstance(shape, int) else 1
    if count != 1 or axes[-1] is None:
        lower(axes, PERMUTE if count == 1 else frozenset(), call.name)
        for tensor in (weight, bias):
            hold(trace.axes(tensor) if isinstance(tensor, Tensor) else (), call.name)
        return trace.put(out, [None if i >= x.dim() - count else a for i, a in enumerate(axes)], x)
    last = axes[-1]
    restrict(last, MOVES["ones" if kind == "layernorm" else "orthogonal"], call.name, norm=True)
    lower(axes[:-1], PERMUTE, call.name)
    trace.mixed(axes[:-1], [last])
    label = trace.label(weight)
    if label is None:
        return trace.put(out, axes, x, normed=Normed(kind, last))
    its = trace.label(bias)
    assert label.axes[0] is not None
    made = norm(trace, kind, last, label.name, label.axes[0], its.name if its else "", bool(label.plus))
    first = getattr(x, "_normed_by", made)
    setattr(x, "_normed_by", first)  # noqa: B010
    if first is not made:
        trace.together[made.weight] = first.weight
    if its is not None and its.axes[0] is not None and made.target is not None:
        unify(its.axes[0], made.target, "norm")
    return trace.put(out, [*axes[:-1], made.target], x, normed=made)


@rule("_weight_norm")
def weight_norm(trace: Trace, call: Call) -> Any:
    """Apply the rules of its parts: every slice of a tensor is divided by its length, and multiplied by a number."""
    direction, size = call.get(0, "v"), call.get(1, "g")
    dim = call.get(2, "dim", 0)
    if dim == -1:  # the length of all of it
        return trace.unruled(call)
    along = [each for each in range(direction.dim()) if each != dim]
    with trace:
        return functional.normalize(direction, dim=along) * size  # type: ignore[arg-type]  # it takes several


def norm(trace: Trace, kind: str, source: Axis, weight: str, along: Axis, bias: str, plus: bool) -> Normed:
    """Record a norm with a weight, or with one plus a weight. A module that is used twice has one source and target."""
    trace.normed.append(weight)
    for known in trace.norms:
        if known.weight == weight:
            unify(known.source, source, "a norm used twice")
            return known
    target = new(source.size)
    made = Normed(kind, source, target, weight, bias, plus)
    unify(along, target, "norm")
    trace.norms.append(made)
    return made


@rule("normalize")
def unit(trace: Trace, call: Call) -> Any:
    source, order, dim = call.get(0, "input"), call.get(1, "p", 2), call.get(2, "dim", 1)
    out = call.run()
    axes = trace.axes(source, call.name)
    along = {each % source.dim() for each in (dim if isinstance(dim, list | tuple) else [dim])}
    for d, axis in enumerate(axes):
        if axis is not None:
            restrict(axis, MOVES["orthogonal"] if d in along and order in (2, 2.0) else PERMUTE, call.name)
    trace.mixed([a for d, a in enumerate(axes) if d not in along], [axes[d] for d in along])
    last = axes[-1] if along == {source.dim() - 1} else None
    return trace.put(out, axes, source, normed=None if last is None else Normed("rmsnorm", last))


@rule("batch_norm")
def batch_norm(trace: Trace, call: Call) -> Any:
    x = call.get(0, "input")
    channels = trace.axes(x, call.name)[1]
    out = call.run()
    for vector in [
        call.get(i, word) for i, word in enumerate(("input", "running_mean", "running_var", "weight", "bias"))
    ][1:]:
        its = trace.axes(vector)[0] if isinstance(vector, Tensor) and trace.label(vector) else None
        if channels is not None and its is not None:
            unify(channels, its, call.name)
        elif channels is not None and isinstance(vector, Tensor):
            beside(channels, vector, 0, call.name)
        elif its is not None:
            fix(its, call.name)
    lower(trace.axes(x), PERMUTE, call.name)
    return trace.put(out, trace.axes(x), x)


@rule("group_norm")
def group_norm(trace: Trace, call: Call) -> Any:
    x, groups = call.get(0, "input"), call.get(1, "num_groups")
    axes = trace.axes(x, call.name)
    out = call.run()
    channels = axes[1]
    if channels is not None:
        if groups > 1:
            split(channels, [groups, channels.size // groups])
        for vector in (call.get(2, "weight"), call.get(3, "bias")):
            if isinstance(vector, Tensor) and (its := trace.axes(vector)[0]) is not None:
                unify(channels, its, call.name)
    lower(axes, PERMUTE, call.name)
    return trace.put(out, axes, x)


def squared(trace: Trace, source: Tensor, out: Tensor) -> Tensor:
    axes = trace.axes(source)
    last = axes[-1] if axes else None
    if last is None:
        lower(axes, PERMUTE, "square")
        return trace.put(out, axes, source)  # type: ignore[no-any-return]
    lower(axes[:-1], PERMUTE, "square")
    setattr(out, KEY, Label(list(axes), within=trace.within(source), square=last))
    setattr(out, "_centred", getattr(source, "_centred", False))  # noqa: B010
    return out


def over_length(trace: Trace, a: Tensor, b: Tensor, out: Tensor, divides: bool) -> Tensor | None:
    """Return the quotient of a vector and its length as a norm, if it is one."""
    for x, scale in ((a, b), (b, a)):
        label, length = trace.label(x), trace.label(scale)
        if length is None or length.length is None or (divides and scale is a):
            continue
        axis, centred = length.length
        mine = trace.axes(x, "norm") if label is not None else []
        if not mine or mine[-1] is None or mine[-1].top != axis.top:
            continue
        others = entrywise(x, scale, mine, trace.axes(scale), out, "norm", sums=False)
        kind = "layernorm" if centred else "rmsnorm"
        trace.mixed(others[:-1], [mine[-1]])
        return trace.put(out, others, x, scale, normed=Normed(kind, mine[-1]))  # type: ignore[no-any-return]
    return None


def weight_of_norm(trace: Trace, a: Tensor, b: Tensor, out: Tensor) -> Tensor | None:
    """Return the product of a norm's output and its weight, if it is one."""
    for x, weight in ((a, b), (b, a)):
        label, its = trace.label(x), trace.label(weight)
        if label is None or its is None or not its.name or label.normed is None or weight.dim() != 1:
            continue
        if label.normed.target is not None or its.axes[0] is None or label.axes[-1] is None:
            continue
        target = norm(trace, label.normed.kind, label.axes[-1], its.name, its.axes[0], "", bool(its.plus))
        setattr(out, KEY, Label([*label.axes[:-1], target.target], within=trace.within(x), normed=target))
        trace.met(trace.label(out))  # type: ignore[arg-type]
        return out
    return None


def bias_of_norm(trace: Trace, a: Any, b: Any, out: Tensor) -> Tensor | None:
    for one, other in ((a, b), (b, a)):
        x, y = trace.label(one), trace.label(other)
        if (x is not None and y is not None and x.normed is not None and y.name and other.dim() == 1
                and x.normed.target is not None and not x.normed.bias and y.axes[0] is not None):  # fmt: skip
            x.normed.bias = y.name
            unify(y.axes[0], x.normed.target, "the bias of a norm")
            setattr(out, KEY, Label(list(x.axes), within=x.within, normed=x.normed))
            return out
    return None


def gain_of(trace: Trace, a: Tensor, b: Tensor, out: Tensor) -> Tensor | None:
    """Return the product of a matrix's output and a vector of parameters, channel by channel (LayerScale), if it is
    one."""
    for x, vector in ((a, b), (b, a)):
        label, its = trace.label(x), trace.label(vector)
        if label is None or its is None or not its.name or not label.by or vector.dim() != 1 or its.plus:
            continue
        source, target = trace.axes(x)[-1], its.axes[0]
        if source is None or target is None or source.top.atom.parts or target.top.atom.parts:
            continue
        known = trace.gains.setdefault(its.name, Gain(source, target, label.by))
        if known.of != label.by:
            continue
        known.times += 1
        unify(source, target, "a gain")
        return trace.put(out, trace.axes(x), x, vector)  # type: ignore[no-any-return]
    return None
