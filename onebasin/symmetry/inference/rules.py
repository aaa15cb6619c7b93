# SPDX-License-Identifier: Apache-2.0
"""One rule per kind of operation: which maps of the axes that enter it come out as maps of the axes that leave it."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..tables.signature import MOVES
from .atoms import (
    PERMUTE,
    Axis,
    data,
    fix,
    flat,
    hold,
    index,
    joined,
    lower,
    new,
    pick,
    product,
    restrict,
    split,
    unify,
)
from .linear import Linear, basis, once, peeled, settle
from .trace import KEY, ONES, Call, Gain, Label, Normed, Trace, tensors

RULES: dict[str, Callable[[Trace, Call], Any]] = {}


def rule(names: str) -> Callable[[Callable[[Trace, Call], Any]], Callable[[Trace, Call], Any]]:
    def add(function: Callable[[Trace, Call], Any]) -> Callable[[Trace, Call], Any]:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return add


# What keeps every number where it is.


@rule(
    "to float double half bfloat16 type type_as contiguous clone detach .data dropout alpha_dropout cpu alias "
    "requires_grad_ __deepcopy__ dropout2d dropout1d feature_dropout _to_copy .real identity .grad_fn"
)
def same(trace: Trace, call: Call) -> Any:
    out = call.run()
    source = call.get(0, "input")
    source = source if trace.label(source) is not None else call.get(1, "other")
    label = trace.label(source)
    if not isinstance(out, Tensor) or label is None or out is source:
        return out
    if label.indexes is not None and out.is_floating_point():
        fix(label.indexes, call.name)
    kept = None if out.is_floating_point() else label.indexes
    setattr(out, KEY, replace(label, axes=list(label.axes), indexes=kept))
    return out


@rule(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_tensor dim size numel stride is_floating_point is_complex data_ptr __len__ get_device element_size "
    "is_contiguous is_pinned .shape .device .dtype .ndim .is_cuda .requires_grad .layout .is_sparse .names "
    ".itemsize .is_nested .grad result_type broadcast_tensors_ __hash__ is_tensor __format__ __repr__ ndimension "
    "nelement is_same_size storage_offset untyped_storage register_hook .is_leaf .is_meta .is_mps .is_quantized "
    ".nbytes finfo is_autocast_enabled"
)
def blank(trace: Trace, call: Call) -> Any:
    return call.run()


# What only moves numbers: read off from where each number goes.


@rule(
    "view reshape flatten unflatten transpose permute movedim moveaxis swapaxes swapdims .T .mT .H t adjoint squeeze "
    "unsqueeze __getitem__ select narrow chunk split unbind expand expand_as broadcast_to repeat "
    "repeat_interleave tile roll flip view_as reshape_as ravel tensor_split split_with_sizes unfold diagonal "
    "__iter__ index_select unsafe_chunk unsafe_split hsplit vsplit dsplit rot90 masked_select take_along_dim "
    "gather broadcast_tensors slice_scatter_ pixel_shuffle pixel_unshuffle channel_shuffle atleast_1d atleast_2d "
    "atleast_3d squeeze_ unsqueeze_ transpose_ t_ swapaxes_ resize_ as_strided"
)
def rearranged(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input", call.kwargs.get("self"))
    if call.name == "broadcast_tensors":
        source = call.args[0]
    label = trace.label(source)
    if call.name in ("__getitem__", "index_select", "gather", "take_along_dim"):
        chosen = _chosen(trace, call)
        if chosen is not NotImplemented:
            return chosen
    if label is None or call.name == "broadcast_tensors":
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    where = torch.arange(source.numel()).view(source.shape)
    after = call.on({id(source): where})
    out = call.run()
    if isinstance(out, Tensor):
        moved(trace, source, out, after, call)
    else:
        out = tuple(out)
        for one, place in zip(out, after, strict=True):
            moved(trace, source, one, place, call)
    return out


def moved(trace: Trace, source: Tensor, out: Tensor, where: Tensor, call: Call) -> None:
    """Give `out`, whose entry i is entry where[i] of `source`, its axes."""
    label = trace.label(source)
    assert label is not None
    why = call.name
    if label.square is not None or label.plus:
        trace.axes(source, why)
    if out.numel() == 0:
        return
    places: list[Tensor] = []
    rest = where
    for size in reversed(source.shape):
        places.insert(0, rest % size)
        rest = rest // size
    depends = [
        {j for j in range(out.dim()) if out.shape[j] > 1 and bool((each != each.narrow(j, 0, 1)).any())}
        for each in places
    ]
    axes: list[Axis | None] = [None] * out.dim()
    linear: Linear | None = None
    dims: tuple[int, ...] = ()
    if label.linear is not None:
        mine = set().union(*(depends[d] for d in label.dims))
        shared = any(depends[d] & mine for d in range(source.dim()) if d not in label.dims)
        if shared:
            trace.axes(source, why)
        else:
            images = _moved(label.linear.images, places, depends, out.shape)
            single = {d for d in label.dims if out.dim() == source.dim() and out.shape[d] == 1}  # one entry, as a slice
            linear, dims = Linear(label.linear.axis, images), tuple(sorted(mine | single))
    done: set[int] = set()
    for d in range(source.dim()):
        axis = label.axes[d] if linear is None or d not in label.dims else None
        if linear is not None and d in label.dims:
            continue
        if axis is None:
            continue
        mine = depends[d]
        others = [e for e in range(source.dim()) if e != d and depends[e] & mine and source.shape[e] > 1]
        whole = len(mine) == 1 and out.shape[next(iter(mine))] == axis.size
        if not mine and axis.size > 1 and linear is None:  # one entry, which counts only where it is used
            linear = Linear(axis, _entries(places[d], mine, axis.size))
            dims = (d,) if out.dim() == source.dim() and out.shape[d] == 1 else ()
        elif not mine:
            if axis.size > 1:
                found = pick(axis, int(places[d].flatten()[0]), [], why)
                if found is None:
                    fix(axis, why)
        elif not others and whole and bool((_line(places[d], next(iter(mine))) == torch.arange(axis.size)).all()):
            axes[next(iter(mine))] = axis
        elif others:
            group = sorted({d, *others})
            out_dims = set().union(*(depends[e] for e in group))
            if out_dims & done:
                continue
            done |= out_dims
            merged = _merged(source, label, group, places, out_dims, out)
            if merged is None:
                hold((label.axes[e] for e in group), why)
                for e in group:
                    label.axes[e] = None
            else:
                axes[next(iter(out_dims))] = merged
        else:
            stretched = _stretched(axis, places[d], mine, out) if len(mine) == 1 else None
            if stretched is not None:
                axes[next(iter(mine))] = stretched
                continue
            chosen = Linear(axis, _entries(places[d], mine, axis.size))
            if linear is not None:
                trace_axes = settle(chosen, sorted(mine), out.shape, why)
                for j, one in zip(sorted(mine), trace_axes, strict=True):
                    axes[j] = one
            else:
                linear, dims = chosen, tuple(sorted(mine))
    labelled = linear is not None or any(axis is not None for axis in label.axes)
    if labelled:
        for j in range(out.dim()):  # what was repeated is told apart by its place alone
            if out.shape[j] > 1 and axes[j] is None and j not in dims and not any(j in mine for mine in depends):
                axes[j] = index(out.shape[j])
    known: dict[str, Any] = {}
    if label.indexes is not None:
        known["indexes"] = label.indexes
    if label.length is not None:
        known["length"] = label.length
    if linear is not None:
        known |= {"linear": linear, "dims": dims}
    trace.put(out, axes, source, **known)
    kept = trace.label(out)
    if (
        linear is None
        and kept is not None
        and label.normed is not None
        and axes
        and axes[-1] is not None
        and label.axes[-1] is axes[-1]
    ):
        kept.normed = label.normed
    if kept is not None:
        kept.made = label.made
        kept.biases = label.biases or _table(label)
        kept.vectors = _vectors(source)
        kept.side = label.side if out.shape == source.shape else ()
    if kept is not None and label.name and source.dim() == out.dim():
        kept.name = label.name


def _moved(images: Tensor, places: list[Tensor], depends: list[set[int]], shape: torch.Size) -> Tensor:
    """Return images whose entry i is the one at places[i]; what is repeated takes no memory before nor after."""
    images = once(images)
    varied = [d for d, size in enumerate(images.shape[1:]) if size > 1]
    still = set(range(len(shape))) - set().union(*(depends[d] for d in varied))
    chosen = [torch.zeros([1] * len(shape), dtype=torch.long)] * len(places)
    for d in varied:
        chosen[d] = places[d]
        for dim in still:
            chosen[d] = chosen[d].narrow(dim, 0, 1)
    entries: tuple[Any, ...] = (slice(None), *chosen)
    return images[entries].expand(-1, *shape)


def _vectors(tensor: Any) -> tuple[str, ...]:
    """Return the parameters that are summands of every vector of a tensor (along its last axis), or its own."""
    label: Label | None = getattr(tensor, KEY, None)
    if label is None:
        return ()
    return (label.name,) if label.name and tensor.numel() == tensor.shape[-1] else label.vectors


def _whole(tensor: Any) -> str:
    """Return the name of the table of whose rows the first ones stand in a tensor, one after another."""
    label: Label | None = getattr(tensor, KEY, None)
    if label is None or tensor.dim() < 2:
        return ""
    rows = tensor.shape[-2] * tensor.shape[-1]
    return label.name if label.name and tensor.shape[-2] > 1 and tensor.numel() == rows else label.whole


def _table(label: Label) -> tuple[tuple[str, Axis], ...]:
    """Return a parameter with two axes as a table of biases."""
    inner = label.axes[1] if len(label.axes) == 2 else None
    return ((label.name, inner),) if label.name and inner is not None else ()


def _entries(places: Tensor, varied: set[int], size: int) -> Tensor:
    """Return the images of the entries of an axis of which these are chosen; places vary along some dimensions."""
    shape = places.shape
    for dim in set(range(places.dim())) - varied:
        places = places.narrow(dim, 0, 1)
    return (places == torch.arange(size).view(-1, *[1] * places.dim())).double().expand(-1, *shape)


def _line(places: Tensor, dim: int) -> Tensor:
    """Return the entries along one dimension, at the beginning of all others."""
    return places.movedim(dim, 0).reshape(places.shape[dim], -1)[:, 0]


def _merged(
    source: Tensor, label: Label, group: list[int], places: list[Tensor], out_dims: set[int], out: Tensor
) -> Axis | None:
    """Return the axis of one dimension that several were flattened into, in whatever order."""
    if len(out_dims) != 1:
        return None
    (j,) = out_dims
    if out.shape[j] != prod(source.shape[e] for e in group):
        return None
    lines = {e: _line(places[e], j) for e in group}

    def run(e: int) -> int:  # how many entries pass before its number changes
        line = lines[e]
        changed = (line[1:] != line[:-1]).nonzero()
        return int(changed[0]) + 1 if len(changed) else len(line)

    order = sorted(group, key=run, reverse=True)
    expected = torch.arange(out.shape[j])
    for e in reversed(order):
        if not bool((lines[e] == expected % source.shape[e]).all()):
            return None
        expected = expected // source.shape[e]
    return flat([label.axes[e] or data(source.shape[e]) for e in order])


def _stretched(axis: Axis, places: Tensor, mine: set[int], out: Tensor) -> Axis | None:
    """Return the axis of entries that are repeated, each by itself or all in turn."""
    (j,) = mine
    line, n = _line(places, j), axis.size
    times, rest = divmod(out.shape[j], n)
    if rest or times < 2:
        return None
    here = torch.arange(out.shape[j])
    if bool((line == here // times).all()):
        return flat([axis, index(times)])
    if bool((line == here % n).all()):
        return flat([index(times), axis])
    return None


def _chosen(trace: Trace, call: Call) -> Any:
    """Entries that integers choose, where these name entries of an axis: experts that a router picked."""
    if call.name == "__getitem__":
        tensor, what = call.args
        label = trace.label(tensor)
        items = list(what) if isinstance(what, tuple) else [what]
        named = [(i, its) for i, item in enumerate(items) if (its := trace.label(item)) is not None]
        if not named:
            return NotImplemented
        if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items):
            return _masked(trace, call, tensor, items)
        if label is None:
            return _looked_up(trace, call)
        # Which dimension each item takes.
        dims, at = {}, 0
        count = sum(item is not None and item is not Ellipsis for item in items)
        for i, item in enumerate(items):
            if item is Ellipsis:
                at += tensor.dim() - count
            elif item is not None:
                dims[i] = at
                at += 1
        gone: list[int] = []
        within: list[Axis] = []
        for i, its in named:
            if its.indexes is None:
                lower(trace.axes(items[i]), PERMUTE, call.name)
            axis = trace.axes(tensor)[dims[i]]
            if axis is not None:
                if its.indexes is None:
                    fix(axis, "an index from outside")
                else:
                    unify(axis, among(its.indexes, axis), call.name)
                    restrict(axis, PERMUTE, call.name)
                    within.append(axis)
                gone.append(dims[i])
        # The same without those dimensions' axes: shapes and other dimensions as ever.
        bare = Label(
            [None if d in gone else a for d, a in enumerate(trace.axes(tensor))], within=(*label.within, *within)
        )
        setattr(tensor, KEY, bare)
        plain = [item.clone() if isinstance(item, Tensor) else item for item in items]
        stripped = Call("getitem", call.func, (tensor, tuple(plain)), {})
        if all(axis is None for axis in bare.axes):
            out = stripped.run()
        else:
            where = torch.arange(tensor.numel()).view(tensor.shape)
            out = stripped.run()
            moved(trace, tensor, out, where[tuple(plain)], stripped)
        setattr(tensor, KEY, label)
        got = trace.label(out)
        if got is None:
            got = Label([None] * out.dim())
            setattr(out, KEY, got)
        got.within = tuple(dict.fromkeys((*label.within, *within, *trace.within(*items))))
        return out
    if call.name in ("gather", "take_along_dim", "index_select"):
        tensor = call.get(0, "input")
        dim, chosen = (
            (call.get(1, "dim"), call.get(2, "index"))
            if call.name != "take_along_dim"
            else (call.get(2, "dim"), call.get(1, "indices"))
        )
        label, its = trace.label(tensor), trace.label(chosen)
        dim = dim % tensor.dim()
        axes = trace.axes(tensor)
        axis = axes[dim] if label else None
        if label is None and its is None:
            return NotImplemented
        if axis is not None:
            if its is None or its.indexes is None:
                fix(axis, "an index from outside")
            else:
                unify(axis, among(its.indexes, axis), call.name)
                restrict(axis, PERMUTE, call.name)
        out = call.run()
        if call.name == "index_select":
            left = [a if d != dim else None for d, a in enumerate(axes)] if label else [None] * out.dim()
            return trace.put(out, left, tensor, chosen)
        theirs = trace.axes(chosen)
        left = list[Axis | None]()
        for d in range(out.dim()):
            mine = axes[d] if d != dim and label else None
            other = theirs[d] if its else None
            if mine is not None and other is not None:
                unify(mine, other, call.name)
            elif mine is not None and chosen.shape[d] > 1 and not constant(chosen, d):
                fix(mine, "an index from outside")
                mine = None
            for one in (mine, other):
                if one is not None and other is not None:
                    restrict(one, PERMUTE, call.name)
            left.append(mine or other)
        return trace.put(out, left, tensor, chosen)
    return NotImplemented


def among(named: Axis, axis: Axis) -> Axis:
    """Return the axis that indices name, without the class for what is left out."""
    if named.cat and named.size > axis.size and named.parts[0].size == axis.size:
        return named.parts[0]
    return named


def _masked(trace: Trace, call: Call, tensor: Tensor, items: list[Any]) -> Any:
    """x[mask]: the mask's dimensions become one, in which nothing is named."""
    if len(items) != 1 or items[0].dtype != torch.bool:
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    mask = items[0]
    hold((*trace.axes(mask), *trace.axes(tensor)[: mask.dim()]), "a mask along it")
    out = call.run()
    return trace.put(out, [None, *trace.axes(tensor)[mask.dim() :]], tensor)


