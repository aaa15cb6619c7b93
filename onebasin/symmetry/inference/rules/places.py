# SPDX-License-Identifier: Apache-2.0
"""Operations that only move numbers: the axes of the result follow from the place of each number."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..atoms import Axis, data, fix, flat, hold, index
from ..linear import Linear, once, settle
from ..selecting import pick
from ..trace import Call, Label, Trace
from .summands import as_biases, vectors_of


def moved(trace: Trace, source: Tensor, out: Tensor, where: Tensor, call: Call, numbers: Tensor | None = None) -> None:
    """Label `out`, whose entry i is entry where[i] of `source`.

    numbers: of all entries in their order, of which `where` may be a view.
    """
    label = trace.label(source)
    assert label is not None
    why = call.name
    if label.square is not None or label.plus:
        trace.axes(source, why)
    if out.numel() == 0:
        return
    places, depends = located(where, source.shape, numbers)
    axes: list[Axis | None] = [None] * out.dim()
    linear: Linear | None = None
    dims: tuple[int, ...] = ()
    passed = set[int]()  # dimensions of `source`
    if label.linear is not None:
        mine = frozenset[int]().union(*(depends[d] for d in label.dims))
        beside = {d: axis for d, axis in enumerate(label.axes) if d not in label.dims and axis is not None}
        shared = {d: axis for d, axis in beside.items() if depends[d] & mine}
        if any(leaf.moves for axis in shared.values() for leaf in axis.leaves):
            trace.axes(source, why)
        else:  # what nothing moves is as data
            images = _moved(label.linear.images, places, depends, out.shape)
            single = {d for d in label.dims if out.dim() == source.dim() and out.shape[d] == 1}  # one entry, as a slice
            linear, dims = Linear(label.linear.axis, images), tuple(sorted(mine | single))
            passed = {*label.dims, *shared}
    done, grouped = set[int](), set[int]()  # dimensions of `out`, and of `source`
    for d, axis in enumerate(label.axes):
        if axis is None or d in grouped or d in passed:
            continue
        mine = depends[d]
        others = [e for e in range(source.dim()) if e != d and depends[e] & mine and source.shape[e] > 1]
        whole = len(mine) == 1 and out.shape[next(iter(mine))] == axis.size
        if not mine and axis.size > 1 and linear is None:  # one entry, which matters only if it is used
            linear = Linear(axis, _entries(places[d], mine, axis.size))
            dims = (d,) if out.dim() == source.dim() and out.shape[d] == 1 else ()
        elif not mine:
            if axis.size > 1:
                found = pick(axis, int(places[d].flatten()[0]), [], why)
                if found is None:
                    fix(axis, why)
        elif not others and whole and bool((line_of(places[d], next(iter(mine))) == torch.arange(axis.size)).all()):
            axes[next(iter(mine))] = axis
        elif others:
            group = sorted({d, *others})
            out_dims = set().union(*(depends[e] for e in group))
            merged = None if out_dims & done else _merged(source, label, group, places, out_dims, out)
            alone = merged is None and len(mine) == 1 and all(label.axes[e] is None for e in others)
            if alone and not mine & done and (several := _several(places[d], next(iter(mine)), axis)) is not None:
                axes[next(iter(mine))] = several
                done |= mine
                continue
            grouped |= set(group)
            done |= out_dims
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
                trace_axes = settle(chosen, sorted(mine), out, why)
                for j, one in zip(sorted(mine), trace_axes, strict=True):
                    axes[j] = one
            else:
                linear, dims = chosen, tuple(sorted(mine))
    labelled = linear is not None or any(axis is not None for axis in label.axes)
    if labelled:
        for j in range(out.dim()):  # repeated entries are only distinguished by their place
            if out.shape[j] > 1 and axes[j] is None and j not in dims and not any(j in mine for mine in depends):
                axes[j] = index(out.shape[j])
    maps = {} if linear is None else {"linear": linear, "dims": dims}
    trace.put(out, axes, source, indexes=label.indexes, length=label.length, **maps)
    kept = trace.label(out)
    if kept is not None:
        if linear is None and axes and axes[-1] is not None and label.axes[-1] is axes[-1]:
            kept.normed = label.normed
            kept.rows = label.rows if out.numel() >= source.numel() else ()
        kept.made = label.made
        kept.biases = label.biases or as_biases(label)
        kept.vectors = vectors_of(source)
        kept.side = label.side if out.shape == source.shape else ()
    if kept is not None and label.name and source.dim() == out.dim():
        kept.name = label.name


def located(
    where: Tensor, shape: torch.Size, numbers: Tensor | None = None
) -> tuple[list[Tensor], list[frozenset[int]]]:
    """Return the coordinates in a tensor of the entries with these numbers, and the dimensions that each depends on.

    Loops and layers repeat the same views of the numbers of all entries: these are looked up.
    """
    if numbers is None or where.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return _located(where, shape)
    return _of_view(where.shape, where.stride(), int(where.storage_offset()), shape)


@lru_cache(maxsize=4096)
def _of_view(
    size: torch.Size, stride: tuple[int, ...], start: int, shape: torch.Size
) -> tuple[list[Tensor], list[frozenset[int]]]:
    return _located(torch.arange(prod(shape)).as_strided(size, stride, start), shape)


def _located(where: Tensor, shape: torch.Size) -> tuple[list[Tensor], list[frozenset[int]]]:
    places = coordinates(where, shape)
    depends = [
        frozenset(j for j in range(where.dim()) if each.shape[j] > 1 and bool((each != each.narrow(j, 0, 1)).any()))
        for each in (once(each, 0) for each in places)
    ]
    return places, depends


def _moved(images: Tensor, places: list[Tensor], depends: Sequence[Set[int]], shape: torch.Size) -> Tensor:
    """Return images whose entry i is the one at places[i]; expanded dimensions remain expanded."""
    images = once(images)
    varied = [d for d, size in enumerate(images.shape[1:]) if size > 1]
    along = [sorted(depends[d]) for d in varied]
    order = [j for some in along for j in some]
    if len(order) == len(set(order)):  # no copy of what only changes its place
        for d, some in zip(varied, along, strict=True):
            line = _at_the_beginning(places[d], set(range(len(shape))) - set(some)).flatten()
            if not torch.equal(line, torch.arange(images.shape[1 + d])):
                images = images.index_select(1 + d, line)
        images = images.reshape(-1, *(shape[j] for j in order)).permute(0, *(1 + order.index(j) for j in sorted(order)))
        here: tuple[Any, ...] = (slice(None), *(slice(None) if j in order else None for j in range(len(shape))))
        return images[here].expand(-1, *shape)
    still = set(range(len(shape))) - set(order)
    chosen = [torch.zeros([1] * len(shape), dtype=torch.long)] * len(places)
    for d in varied:
        chosen[d] = _at_the_beginning(places[d], still)
    entries: tuple[Any, ...] = (slice(None), *chosen)
    return images[entries].expand(-1, *shape)


def _at_the_beginning(places: Tensor, dims: set[int]) -> Tensor:
    """Return the entries at the beginning of some dimensions, which remain as dimensions of size 1."""
    for dim in dims:
        places = places.narrow(dim, 0, 1)
    return places


def _entries(places: Tensor, varied: Set[int], size: int) -> Tensor:
    """Return the images of a choice of entries of an axis; places vary along some dimensions."""
    shape = places.shape
    places = _at_the_beginning(places, set(range(places.dim())) - varied)
    return (places == torch.arange(size).view(-1, *[1] * places.dim())).double().expand(-1, *shape)


def coordinates(where: Tensor, shape: torch.Size) -> list[Tensor]:
    """Return the coordinates of the entries with these numbers in a tensor, one for each dimension. Expanded dimensions
    remain expanded, and those along which a coordinate cannot change are."""
    entries = once(where, 0)
    steps, block, places = _steps(entries), 1, list[Tensor]()
    for size in reversed(shape):
        places.insert(0, (_varying(entries, steps, block, size) // block % size).expand(where.shape))
        block *= size
    return places


def _steps(where: Tensor) -> list[int] | None:
    """Return the difference of neighbours along every dimension, if it is the same for all of them: in every view."""
    if not where.numel():
        return None
    first = where[(0,) * where.dim()]
    lines = [where[(0,) * dim + (slice(None),) + (0,) * (where.dim() - dim - 1)] for dim in range(where.dim())]
    steps = [int(line[1] - line[0]) if len(line) > 1 else 0 for line in lines]
    affine = first
    for dim, step in enumerate(steps):
        if step:
            affine = affine + (step * torch.arange(where.shape[dim])).view(-1, *[1] * (where.dim() - dim - 1))
    return steps if torch.equal(where, affine.expand(where.shape)) else None


def _varying(where: Tensor, steps: list[int] | None, block: int, size: int) -> Tensor:
    """Return the numbers at the beginning of all dimensions along which number // block % size stays the same."""
    if steps is None:
        return where
    high = [dim for dim, step in enumerate(steps) if step % (block * size) == 0]
    low = [dim for dim, step in enumerate(steps) if 0 < step < block]
    within = int(where[(0,) * where.dim()]) % block + sum(steps[dim] * (where.shape[dim] - 1) for dim in low)
    carries = within >= block or any(step % block for dim, step in enumerate(steps) if dim not in low)
    return _at_the_beginning(where, set(high if carries else [*high, *low]))


