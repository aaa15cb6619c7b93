# SPDX-License-Identifier: Apache-2.0
"""The axis notation, which assigns a space to each axis of a tensor.

    vocab stream                      an axis per word; one word is one space
    (head qk) attn_in'                parentheses flatten several spaces into one axis, row-major
    [(head qk) | (head qk') | ...]    brackets concatenate; both nest, as in (head [qk | qk' | vo])
    patch' 2 stream                   a prime marks the dual: the axis *reads* from its space
                                      a number is an axis of that size on which nothing acts
    stream.next (4 merged')           a dot selects one of several: see `stage` in the tables

A space that follows others inside a flattened axis is batched over them: `qk` in `(head qk)` has its own map for every
`head`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Leaf:
    """One space, read (dual) or written; `space` is a decimal number for a constant axis."""

    space: str
    dual: bool = False

    @property
    def constant(self) -> bool:
        return self.space.isdigit()


@dataclass(frozen=True)
class Flat:
    """Several axes flattened row-major into one."""

    parts: tuple[Axis, ...]


@dataclass(frozen=True)
class Cat:
    """Several axes concatenated into one."""

    parts: tuple[Axis, ...]


Axis = Leaf | Flat | Cat

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*(?:\.\w+)?'?|\d+|[()\[\]|])")
DEEPEST = 20  # levels of nested brackets: tensors need three


@cache
def parse(expression: str) -> tuple[Axis, ...]:
    """Read an expression such as `(head qk) stream'` into one axis per tensor dimension.

    Raises ValueError if brackets do not match or are nested too deeply, or if a word is not a space.
    """
    tokens = []
    position = 0
    text = expression.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if not found:
            raise ValueError(
                f"axes '{expression}': cannot read '{text[position:].strip()}'; a space is a word, "
                "with a prime if the axis reads from it"
            )
        tokens.append(found[1])
        position = found.end()
    if max(accumulate((token in "([") - (token in ")]") for token in tokens), default=0) > DEEPEST:
        raise ValueError(f"axes '{expression}': brackets are nested more than {DEEPEST} deep")

    def sequence(index: int, closing: str) -> tuple[list[Axis], int]:
        axes: list[Axis] = []
        while index < len(tokens):
            token = tokens[index]
            if token in (closing, "|") and closing:
                return axes, index
            axis, index = one(index)
            axes.append(axis)
        if closing:
            raise ValueError(f"axes '{expression}': a '{closing}' is missing")
        return axes, index

    def one(index: int) -> tuple[Axis, int]:
        token = tokens[index]
        if token == "(":
            parts, index = sequence(index + 1, ")")
            if tokens[index] != ")":
                raise ValueError(f"axes '{expression}': '|' belongs inside brackets [ ]")
            if not parts:
                raise ValueError(f"axes '{expression}': empty parentheses")
            return Flat(tuple(parts)), index + 1
        if token == "[":
            choices: list[Axis] = []
            while True:
                parts, index = sequence(index + 1, "]")
                if len(parts) != 1:
                    raise ValueError(f"axes '{expression}': write exactly one axis between '|'")
                choices.append(parts[0])
                if tokens[index] == "]":
                    return Cat(tuple(choices)), index + 1
        if token in ")]|":
            raise ValueError(f"axes '{expression}': unexpected '{token}'")
        return Leaf(token.rstrip("'"), token.endswith("'")), index + 1

    axes, _ = sequence(0, "")
    return tuple(axes)


def show(axes: tuple[Axis, ...]) -> str:
    """Write axes back as an expression; `parse(show(axes)) == axes`."""

    def one(axis: Axis) -> str:
        if isinstance(axis, Leaf):
            return axis.space + ("'" if axis.dual else "")
        if isinstance(axis, Flat):
            return "(" + " ".join(map(one, axis.parts)) + ")"
        return "[" + " | ".join(map(one, axis.parts)) + "]"

    return " ".join(map(one, axes))


@cache
def leaves(axis: Axis | tuple[Axis, ...]) -> tuple[Leaf, ...]:
    """Return every leaf of an axis (or of several), left to right."""
    if isinstance(axis, Leaf):
        return (axis,)
    return tuple(leaf for part in (axis if isinstance(axis, tuple) else axis.parts) for leaf in leaves(part))


@cache
def space_leaves(axis: Axis | tuple[Axis, ...]) -> tuple[Leaf, ...]:
    """Return the leaves of an axis (or of several) that are spaces, without constants."""
    return tuple(leaf for leaf in leaves(axis) if not leaf.constant)


def rename(axis: Axis, names: Mapping[str, str]) -> Axis:
    """Return the same axis with its spaces renamed."""
    if isinstance(axis, Leaf):
        return Leaf(names.get(axis.space, axis.space), axis.dual)
    return type(axis)(tuple(rename(part, names) for part in axis.parts))


def size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Return the number of entries of an axis. Raises KeyError for a space without a size."""
    if isinstance(axis, Leaf):
        return int(axis.space) if axis.constant else sizes[axis.space]
    parts = [size(part, sizes) for part in axis.parts]
    if isinstance(axis, Cat):
        return sum(parts)
    product = 1
    for part in parts:
        product *= part
    return product


def nesting(axes: tuple[Axis, ...]) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
    """Yield each leaf with the spaces that precede it inside its flattened axes, outermost first."""

    def walk(axis: Axis, outer: tuple[str, ...]) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
        if isinstance(axis, Leaf):
            yield axis, outer
        elif isinstance(axis, Cat):
            for part in axis.parts:
                yield from walk(part, outer)
        else:
            for part in axis.parts:
                yield from walk(part, outer)
                outer = (*outer, *(leaf.space for leaf in leaves(part) if not leaf.constant))

    for axis in axes:
        yield from walk(axis, ())


def blocks(
    tensor: torch.Tensor, axes: tuple[Axis, ...], sizes: Mapping[str, int]
) -> list[tuple[torch.Tensor, tuple[Leaf, ...]]]:
    """Cut a tensor into *views* with exactly one dimension per leaf: no concatenation, no flattening.

    GPT-2's fused `stream' [(head qk) | (head qk') | (head vo)]` of shape (d, 3 d) becomes three views of
    shape (d, head, d_head) with leaves (stream', head, qk), (stream', head, qk'), (stream', head, vo).
    Writing into a view writes into the tensor.
    """

    def expand(
        view: torch.Tensor, todo: tuple[Axis, ...], done: tuple[Leaf, ...]
    ) -> Iterator[tuple[torch.Tensor, tuple[Leaf, ...]]]:
        # The first len(done) dimensions of `view` are finished; one dimension per axis of `todo` follows.
        if not todo:
            yield view, done
            return
        axis, rest, dim = todo[0], todo[1:], len(done)
        if isinstance(axis, Leaf):
            yield from expand(view, rest, (*done, axis))
        elif isinstance(axis, Flat):
            shape = tuple(size(part, sizes) for part in axis.parts)
            split = (*view.shape[:dim], *shape, *view.shape[dim + 1 :])
            yield from expand(view.view(split), (*axis.parts, *rest), done)
        else:
            start = 0
            for part in axis.parts:
                length = size(part, sizes)
                yield from expand(view.narrow(dim, start, length), (part, *rest), done)
                start += length

    return list(expand(tensor, axes, ()))
