# SPDX-License-Identifier: Apache-2.0
"""Entries of an axis, selected by their places: a range, every second one, one alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .atoms import Axis, bind, fix, flat, joined


def pick(axis: Axis, offset: int, dims: Sequence[tuple[int, int]], why: str) -> list[Axis] | None:
    """Return the axes of a selection: entry (i, j, ..) is entry offset + i * stride + j * stride' .. of `axis`.

    dims: (size, stride), in descending order of strides. None if the structure of the axis does not allow the
    selection.
    """
    top = axis.top
    if not dims:
        if top.size > 1:
            _at(top, offset, why)
        return []
    reach = offset + sum((size - 1) * stride for size, stride in dims)
    if reach >= top.size:
        return None
    if len(dims) == 1 and dims[0] == (top.size, 1):
        return [axis]
    if top.cat:
        start = 0
        for part in axis.parts:
            if start <= offset and reach < start + part.size:
                return pick(part, offset - start, dims, why)
            start += part.size
        if len(dims) == 1 and dims[0][1] == 1:
            return _several(axis, offset, dims[0][0])
        return None
    if top.flat:
        first, rest = axis.parts[0], axis.parts[1:]
        inner = prod(part.size for part in rest)
        if inner == 1:  # factors: every entry has its own
            found = pick(first, offset, dims, why)
            if found and prod(size for size, _ in dims) == top.size:
                return [*found[:-1], flat([found[-1], *rest])]
            for part in rest:
                fix(part, why)
            return found
        outside, inside, crossing = [], [], 0
        for size, stride in dims:
            if stride % inner == 0:
                outside.append((size, stride // inner))
            elif stride * size <= inner:
                inside.append((size, stride))
            elif inner % stride == 0 and size % (inner // stride) == 0:
                crossing = inner // stride
                outside.append((size // crossing, 1))
                inside.append((crossing, stride))
            else:
                return None
        before = pick(first, offset // inner, outside, why)
        after = pick(flat(rest), offset % inner, inside, why)
        if before is None or after is None:
            return None
        if crossing:
            before[-1:], after[:1] = [flat([before[-1], after[0]])], []
        return before + after
    size, stride = dims[0]
    if size * stride == top.size and offset < stride:
        bind(top, [size, stride], True)
        return pick(axis, offset, dims, why)
    start, length = offset // stride * stride, size * stride
    if start + length > top.size:
        start = offset  # a range that begins inside a step
        length = top.size - start
        if length < size * stride - stride + 1:
            return None
    pieces = [piece for piece in (start, length, top.size - start - length) if piece]
    if len(pieces) == 1:
        return None
    bind(top, pieces, False)
    return pick(axis, offset, dims, why)


def _several(axis: Axis, offset: int, length: int) -> list[Axis] | None:
    """Return a range over several parts that are side by side."""
    found, start = [], 0
    for part in axis.parts:
        low, high = max(offset, start), min(offset + length, start + part.size)
        if low < high:
            piece = pick(part, low - start, [(high - low, 1)], "slice")
            if piece is None:
                return None
            found += piece
        start += part.size
    return [joined(found)]


def _at(axis: Axis, place: int, why: str) -> None:
    """Fix an axis, since one of its entries is used by its number."""
    if axis.cat:
        for part in axis.parts:
            if place < part.size:
                return _at(part, place, why)
            place -= part.size
    return fix(axis, why)