def _looked_up(trace: Trace, call: Call) -> Any:
    """Constants looked up by what names entries of an axis: the constants fix them, unless all are alike."""
    tensor, what = call.args
    items = list(what) if isinstance(what, tuple) else [what]
    out = call.run()
    axes: list[Axis | None] = [None] * out.dim()
    for item in items:
        label = trace.label(item)
        if label is not None:
            if label.indexes is not None and tensor.numel() > 1 and not bool((tensor == tensor.flatten()[0]).all()):
                fix(label.indexes, "constants by index")
            if out.shape == item.shape:
                axes = trace.axes(item)
            else:
                hold(trace.axes(item), "constants by index")
    return trace.put(out, axes, *items)


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
        images = torch.complex(real, imaginary).expand(-1, *out.shape)
        dims = tuple(dim for dim in label.dims if dim != last)
        setattr(out, KEY, Label(label.axes[:last], Linear(label.linear.axis, images), dims, label.within))
        return out
    if label.linear is None or not label.linear.images.is_complex():
        return trace.put(out, [*trace.axes(tensor), None], tensor)
    images = torch.view_as_real(once(label.linear.images)).expand(-1, *out.shape)
    setattr(
        out, KEY, Label([*label.axes, None], Linear(label.linear.axis, images), (*label.dims, last + 1), label.within)
    )
    return out


