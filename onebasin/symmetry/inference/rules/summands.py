# SPDX-License-Identifier: Apache-2.0
"""The parameters that are summands of a tensor: rows of tables, tables of biases, and vectors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..atoms import Axis
from ..trace import KEY, Label, Trace


def vectors_of(tensor: Any) -> tuple[str, ...]:
    """Return the parameters that are summands of every vector of a tensor (along its last axis), or the tensor's own
    name if it is such a parameter."""
    label: Label | None = getattr(tensor, KEY, None)
    if label is None:
        return ()
    return (label.name,) if label.name and tensor.numel() == tensor.shape[-1] else label.vectors


def whole_of(tensor: Any) -> str:
    """Return the name of the table whose first rows, in one or more dimensions, are those of a tensor, the same ones
    for all of a batch."""
    label: Label | None = getattr(tensor, KEY, None)
    if label is None or tensor.dim() < 2:
        return ""
    several = any(n > 1 and step for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    return label.name if label.name and several else label.whole


def tokens_of(tensor: Any) -> tuple[str, ...]:
    """Return the parameter whose rows a tensor consists of: tokens of its own."""
    return (table,) if (table := whole_of(tensor)) else ()


def as_biases(label: Label) -> tuple[tuple[str, Axis], ...]:
    """Return a parameter with two axes as a table of biases."""
    inner = label.axes[1] if len(label.axes) == 2 else None
    return ((label.name, inner),) if label.name and inner is not None else ()


def note_rows(trace: Trace, *tables: tuple[str, ...]) -> tuple[str, ...]:
    """Record that rows of tables were looked up, or summed, and return the tables."""
    rows = tuple(sorted(name for each in tables for name in each))
    trace.rows[rows] += 1
    return rows


def note_places(trace: Trace, a: Any, b: Any, out: Tensor) -> tuple[str, ...] | None:
    """Record a table of positions whose rows are added to the vectors there, and return the summands of all vectors."""
    for one, other in ((a, b), (b, a)):
        label, theirs = trace.label(one), trace.label(other)
        if label is None or theirs is None or one.dim() < 2:
            continue
        shared = (one.shape[-2], vectors_of(one))
        if (table := whole_of(other)) and out.shape == one.shape:
            trace.placed[table] = label.side or (shared,)
        elif len(theirs.rows) == 1 and shared[1] and one.shape[-1] == other.shape[-1]:  # in whatever order
            trace.placed[theirs.rows[0]] = (shared,)
    vectors = (*vectors_of(a), *vectors_of(b)) if isinstance(a, Tensor) and isinstance(b, Tensor) else ()
    return vectors if vectors and out.dim() > 1 else None
