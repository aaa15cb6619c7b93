# SPDX-License-Identifier: Apache-2.0
"""Functions of each entry by itself: they commute with permutations, odd ones with signs, relu with scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...tables.signature import MOVES
from ..atoms import PERMUTE, fix, lower
from ..trace import Call, Trace
from .constants import entrywise
from .norms import squared
from .registry import RULES, rule
from .silent import same


def _point(trace: Trace, call: Call, moves: frozenset[str]) -> Any:
    given = [tensor for tensor in call.tensors if trace.label(tensor) is not None]
    rest = [tensor for tensor in call.tensors if trace.label(tensor) is None]
    out = call.run()
    first = given[0]
    axes = trace.axes(first, call.name)
    lower(axes, moves, call.name)
    for other in (*given[1:], *rest):
        theirs = trace.axes(other, call.name)
        lower(theirs, moves, call.name)
        if isinstance(out, Tensor):
            axes = entrywise(first, other, axes, theirs, out, call.name, sums=False)
    label = trace.label(first)
    assert label is not None
    if label.indexes is not None and len(given) == 1:
        equal = isinstance(out, Tensor) and out.dtype == torch.bool and (bool(out.all()) or not bool(out.any()))
        if not equal:
            fix(label.indexes, call.name)
    return trace.put(out, axes, *given, length=label.length, made=len(given) > 1 or label.made)


@rule(
    "gelu silu sigmoid exp exp_ log log1p expm1 softplus logsigmoid mish hardswish hardsigmoid selu elu celu "
    "quick_gelu sqrt rsqrt reciprocal clamp clamp_ clip clamp_min clamp_max abs cos relu6 hardtanh leaky_relu "
    "prelu_ floor round ceil ge gt lt le eq ne __ge__ __gt__ __lt__ __le__ __eq__ __ne__ maximum minimum isfinite "
    "isnan isinf nan_to_num logical_not __invert__ bitwise_not log2 exp2 sigmoid_ square_ floor_divide "
    "__floordiv__ __mod__ remainder fmod nan_to_num_ pow_ __rpow__ __or__ less greater bitwise_or logical_xor "
    "__xor__ greater_equal less_equal not_equal heaviside sign erfc threshold log_sigmoid int long bool addcmul "
    "addcdiv isclose xlogy"
)
def pointwise(trace: Trace, call: Call) -> Any:
    if call.name in ("int", "long", "bool"):
        source = call.get(0, "input")
        if not source.is_floating_point():
            return same(trace, call)
    return _point(trace, call, PERMUTE)


@rule("tanh erf sin asinh softsign tanhshrink tan atan sinh")
def odd(trace: Trace, call: Call) -> Any:
    return _point(trace, call, MOVES["odd"])


@rule("relu relu_")
def relu(trace: Trace, call: Call) -> Any:
    return _point(trace, call, MOVES["relu"])


@rule("pow square __pow__")
def power(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    exponent = 2 if call.name == "square" else call.get(1, "exponent")
    label = trace.label(source)
    if label is None:
        return pointwise(trace, call)
    out = call.run()
    if exponent == 2 and label.length is None:
        return squared(trace, source, out)
    axes = trace.axes(source, call.name)
    lower(axes, PERMUTE, call.name)
    return trace.put(out, axes, source, length=label.length)


@rule("glu")
def glu(trace: Trace, call: Call) -> Any:
    source, dim = call.get(0, "input"), call.get(1, "dim", -1)
    first, second = RULES["chunk"](trace, Call("chunk", torch.Tensor.chunk, (source, 2, dim), {}))
    gate = RULES["sigmoid"](trace, Call("sigmoid", torch.sigmoid, (second,), {}))
    return RULES["mul"](trace, Call("mul", torch.mul, (first, gate), {}))