@rule("cat concat concatenate stack hstack vstack")
def together(trace: Trace, call: Call) -> Any:
    given = list(call.get(0, "tensors"))
    out = call.run()
    dim = call.get(1, "dim", call.kwargs.get("axis", 0)) if call.name not in ("hstack", "vstack") else 0
    dim = dim % out.dim()
    stacking = call.name == "stack"
    if call.name == "hstack":
        dim = 1 if out.dim() > 1 else 0
    given = [g for g in given if g.numel() or g.dim() == out.dim() - stacking]
    lined = [trace.label(g).linear if trace.label(g) else None for g in given]  # type: ignore[union-attr]
    if any(lined):
        maps = _as_linear(trace, given, out, dim, stacking)
        if maps is not None:
            return maps
    axes: list[Axis | None] = []
    every = [trace.axes(g, call.name) for g in given]
    if stacking:
        every = [[*each[:dim], None, *each[dim:]] for each in every]
    shown = [g.unsqueeze(dim) if stacking else g for g in given]
    for d in range(out.dim()):
        here = [each[d] for each in every]
        if d == dim:
            if all(axis is None for axis in here):
                alike = stacking and any(axis is not None for each in every for axis in each)
                axes.append(new(out.shape[d], frozenset()) if alike else None)
            else:
                axes.append(
                    joined([axis or data(g.shape[d]) for axis, g in zip(here, shown, strict=True) if g.shape[d]])
                )
        else:
            axes.append(_together(here, shown, d, call.name))
    label_of = next((trace.label(g) for g in given if trace.label(g) is not None), None)
    known: dict[str, Any] = {}
    if label_of is not None and label_of.indexes is not None:
        known["indexes"] = label_of.indexes
    if not stacking and dim == out.dim() - 2:
        known["side"] = tuple((g.shape[dim], _vectors(g)) for g in given)
    return trace.put(out, axes, *given, **known)