def line_of(places: Tensor, dim: int) -> Tensor:
    """Return the entries along one dimension, at the beginning of all others."""
    return places.movedim(dim, 0).reshape(places.shape[dim], -1)[:, 0]


def _several(places: Tensor, dim: int, axis: Axis) -> Axis | None:
    """Return the axis of several vectors in one, if coordinates along a dimension go through all entries: in turn, one
    vector after the other, or each as often as there are vectors (patches of each channel)."""
    length = places.shape[dim]
    times, rest = divmod(length, axis.size)
    line, here = line_of(places, dim), torch.arange(length)
    if not rest and bool((line == here % axis.size).all()):
        return flat([data(times), axis])
    return flat([axis, data(times)]) if not rest and bool((line == here // times).all()) else None


def _merged(
    source: Tensor, label: Label, group: list[int], places: list[Tensor], out_dims: set[int], out: Tensor
) -> Axis | None:
    """Return the axis of a dimension into which several were flattened, in any order."""
    if len(out_dims) != 1:
        return None
    (j,) = out_dims
    if out.shape[j] != prod(source.shape[e] for e in group):
        return None
    lines = {e: line_of(places[e], j) for e in group}

    def run(e: int) -> int:  # the number of entries before its coordinate changes
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


def _stretched(axis: Axis, places: Tensor, mine: Set[int], out: Tensor) -> Axis | None:
    """Return the axis of repeated entries, each by itself or all in turn."""
    (j,) = mine
    line, n = line_of(places, j), axis.size
    times, rest = divmod(out.shape[j], n)
    if rest or times < 2:
        return None
    here = torch.arange(out.shape[j])
    if bool((line == here // times).all()):
        return flat([axis, index(times)])
    if bool((line == here % n).all()):
        return flat([index(times), axis])
    return None
