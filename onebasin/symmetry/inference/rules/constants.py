# SPDX-License-Identifier: Apache-2.0
"""Restrictions of an axis by constants that are combined with it.

A sum with equal constants commutes with the maps that preserve the vector of ones; a sum with others, with none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..atoms import Axis, fix, hold, restrict
from ..trace import ONES, Call, Trace, tensors
from ..unification import unify


def constant(tensor: Tensor, dim: int) -> bool:
    return bool((tensor == tensor.narrow(dim, 0, 1)).all())


def beside(axis: Axis, tensor: Tensor, dim: int, why: str, sums: bool = True) -> None:
    """Restrict an axis to maps that preserve a constant in the same sum, or in the same product entry by entry. Of a
    product of axes, each is restricted by how the constant differs along it."""
    if axis.parts and not axis.cat:
        dim = dim % tensor.dim()
        sizes = [part.size for part in axis.parts]
        apart = tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
        for place, part in enumerate(axis.parts, dim):
            beside(part, apart, place, why, sums)
    elif not constant(tensor, dim):
        fix(axis, f"a constant ({why})")
    elif sums and bool(tensor.any()):
        restrict(axis, ONES, why)


def is_number(trace: Trace, value: Any) -> bool:
    """Return whether this is a single number that depends on no parameter."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and trace.label(value) is None)


def lined_up(axes: list[Axis | None], dims: int) -> list[Axis | None]:
    """Return the axes of a tensor broadcast to so many dimensions: the last ones correspond to each other."""
    return [None] * (dims - len(axes)) + axes


def entrywise(
    a: Any, b: Any, x: list[Axis | None], y: list[Axis | None], out: Tensor, why: str, sums: bool = True
) -> list[Axis | None]:
    """Return the axes of an entrywise combination of two tensors, such as a sum."""
    x, y = lined_up(x, out.dim()), lined_up(y, out.dim())
    axes: list[Axis | None] = []
    for d, (one, other) in enumerate(zip(x, y, strict=True)):
        if one is not None and other is not None:
            unify(one, other, why)
            axes.append(one)
        elif one is None and other is None:
            axes.append(None)
        else:
            axis, tensor = (one, b) if one is not None else (other, a)
            assert axis is not None
            if tensor.dim() < out.dim() - d or tensor.shape[d - out.dim()] == 1:
                if sums and bool(tensor.any()):
                    restrict(axis, ONES, why)
            else:
                beside(axis, tensor, d - out.dim(), why, sums)
            axes.append(axis)
    return axes


def through_view(trace: Trace, call: Call) -> bool:
    """Return whether a call changes a tensor through a view, which is not tracked; fix the axes of its inputs then."""
    if not call.name.endswith("_") or call.name.startswith("__"):
        return False
    target = call.get(0, "input")
    if isinstance(target, Tensor) and target._is_view() and trace.label(target) is None:
        for tensor in tensors((call.args[1:], call.kwargs)):
            hold(trace.axes(tensor), f"{call.name} through a view")
        return True
    return False