def _as_linear(trace: Trace, given: list[Tensor], out: Tensor, dim: int, stacking: bool) -> Any:
    """Put together several linear images of the same axis."""
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


def _together(here: Sequence[Axis | None], given: Sequence[Tensor], dim: int, why: str) -> Axis | None:
    """Return the axis of a dimension in which several tensors stand in line entry by entry."""
    first = next((axis for axis in here if axis is not None), None)
    if first is None:
        return None
    for axis, tensor in zip(here, given, strict=True):
        if axis is not None and axis is not first:
            unify(first, axis, why)
        elif axis is None and tensor.shape[dim] > 1:
            beside(first, tensor, dim, why)
        elif axis is None and bool(tensor.any()):
            restrict(first, ONES, why)
    return first


def constant(tensor: Tensor, dim: int) -> bool:
    return bool((tensor == tensor.narrow(dim, 0, 1)).all())


def beside(axis: Axis, tensor: Tensor, dim: int, why: str) -> None:
    """A constant stands beside an axis, in the same sum: the maps keep it where it is."""
    if not bool(tensor.any()):
        return
    if constant(tensor, dim):
        restrict(axis, ONES, why)
    else:
        fix(axis, f"a constant ({why})")


# Sums and products, entry by entry.


def _spread(tensor: Any, axes: list[Axis | None], dims: int) -> list[Axis | None]:
    return [None] * (dims - len(axes)) + axes


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
    view = _in_place_on_view(trace, call)
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
    linear = _sum_of_maps(trace, a, b, out, call)
    if linear is not None:
        return linear
    bias = _bias_of_norm(trace, a, b, out)
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
        known |= _rows(trace, la.rows, lb.rows)
    if biases := tuple(bias for label in (la, lb) if label is not None for bias in label.biases):
        known["biases"] = biases
    if "sub" not in call.name:
        known |= _placed(trace, a, b, out)
    for one, other in ((la, lb), (lb, la)):
        if one is not None and other is not None and len(one.by) == 1 and other.name and "sub" not in call.name:
            trace.biases[other.name] = one.by[0]
    if centred:
        out._centred = True
    return trace.put(out, axes, a, b, **known)


def _placed(trace: Trace, a: Any, b: Any, out: Tensor) -> dict[str, Any]:
    """Note a table of places whose rows are added to what stands there, and return what is a summand of all vectors."""
    for one, other in ((a, b), (b, a)):
        label, table = trace.label(one), _whole(other)
        if table and label is not None and one.dim() > 1 and out.shape == one.shape:
            trace.placed[table] = label.side or ((one.shape[-2], _vectors(one)),)
    vectors = (*_vectors(a), *_vectors(b)) if isinstance(a, Tensor) and isinstance(b, Tensor) else ()
    return {"vectors": vectors} if vectors and out.dim() > 1 else {}


def _inherit(trace: Trace, out: Tensor, source: Tensor, label: Label) -> Tensor:
    if out is not source:
        setattr(out, KEY, replace(label, axes=list(label.axes), name="", made=True))
    return out


def _in_place_on_view(trace: Trace, call: Call) -> bool:
    """A change through a view of another tensor is not seen there: what enters it stays."""
    if not call.name.endswith("_") or call.name.startswith("__"):
        return False
    target = call.get(0, "input")
    if isinstance(target, Tensor) and target._is_view() and trace.label(target) is None:
        for tensor in tensors((call.args[1:], call.kwargs)):
            hold(trace.axes(tensor), f"{call.name} through a view")
        return True
    return False


def _sum_of_maps(trace: Trace, a: Tensor, b: Tensor, out: Tensor, call: Call) -> Tensor | None:
    """Add two linear images of the same axis, or take their difference."""
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


def _bias_of_norm(trace: Trace, a: Any, b: Any, out: Tensor) -> Tensor | None:
    for one, other in ((a, b), (b, a)):
        x, y = trace.label(one), trace.label(other)
        if (x is not None and y is not None and x.normed is not None and y.name and other.dim() == 1
                and x.normed.target is not None and not x.normed.bias and y.axes[0] is not None):  # fmt: skip
            x.normed.bias = y.name
            unify(y.axes[0], x.normed.target, "the bias of a norm")
            out_label = Label(list(x.axes), within=x.within, normed=x.normed)
            setattr(out, KEY, out_label)
            return out
    return None


