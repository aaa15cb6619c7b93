# SPDX-License-Identifier: Apache-2.0
"""Contractions: axes that are summed over are dual, the others are indices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..atoms import PERMUTE, Axis, fix, restrict, write
from ..trace import ONES, Call, Trace
from ..unification import unify
from .constants import beside, constant, entrywise
from .registry import rule
from .summands import vectors_of


def contract(trace: Trace, spec: str, given: Sequence[Tensor], out: Tensor, why: str) -> list[Axis | None]:
    """Return the axes of an Einstein sum, `ab,cb->ac`."""
    inputs, _, result = spec.partition("->")
    terms = inputs.split(",")
    found: dict[str, list[tuple[Axis | None, Tensor, int]]] = {}
    every = [trace.axes(tensor, why) for tensor in given]
    for letters, tensor, axes in zip(terms, given, every, strict=True):
        for dim, letter in enumerate(letters):
            found.setdefault(letter, []).append((axes[dim], tensor, dim))
    kept: dict[str, Axis | None] = {}
    gone: list[Axis] = []
    for letter, uses in found.items():
        labelled = [axis for axis, _, _ in uses if axis is not None]
        if letter in result:
            axis = labelled[0] if labelled else None
            if axis is not None and len(uses) > 1:
                for other, tensor, dim in uses:
                    if other is not None and other is not axis:
                        unify(axis, other, why)
                    elif other is None and tensor.shape[dim] > 1:
                        beside(axis, tensor, dim, why, sums=False)
                restrict(axis, PERMUTE, why)
            kept[letter] = axis
        elif len(uses) == 1:
            if labelled:
                restrict(labelled[0], ONES, f"{why}: a sum")
                gone.append(labelled[0])
        elif len(uses) == 2:
            if len(labelled) == 2:
                unify(labelled[0], ~labelled[1], why)
                gone.append(labelled[0])
                if all(label is not None and label.made for label in map(trace.label, given)):
                    trace.passes.append((labelled[0], "met"))
            elif labelled:
                _, tensor, dim = next(use for use in uses if use[0] is None)
                if bool(tensor.any()):
                    (
                        restrict(labelled[0], ONES, why)
                        if constant(tensor, dim)
                        else fix(labelled[0], f"constants in {why}")
                    )
                gone.append(labelled[0])
        else:
            for axis in labelled:
                restrict(axis, PERMUTE, why)
                unify(labelled[0], axis, why)
                gone.append(axis)
    trace.mixed(list(kept.values()), gone)
    axes = [kept.get(letter) for letter in result]
    write(axes)
    return axes


@rule("linear")
def linear(trace: Trace, call: Call) -> Any:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    out = call.run()
    outer = string.ascii_lowercase[: x.dim() - 1]
    axes = contract(trace, f"{outer}X,YX->{outer}Y", [x, weight], out, "linear")
    if isinstance(bias, Tensor):
        axes = entrywise(out, bias, axes, trace.axes(bias), out, "linear")
    by = tuple(label.name for label in map(trace.label, (weight, bias)) if label is not None and label.name)
    by = by if (its := trace.label(weight)) is not None and its.name else ()
    return trace.put(out, axes, x, weight, by=by, vectors=vectors_of(bias))


@rule("matmul bmm __matmul__ mm mv __rmatmul__ dot")
def matmul(trace: Trace, call: Call) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other", call.kwargs.get("mat2"))
    if call.name == "__rmatmul__":
        a, b = b, a
    out = call.run()
    one, other = a.dim() == 1, b.dim() == 1
    left, right = (a[None] if one else a), (b[:, None] if other else b)
    if (one and trace.label(a)) or (other and trace.label(b)):
        for tensor, copy, place in ((a, left, 0), (b, right, 1)):
            if copy is not tensor and trace.label(tensor):
                axes = list(trace.axes(tensor))
                axes.insert(place, None)
                trace.put(copy, axes, tensor)
    count = max(left.dim(), right.dim()) - 2
    batch = string.ascii_lowercase[:count]
    spec = []
    given = []
    for tensor, ends in ((left, "XY"), (right, "YZ")):
        mine = batch[count - (tensor.dim() - 2) :]
        # A batch of size 1 is broadcast.
        keep = "".join(c for c, n in zip(mine, tensor.shape, strict=False) if n > 1)
        slim = tensor
        if keep != mine:
            axes = [a for a, n in zip(trace.axes(tensor)[:-2], tensor.shape, strict=False) if n > 1] + trace.axes(
                tensor
            )[-2:]
            slim = tensor.reshape([n for n in tensor.shape[:-2] if n > 1] + list(tensor.shape[-2:])).detach()
            if slim is tensor or slim.data_ptr() == tensor.data_ptr():
                slim = slim.clone()
            if trace.label(tensor):
                trace.put(slim, axes, tensor)
        spec.append(keep + ends)
        given.append(slim)
    full = contract(trace, f"{spec[0]},{spec[1]}->{batch}XZ", given, out, "matmul")
    if one:
        full.pop(-2)
    if other:
        full.pop(-1)
    trace.put(out, full, a, b)
    along = trace.axes(a)[-1]
    still = along is None or along.cat or not any(leaf.moves for leaf in along.leaves)  # no experts
    if still and full and full[-1] is not None and a.dim() > 1 and bool(((a.sum(-1) - 1).abs() < 1e-9).all()):
        trace.passes.append((full[-1], "passes"))
    return out


@rule("baddbmm addmm addbmm addmv")
def added_product(trace: Trace, call: Call) -> Any:
    base, a, b = (
        call.get(0, "input"),
        call.get(1, "batch1", call.kwargs.get("mat1")),
        call.get(2, "batch2", call.kwargs.get("mat2")),
    )
    made = matmul(trace, Call("matmul", torch.matmul, (a, b), {}))
    out = call.run()
    axes = (
        entrywise(made, base, trace.axes(made), trace.axes(base), out, call.name)
        if call.kwargs.get("beta", 1)
        else trace.axes(made)
    )
    return trace.put(out, axes, base, a, b)


@rule("einsum")
def einsum(trace: Trace, call: Call) -> Any:
    spec, *given = call.args
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    out = call.run()
    spec = spec.replace(" ", "")
    if "->" not in spec or any(len(set(term)) < len(term) for term in spec.replace("->", ",").split(",")):
        return trace.unruled(call.ran(out))
    free = [c for c in string.ascii_letters if c not in spec]
    if "..." in spec:
        terms, result = spec.split("->")
        most = max(
            t.dim() - len(s.replace("...", "")) for s, t in zip(terms.split(","), given, strict=True) if "..." in s
        )
        dots = "".join(free[:most])
        terms = ",".join(s.replace("...", dots[most - (t.dim() - len(s.replace("...", ""))) :] if "..." in s else "")
                         for s, t in zip(terms.split(","), given, strict=True))  # fmt: skip
        spec = f"{terms}->{result.replace('...', dots)}"
    return trace.put(out, contract(trace, spec, given, out, "einsum"), *given)
