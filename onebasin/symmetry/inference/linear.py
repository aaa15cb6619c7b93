# SPDX-License-Identifier: Apache-2.0
"""Constant linear maps along an axis: slices, reshapes, rotations by position.

They are not recognised by name. A map is represented by the images of the axis's basis vectors under the same
operations, and analysed when another operation uses the result: a selection of entries gives structure, `(head qk)` or
`[q | k | v]`; any other map leaves the maps that commute with it, such as one complex number per pair under rotary
embeddings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tables.signature import MOVES
from .atoms import Axis, data, evens_first, fix, flat, joined, restrict
from .selecting import pick
from .unification import split


@dataclass(frozen=True)
class Linear:
    """The entries of a tensor as linear functions of an axis. images: (entries of the axis, *shape of the tensor)."""

    axis: Axis
    images: Tensor


def basis(axis: Axis, tensor: Tensor, dim: int) -> Linear:
    """Return the identity along dimension `dim` of a tensor."""
    shape = [1] * tensor.dim()
    shape[dim] = axis.size
    eye = torch.eye(axis.size, dtype=torch.float64)
    return Linear(axis, eye.view(-1, *shape).expand(-1, *tensor.shape))


def once(tensor: Tensor, first: int = 1) -> Tensor:
    """Return a tensor without expanded dimensions, from the `first` on: they have one entry there."""
    for dim in range(first, tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def settle(linear: Linear, dims: list[int], tensor: Tensor, why: str) -> list[Axis | None]:
    """Return the axes of the dimensions `dims` of a tensor, along which the images vary because of the map."""
    axis, shape = linear.axis, tensor.shape
    for place, dim in enumerate(dims):
        period = _period(linear.images, dim + 1)
        # Examples of a batch, not repeated heads, whose numbers are the same.
        if period < shape[dim] and (not dim or not _repeats(tensor, dim, period)):
            narrower = Linear(axis, linear.images.narrow(dim + 1, 0, period))
            inner = settle(narrower, dims, tensor.narrow(dim, 0, period), why)
            if (one := inner[place]) is not None:
                inner[place] = flat([data(shape[dim] // period), one])
            return inner
    every = linear.images.movedim(0, -1)  # (*shape, n)
    order = [dim for dim in range(len(shape)) if dim not in dims]
    for dim in order:
        if every.stride(dim) == 0:
            every = every.narrow(dim, 0, 1)
    maps = every.permute(*order, *dims, -1).flatten(0, len(order) - 1) if order else every[None]
    sizes = [shape[dim] for dim in dims]
    if not maps.is_complex():
        first = maps[0]
        if bool((maps == first).all()):
            found = _selection(axis, first, sizes, why)
            if found is not None:
                return found
        rest, kept, off = peeled(linear, tuple(dims), ())
        if off:
            within = dict(zip(kept, settle(rest, list(kept), tensor, why), strict=True))
            return [off.get(dim, within.get(dim)) for dim in dims]
        narrow = _narrowed(linear, why)
        if narrow is not None:
            return settle(narrow, dims, tensor, why)
        if len(dims) == 1 and sizes == [axis.size]:
            return [_commuting(axis, torch.unique(maps, dim=0), why)]
        nested = _nested(linear, dims, tensor, why)
        if nested is not None:
            return nested
    fix(axis, why)
    return [None for _ in dims]


def _nested(linear: Linear, dims: list[int], tensor: Tensor, why: str) -> list[Axis | None] | None:
    """Return the axes if one dimension is a product of two, of which only the outer one can be split off: heads in
    shards, each with its own queries and keys."""
    for dim in dims:
        size = tensor.shape[dim]
        for count in (n for n in range(size // 2, 1, -1) if size % n == 0):
            parts = (count, size // count)
            apart = Linear(linear.axis, linear.images.unflatten(dim + 1, parts))  # type: ignore[no-untyped-call]
            rest, _, off = peeled(apart, (dim,), ())
            if off:
                within = [d + (d >= dim) for d in dims]
                found = settle(rest, within, tensor.unflatten(dim, parts), why)  # type: ignore[no-untyped-call]
                place = dims.index(dim)
                inner = found[place]
                if inner is None:
                    fix(off[dim], why)
                else:
                    found[place] = flat([off[dim], inner])
                return found
    return None


def peeled(
    linear: Linear, dims: tuple[int, ...], keep: Collection[int]
) -> tuple[Linear, tuple[int, ...], dict[int, Axis]]:
    """Split off dimensions on whose entries the map acts separately and equally: heads, before a rotation.

    keep: dimensions that are not split off. Returns the remaining map, its dimensions, and the axes of the others.
    """
    off: dict[int, Axis] = {}
    for dim in dims:
        count = linear.images[0].shape[dim]
        n = linear.axis.size
        if dim in keep or count == 1 or n % count or n == count or len(linear.images) != n:
            continue
        images = once(linear.images)
        if images.shape[dim + 1] == 1:
            continue
        images = images.reshape(count, n // count, *images.shape[1:])
        images = images.movedim(dim + 2, 1)  # (o, h, inner, ..)
        own = images[torch.arange(count), torch.arange(count)]
        if not bool((own == own[:1]).all()) or int((images != 0).sum()) != int((own != 0).sum()):
            continue
        if not bool((own != 0).any()):
            continue
        outer, inner = split(linear.axis, [count, n // count])
        off[dim] = outer
        shape = linear.images[0].shape
        linear = Linear(inner, own[0].unsqueeze(dim + 1).expand(-1, *shape))
        dims = tuple(d for d in dims if d != dim)
    return linear, dims, off


def _period(images: Tensor, dim: int) -> int:
    """Return the number of entries along a dimension of images after which they are repeated."""
    size = images.shape[dim]
    images = once(images)
    return size if images.shape[dim] == 1 else next(
        (n for n in range(2, size) if size % n == 0 and _repeats(images, dim, n)), size)  # fmt: skip


def _repeats(tensor: Tensor, dim: int, period: int) -> bool:
    """Return whether the numbers of a tensor are repeated after so many entries along a dimension."""
    rest = tensor.shape[dim] - period
    return torch.equal(tensor.narrow(dim, period, rest), tensor.narrow(dim, 0, rest))


def _narrowed(linear: Linear, why: str) -> Linear | None:
    """Return the same map on the range of its axis that it uses, or None if it uses all of it."""
    used = (once(linear.images) != 0).flatten(1).any(1).nonzero().flatten().tolist()
    if not used or len(used) == len(linear.images) or used[-1] - used[0] + 1 != len(used):
        return None
    found = pick(linear.axis, used[0], [(len(used), 1)], why)
    return Linear(found[0], linear.images.narrow(0, used[0], len(used))) if found else None


def _selection(axis: Axis, rows: Tensor, sizes: list[int], why: str) -> list[Axis | None] | None:
    """Return the axes of a selection of entries, or None if it is not one or the structure does not allow it."""
    flatly = rows.reshape(-1, rows.shape[-1])
    places = flatly.argmax(-1)
    if not bool((flatly.sum(-1) == 1).all()) or not bool(((flatly == 0) | (flatly == 1)).all()):
        return None
    places = places.view(sizes)
    steps = []
    for dim, size in enumerate(sizes):
        along = places.movedim(dim, 0)
        if size == 1:
            steps.append(0)
            continue
        stride = int((along[1] - along[0]).flatten()[0])
        counted = torch.arange(size).view(-1, *[1] * (along.dim() - 1)) * stride
        if not bool((along - along[:1] == counted).all()):
            return _blocks(axis, places, why) if len(sizes) == 1 else None
        steps.append(stride)
    real = sorted((dim for dim in range(len(sizes)) if sizes[dim] > 1), key=lambda dim: -steps[dim])
    if any(steps[dim] <= 0 for dim in real):
        return _blocks(axis, places, why) if len(sizes) == 1 else None
    if not real and axis.size > 1 and not sizes:
        found = pick(axis, int(places), [], why)
    else:
        found = pick(axis, int(places.flatten()[0]), [(sizes[dim], steps[dim]) for dim in real], why)
    if found is None or len(found) != len(real):
        return None
    result: list[Axis | None] = [None] * len(sizes)
    for dim, one in zip(real, found, strict=True):
        result[dim] = one
    return result


def _blocks(axis: Axis, places: Tensor, why: str) -> list[Axis | None] | None:
    """Return the axes of a selection that keeps ranges together: a flattened transpose, a reordered concatenation."""
    flatly = places.tolist()
    starts = [0, *(i for i in range(1, len(flatly)) if flatly[i] != flatly[i - 1] + 1)]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], len(flatly)], strict=True)]
    if len(starts) < len(flatly):
        found = [pick(axis, flatly[start], [(length, 1)], why) for start, length in zip(starts, lengths, strict=True)]
        return None if any(each is None for each in found) else [joined([each[0] for each in found if each])]
    step = flatly[1] - flatly[0] if len(flatly) > 1 else 0
    inner = next((i for i in range(1, len(flatly)) if flatly[i] != flatly[i - 1] + step), len(flatly))
    if step > 1 and len(flatly) == axis.size and axis.size == step * inner:  # (a b) as (b a)
        outer = split(axis, [inner, step], why)
        return [flat([outer[1], outer[0]])]
    return None


def _commuting(axis: Axis, maps: Tensor, why: str) -> Axis | None:
    """Restrict an axis to maps that commute with all of these maps (*, n, n), M g x = g M x, and return it."""
    n = maps.shape[-1]
    here = torch.arange(n)
    diagonal = maps[:, here, here]
    off = maps.clone()
    off[:, here, here] = 0
    if not bool(off.any()) and bool((diagonal == diagonal[:, :1]).all()):
        return axis
    touched = (off != 0).any(0)
    untouched = ~touched.any(0) & ~touched.any(1)
    for word in ("pair", "next"):
        # Beside halves that turn, no entry is free: a table has no norm of the parts of a head (Persimmon).
        one = diagonal[:1, untouched][:, :1] if word == "next" and bool(untouched.any()) else diagonal[:1, :1]
        still = untouched & (diagonal == one).all(0)
        for end in range(n, 1, -1):
            for start in (0, n - end):
                rest = torch.cat([here[:start], here[start + end :]]) if end < n else here[:0]
                outermost = slice(start + end - 2, None) if start == 0 else slice(start, start + 2)
                if word == "next" and not bool(touched[outermost].any()):  # a pair that does not turn is no part of it
                    continue
                if (
                    end % 2 == 0
                    and (end == n or bool(still[rest].all()))
                    and _turns(maps[:, start : start + end, start : start + end], word)
                ):
                    return _paired(axis, start, end, word, why)
    evens = torch.cat([here[0::2], here[1::2]])
    if n % 2 == 0 and not axis.top.atom.parts and _turns(maps[:, :, evens], "pair"):
        restrict(axis, MOVES["interleaved"], why)
        return evens_first(axis)
    fix(axis, why)
    return axis


def _turns(maps: Tensor, word: str) -> bool:
    """Whether every map rotates and scales the pairs (i, i + n / 2), or (2 i, 2 i + 1), each by itself."""
    n = maps.shape[-1]
    half = n // 2
    pairs = torch.stack([torch.arange(half), torch.arange(half) + half] if word == "pair" else
                        [torch.arange(0, n, 2), torch.arange(1, n, 2)])  # fmt: skip
    a, b = pairs
    cos, sin = maps[:, a, a], maps[:, b, a]
    made = torch.zeros_like(maps)
    made[:, a, a], made[:, b, b], made[:, b, a], made[:, a, b] = cos, cos, sin, -sin
    return bool(torch.allclose(made, maps, rtol=0, atol=1e-9))


def _paired(axis: Axis, start: int, length: int, word: str, why: str) -> Axis | None:
    allowed = MOVES["rotary" if word == "pair" else "interleaved"]
    if length == axis.size:
        if axis.top.atom.parts:  # pairs cross its structure
            fix(axis, why)
        else:
            restrict(axis, allowed, why)
        return axis
    pieces = [(0, start), (start, length), (start + length, axis.size - start - length)]
    found = [(at, pick(axis, at, [(size, 1)], why)) for at, size in pieces if size]
    for at, each in found:
        if each is None or len(each) != 1:
            fix(axis, why)
            return axis
        if at == start:
            _paired(each[0], 0, length, word, why)
    return axis