def entrywise(
    trace: Trace, a: Any, b: Any, x: list[Axis | None], y: list[Axis | None], out: Tensor, why: str, sums: bool = True
) -> list[Axis | None]:
    """Return the axes of what combines two tensors entry by entry as a sum does."""
    x, y = _spread(a, x, out.dim()), _spread(b, y, out.dim())
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
            elif sums:
                beside(axis, tensor, d - out.dim(), why)
            elif not constant(tensor, d - out.dim()):
                fix(axis, f"a constant ({why})")
            axes.append(axis)
    return axes


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
    if _in_place_on_view(trace, call):
        return call.run()
    if a is b and la is not None and not divides:
        out = call.run()
        return _squares(trace, a, out)
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
    normed = _normed(trace, a, b, out, divides)
    if normed is not None:
        return normed
    weighted = None if divides else _weight_of_norm(trace, a, b, out)
    if weighted is not None:
        return weighted
    gained = None if divides else _gain(trace, a, b, out)
    if gained is not None:
        return gained
    for one, other in ((a, b), (b, a)):
        diagonal = _diagonal(trace, one, other, out, divides and other is b) if not (divides and other is a) else None
        if diagonal is not None:
            return diagonal
    x, y = _spread(a, trace.axes(a, call.name), out.dim()), _spread(b, trace.axes(b, call.name), out.dim())
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


def _diagonal(trace: Trace, a: Tensor, b: Tensor, out: Tensor, divides: bool) -> Tensor | None:
    """Multiply an axis of `a`, or a map of one, by constants that differ along it: rotations by position."""
    label = trace.label(a)
    if label is None or trace.label(b) is not None or (out.shape != a.shape and label.linear is None):
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
    for d in mine if linear is not None else mine[:-1]:  # places, told apart
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


def _squares(trace: Trace, source: Tensor, out: Tensor) -> Tensor:
    axes = trace.axes(source)
    last = axes[-1] if axes else None
    if last is None:
        lower(axes, PERMUTE, "square")
        return trace.put(out, axes, source)  # type: ignore[no-any-return]
    lower(axes[:-1], PERMUTE, "square")
    setattr(out, KEY, Label(list(axes), within=trace.within(source), square=last))
    setattr(out, "_centred", getattr(source, "_centred", False))  # noqa: B010
    return out


def _normed(trace: Trace, a: Tensor, b: Tensor, out: Tensor, divides: bool) -> Tensor | None:
    """A vector times one over its own length."""
    for x, scale in ((a, b), (b, a)):
        label, length = trace.label(x), trace.label(scale)
        if length is None or length.length is None or (divides and scale is a):
            continue
        axis, centred = length.length
        mine = trace.axes(x, "norm") if label is not None else []
        if not mine or mine[-1] is None or mine[-1].top != axis.top:
            continue
        others = entrywise(trace, x, scale, mine, trace.axes(scale), out, "norm", sums=False)
        kind = "layernorm" if centred else "rmsnorm"
        trace.mixed(others[:-1], [mine[-1]])
        return trace.put(out, others, x, scale, normed=Normed(kind, mine[-1]))  # type: ignore[no-any-return]
    return None


def _weight_of_norm(trace: Trace, a: Tensor, b: Tensor, out: Tensor) -> Tensor | None:
    """The weight of a norm multiplies what the norm puts out."""
    for x, weight in ((a, b), (b, a)):
        label, its = trace.label(x), trace.label(weight)
        if label is None or its is None or not its.name or label.normed is None or weight.dim() != 1:
            continue
        if label.normed.target is not None or its.axes[0] is None or label.axes[-1] is None:
            continue
        kind = "rmsnorm1p" if its.plus and label.normed.kind == "rmsnorm" else label.normed.kind
        if its.plus and kind != "rmsnorm1p":
            continue
        target = norm(trace, kind, label.axes[-1], its.name, its.axes[0], "")
        setattr(out, KEY, Label([*label.axes[:-1], target.target], within=trace.within(x), normed=target))
        trace.met(trace.label(out))  # type: ignore[arg-type]
        return out
    return None


def _gain(trace: Trace, a: Tensor, b: Tensor, out: Tensor) -> Tensor | None:
    """A vector of parameters multiplies what a matrix has made, channel by channel (LayerScale)."""
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


def norm(trace: Trace, kind: str, source: Axis, weight: str, along: Axis, bias: str) -> Normed:
    """Note a norm with a weight. One module that is used twice has one source and one target."""
    trace.normed.append(weight)
    for known in trace.norms:
        if known.weight == weight:
            unify(known.source, source, "a norm used twice")
            return known
    target = new(source.size)
    made = Normed(kind, source, target, weight, bias)
    unify(along, target, "norm")
    trace.norms.append(made)
    return made


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
    made = norm(trace, kind, last, label.name, label.axes[0], its.name if its else "")
    first = getattr(x, "_normed_by", made)
    setattr(x, "_normed_by", first)  # noqa: B010
    if first is not made:
        trace.together[made.weight] = first.weight
    if its is not None and its.axes[0] is not None and made.target is not None:
        unify(its.axes[0], made.target, "norm")
    return trace.put(out, [*axes[:-1], made.target], x, normed=made)


# Pointwise functions.


def _point(trace: Trace, call: Call, moves: frozenset[str]) -> Any:
    given = [tensor for tensor in tensors((call.args, call.kwargs)) if trace.label(tensor) is not None]
    out = call.run()
    first = given[0]
    axes = trace.axes(first, call.name)
    lower(axes, moves, call.name)
    for other in given[1:]:
        theirs = trace.axes(other, call.name)
        lower(theirs, moves, call.name)
        if isinstance(out, Tensor):
            axes = entrywise(trace, first, other, axes, theirs, out, call.name, sums=False)
    rest = [t for t in tensors((call.args, call.kwargs)) if trace.label(t) is None]
    for other in rest:
        if isinstance(out, Tensor):
            axes = entrywise(trace, first, other, axes, [None] * other.dim(), out, call.name, sums=False)
    known: dict[str, Any] = {}
    label = trace.label(first)
    if label is not None and label.length is not None:
        known["length"] = label.length
    if label is not None and label.indexes is not None:
        alike = isinstance(out, Tensor) and out.dtype == torch.bool and (bool(out.all()) or not bool(out.any()))
        if not alike and len(given) == 1:
            fix(label.indexes, call.name)
    return trace.put(out, axes, *given, **known)


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


@rule("pow square __pow__")
def power(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    exponent = 2 if call.name == "square" else call.get(1, "exponent")
    label = trace.label(source)
    if label is None:
        return pointwise(trace, call)
    out = call.run()
    if exponent == 2 and label.length is None:
        return _squares(trace, source, out)
    axes = trace.axes(source, call.name)
    lower(axes, PERMUTE, call.name)
    known = {"length": label.length} if label.length is not None else {}
    return trace.put(out, axes, source, **known)


@rule("softmax log_softmax _softmax")
def softmax(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    label = trace.label(source)
    axes = trace.axes(source, "softmax")
    lower(axes, PERMUTE, "softmax")
    dim = call.get(1, "dim", -1)
    out = call.run()
    place = (dim if dim is not None else -1) % source.dim()
    if label is not None and place == source.dim() - 1:
        trace.softmaxed |= set(label.by)
    if label is not None:
        beside = [axis.top for d, axis in enumerate(axes) if axis is not None and d != place]
        trace.softmaxed |= {name for name, axis in label.biases if axis.top in beside}
    trace.mixed([a for d, a in enumerate(axes) if d != place], [axes[place]])
    trace.put(out, axes, source)
    return out


@rule("glu")
def glu(trace: Trace, call: Call) -> Any:
    source, dim = call.get(0, "input"), call.get(1, "dim", -1)
    first, second = RULES["chunk"](trace, Call("chunk", torch.Tensor.chunk, (source, 2, dim), {}))
    gate = RULES["sigmoid"](trace, Call("sigmoid", torch.sigmoid, (second,), {}))
    return RULES["mul"](trace, Call("mul", torch.mul, (first, gate), {}))


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
    if _in_place_on_view(trace, call):
        return call.run()
    return _either(trace, call, call.get(1, "mask"), call.get(2, "value"), call.get(0, "input"))


@rule("masked_scatter masked_scatter_")
def filled_in(trace: Trace, call: Call) -> Any:
    """Vectors put in the places of others, whole: images among tokens."""
    x, mask, source = call.get(0, "input"), call.get(1, "mask"), call.get(2, "source")
    shown = mask.expand(x.shape)
    whole = bool((shown == shown[..., :1]).all()) and source.shape[-1] == x.shape[-1]
    if not whole or trace.label(mask) is not None or _in_place_on_view(trace, call):
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    out = call.run()
    mine, theirs = trace.axes(x, call.name), trace.axes(source, call.name)
    hold(mine[:-1], "vectors in other places")
    hold(theirs[:-1], "vectors in other places")
    last = entrywise(trace, x.flatten(0, -2), source.flatten(0, -2), [None, mine[-1]], [None, theirs[-1]],
                     out.flatten(0, -2), call.name)  # fmt: skip
    return trace.put(out, [*[None] * (out.dim() - 1), last[-1]], x, source)


def _either(trace: Trace, call: Call, condition: Any, a: Any, b: Any) -> Any:
    out = call.run()
    axes: list[Axis | None] = [None] * out.dim()
    so_far: Tensor | None = None
    for one in (a, b):
        if not isinstance(one, Tensor) or (trace.label(one) is None and one.numel() == 1):
            continue
        if so_far is None:
            axes, so_far = (
                _spread(one, trace.axes(one, call.name), out.dim()),
                one.expand(out.shape) if one.dim() else one,
            )
        else:
            axes = entrywise(trace, so_far, one, axes, trace.axes(one, call.name), out, call.name)
    for one in (a, b):  # one number everywhere
        number = not isinstance(one, Tensor) or (one.numel() == 1 and trace.label(one) is None)
        if number and float(one) != 0:
            lower(axes, ONES, call.name)
    choosing = _spread(condition, trace.axes(condition, call.name), out.dim())
    lower(choosing, PERMUTE, call.name)
    axes = entrywise(trace, out, condition, axes, choosing, out, call.name, sums=False)
    known: dict[str, Any] = {}
    named_axes = [label.indexes for one in (a, b) if (label := trace.label(one)) and label.indexes is not None]
    if named_axes:
        known["indexes"] = named_axes[0]
    return trace.put(out, axes, a, b, condition, **known)


# Contractions: what is summed over is dual, what stays is an index.


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
                    elif other is None and tensor.shape[dim] > 1 and not constant(tensor, dim):
                        fix(axis, f"a constant ({why})")
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
    for axis in axes:
        if axis is not None:
            for leaf in axis.leaves:
                leaf.atom.written = True
    return axes


@rule("linear")
def linear(trace: Trace, call: Call) -> Any:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    out = call.run()
    outer = string.ascii_lowercase[: x.dim() - 1]
    axes = contract(trace, f"{outer}X,YX->{outer}Y", [x, weight], out, "linear")
    if isinstance(bias, Tensor):
        axes = entrywise(trace, out, bias, axes, trace.axes(bias), out, "linear")
    by = tuple(label.name for label in map(trace.label, (weight, bias)) if label is not None and label.name)
    by = by if (its := trace.label(weight)) is not None and its.name else ()
    return trace.put(out, axes, x, weight, by=by, vectors=_vectors(bias))


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
        # A batch of one is the same for all.
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
    made = torch.matmul(a, b)
    matmul(trace, Call("matmul", lambda *_: made, (a, b), {}))
    out = call.run()
    axes = (
        entrywise(trace, made, base, trace.axes(made), trace.axes(base), out, call.name)
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
        return trace._unruled(call.name, lambda *_: out, call.args, call.kwargs)
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
    if written is not None:
        for leaf in written.leaves:
            leaf.atom.written = True
    axes: list[Axis | None] = [None] * out.dim()
    axes[:here] = rest[:here]
    axes[here] = written
    if isinstance(bias, Tensor) and (its_bias := trace.axes(bias)[0]) is not None:
        if written is None:
            fix(its_bias, "conv")
        else:
            unify(written, its_bias, "conv")
    made = trace.put(out, axes, x, weight)
    if (label := trace.label(made)) is not None:
        label.vectors = _vectors(bias)
    return made


@rule("scaled_dot_product_attention")
def attention(trace: Trace, call: Call) -> Any:
    q, k, v = (call.get(i, word) for i, word in enumerate(("query", "key", "value")))
    mask = call.get(3, "attn_mask")
    out = call.run()
    outer = string.ascii_lowercase[: q.dim() - 2]
    logits = q.new_empty((*q.shape[:-1], k.shape[-2]))
    if q.shape[:-2] != k.shape[:-2]:
        return trace._unruled(call.name, lambda *_, **__: out, call.args, call.kwargs)
    scores = contract(trace, f"{outer}SX,{outer}TX->{outer}ST", [q, k], logits, "attention")
    if isinstance(mask, Tensor):
        scores = entrywise(trace, logits, mask, scores, trace.axes(mask), logits, "attention mask", sums=False)
    trace.put(logits, scores, q, k)
    lower(scores, PERMUTE, "softmax")
    axes = contract(trace, f"{outer}ST,{outer}TX->{outer}SX", [logits, v], out, "attention")
    if axes[-1] is not None:
        trace.passes.append((axes[-1], "passes"))
    return trace.put(out, axes, q, k, v)


# Sums, means, largest entries.


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
    order = call.get(1, "p" if call.name == "norm" else "ord", 2) if named else 2
    axes = trace.axes(source, call.name)
    made = call.run()
    out = made[0] if isinstance(made, tuple) else made
    gone = [axes[d] for d in dims]
    single = len(dims) == 1 and gone[0] is not None and order in (2, 2.0, None, "fro")
    for axis in gone:
        if axis is not None:
            restrict(
                axis,
                MOVES["orthogonal"]
                if named and order in (2, 2.0, None, "fro")
                else MOVES["ones"]
                if not named
                else PERMUTE,
                call.name,
            )
    left = _left(axes, dims, out)
    lower(left, PERMUTE, call.name)
    trace.mixed(left, gone)
    trace.put(out, left, source, **({"length": (gone[0], not named)} if single and dims[0] == source.dim() - 1 else {}))
    if isinstance(made, tuple):
        trace.put(made[1], left, source)
        if single:
            made[1]._mean_of = gone[0]
            setattr(made[1], KEY, trace.label(made[1]) or Label([None] * made[1].dim()))
    return made


@rule("normalize")
def unit(trace: Trace, call: Call) -> Any:
    source, order, dim = call.get(0, "input"), call.get(1, "p", 2), call.get(2, "dim", 1)
    out = call.run()
    axes = trace.axes(source, call.name)
    place = dim % source.dim()
    for d, axis in enumerate(axes):
        if axis is not None:
            restrict(axis, MOVES["orthogonal"] if d == place and order in (2, 2.0) else PERMUTE, call.name)
    trace.mixed([a for d, a in enumerate(axes) if d != place], [axes[place]])
    known = {"normed": Normed("rmsnorm", axes[place])} if place == source.dim() - 1 and axes[place] is not None else {}
    return trace.put(out, axes, source, **known)


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
        if len(dims) > 1 and any(axes[d] is not None for d in dims):
            for d in dims:
                if axes[d] is not None:
                    fix(axes[d], call.name)  # type: ignore[arg-type]
        trace.put(places, left, source, **({"indexes": which} if which is not None else {}))
    return made


@rule("topk sort argsort")
def ranked(trace: Trace, call: Call) -> Any:
    source = call.get(0, "input")
    place = call.get(2 if call.name == "topk" else 1, "dim", -1) % source.dim()
    axes = trace.axes(source, call.name)
    lower(axes, PERMUTE, call.name)
    made = call.run()
    left = [None if d == place else a for d, a in enumerate(axes)]
    trace.mixed(left, [axes[place]])
    values, places = (None, made) if call.name == "argsort" else made
    if values is not None:
        label = trace.label(source)
        by = (
            label.by if label is not None and place == source.dim() - 1 else ()
        )  # one number more in all chooses the same
        trace.put(values, left, source, **({"by": by} if by else {}))
    trace.put(places, left, source, **({"indexes": axes[place]} if axes[place] is not None else {}))
    return made


@rule("one_hot")
def one_hot(trace: Trace, call: Call) -> Any:
    source = call.get(0, "tensor", call.kwargs.get("input"))
    label = trace.label(source)
    out = call.run()
    assert label is not None
    axis = label.indexes
    if axis is not None and axis.size < out.shape[-1]:  # one class more, for what is left out
        axis = joined([axis, new(out.shape[-1] - axis.size, frozenset())])
    elif axis is not None and axis.size > out.shape[-1]:
        fix(axis, call.name)
        axis = None
    return trace.put(out, [*trace.axes(source), axis], source)


@rule("nonzero argwhere")
def named(trace: Trace, call: Call) -> Any:
    """Places of what is not zero, one column per dimension."""
    source = call.get(0, "input", call.kwargs.get("condition"))
    axes = trace.axes(source, call.name)
    made = call.run()
    lower(axes, PERMUTE, call.name)
    if isinstance(made, tuple):
        for one, axis in zip(made, axes, strict=True):
            trace.put(one, [None], source, **({"indexes": axis} if axis is not None else {}))
        return made
    if source.dim() == 1 and axes[0] is not None:
        return trace.put(made, [None, None], source, indexes=axes[0])
    hold(axes, call.name)
    return made


@rule("embedding")
def embedding(trace: Trace, call: Call) -> Any:
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    out = call.run()
    label = trace.label(ids)
    table, inner = trace.axes(weight)
    if table is not None:
        if label is not None and label.indexes is not None:
            unify(table, among(label.indexes, table), "embedding")
            restrict(table, PERMUTE, "embedding")
        else:
            fix(table, "token ids")
    if inner is not None:
        for leaf in inner.leaves:
            leaf.atom.written = True
    its = trace.label(weight)
    known = {**_rows(trace, (its.name,)), "biases": _table(its)} if its is not None else _rows(trace)
    if its is not None and ids.dim() and bool((ids == torch.arange(ids.shape[-1])).all()):
        known["whole"] = its.name
    return trace.put(out, [*trace.axes(ids), inner], weight, ids, **known)


def _rows(trace: Trace, *tables: tuple[str, ...]) -> dict[str, Any]:
    """Note that rows of tables were looked up, or summed."""
    rows = tuple(sorted(name for each in tables for name in each))
    trace.rows[rows] += 1
    return {"rows": rows}


@rule(
    "scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy_ index_fill_ put_ index_put_ "
    "index_put scatter_reduce_"
)
def scattered(trace: Trace, call: Call) -> Any:
    target, dim, places = call.get(0, "input"), call.get(1, "dim"), call.get(2, "index")
    value = call.get(3, "src", call.kwargs.get("source", call.kwargs.get("value")))
    if "put" in call.name or "fill" in call.name:
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    empty = trace.label(target) is None and not bool(target.any())
    mine = trace.axes(target, call.name)
    if trace.label(target) is None and not empty and trace.label(value) is None and trace.label(places) is None:
        return call.run()
    if target._is_view() and trace.label(target) is None and call.name.endswith("_"):
        base = target._base
        if base is None or base.numel() != target.numel():
            return trace._unruled(call.name, call.func, call.args, call.kwargs)
    out = call.run()
    dim = dim % target.dim()
    label = trace.label(places)
    theirs = trace.axes(value, call.name) if isinstance(value, Tensor) else [None] * target.dim()
    spots = trace.axes(places, call.name) if places.dim() == target.dim() else [None] * target.dim()
    axes: list[Axis | None] = []
    for d in range(target.dim()):
        if d == dim:
            axis = mine[d]
            named_by = label.indexes if label is not None else None
            if named_by is not None and axis is not None:
                unify(axis, named_by, call.name)
            elif named_by is not None and not empty:
                fix(named_by, call.name)
                named_by = None
            elif axis is not None and named_by is None:
                fix(axis, "an index from outside")
                axis = None
            axis = axis if axis is not None else named_by
            if axis is not None:
                restrict(axis, PERMUTE, call.name)
            axes.append(axis)
            continue
        here = [a for a in (mine[d], theirs[d], spots[d]) if a is not None]
        for other in here[1:]:
            unify(here[0], other, call.name)
        if here and not empty and mine[d] is None and target.shape[d] > 1:
            beside(here[0], target, d, call.name)
        axes.append(here[0] if here else None)
        lower([spots[d]], PERMUTE, call.name)
    trace.put(out, axes)
    return out


@rule("__setitem__ copy_ fill_")
def stored(trace: Trace, call: Call) -> Any:
    target = call.args[0]
    value = call.args[-1]
    if call.name == "fill_" or (call.name == "copy_" and trace.label(target) is None and target._is_view()):
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    empty = trace.label(target) is None and not bool(target.any())
    mine = list(trace.axes(target, call.name))
    where = torch.arange(target.numel()).view(target.shape)
    if call.name == "copy_":
        slot = where
    else:
        what = call.args[1]
        if any(trace.label(one) is not None for one in tensors(what)):
            return trace._unruled(call.name, call.func, call.args, call.kwargs)
        slot = where[what]
    out = call.run()
    if not isinstance(value, Tensor) or (trace.label(value) is None and value.numel() == 1):
        if float(value) != 0:
            hold(mine, "a number stored along it")
        return out
    if value.dim() > slot.dim() or any(
        a not in (1, b) for a, b in zip(value.shape[::-1], slot.shape[::-1], strict=False)
    ):
        return trace._unruled(call.name, lambda *_, **__: out, call.args, call.kwargs)
    theirs = _spread(value, trace.axes(value, call.name), slot.dim())
    places: list[Tensor] = []
    rest = slot
    for size in reversed(target.shape):
        places.insert(0, rest % size)
        rest = rest // size
    for j in range(slot.dim()):
        if slot.shape[j] == 1:
            continue
        dims = [d for d in range(target.dim()) if bool((places[d] != places[d].narrow(j, 0, 1)).any())]
        axis = theirs[j]
        labelled = [d for d in dims if mine[d] is not None]
        if axis is None and not labelled:
            continue
        full = len(dims) == 1 and slot.shape[j] == target.shape[dims[0]] and bool(
            (_line(places[dims[0]], j) == torch.arange(target.shape[dims[0]])).all())  # fmt: skip
        if not full:
            for one in [axis, *(mine[d] for d in labelled)]:
                if one is not None:
                    fix(one, "stored in part")
            continue
        d = dims[0]
        if axis is not None and mine[d] is not None:
            unify(axis, mine[d], call.name)  # type: ignore[arg-type]
        elif axis is not None:
            if not empty:
                beside(axis, target, d, call.name)
            mine[d] = axis
        elif mine[d] is not None:
            beside(mine[d], value.expand(slot.shape), j, call.name)  # type: ignore[arg-type]
    trace.put(target, mine, target, value)
    return out


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


@rule(
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate upsample pad cumsum triu tril "
    "max_pool1d max_pool2d adaptive_max_pool2d max_pool2d_with_indices _pad constant_pad_nd grid_sample fold "
    "logcumsumexp cumprod scaled_modified_bessel fft rfft irfft"
)
def along(trace: Trace, call: Call) -> Any:
    """What works along time or pixels: channels stay as they are, as long as it is linear."""
    source = call.get(0, "input")
    if trace.label(source) is None:
        return trace._unruled(call.name, call.func, call.args, call.kwargs)
    axes = trace.axes(source, call.name)
    out = call.run()
    if call.name in ("cumsum", "cumprod", "logcumsumexp"):
        touched = [call.get(1, "dim") % source.dim()]
    elif "pad" in call.name:
        amounts = list(call.get(1, "pad"))
        touched = [source.dim() - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    elif call.name in ("triu", "tril"):
        touched = [source.dim() - 2, source.dim() - 1]
    elif "2d" in call.name or call.name in ("interpolate", "upsample", "grid_sample"):
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
        return trace._unruled(call.name, lambda *_, **__: out, call.args, call.kwargs)
    return trace.put(out, [None if d in touched else a for d, a in enumerate(axes)], source)


SILENT = frozenset(name for name, function in RULES.items() if function in (same, blank))
