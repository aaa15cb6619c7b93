# SPDX-License-Identifier: Apache-2.0
"""Tensors that a model stores as parts of larger parameters: those of experts, stacked into one.

Nothing here knows a class: tensors are filled with marks before they are loaded, which show where each of them goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """A box in a parameter: its name, and [first, last) along every axis. In a stack of matrices it is a part of one of
    them, and a matrix itself."""

    parameter: str
    box: tuple[tuple[int, int], ...]

    @property
    def stacked(self) -> bool:
        """Whether it lies in a single matrix of a stack."""
        (first, last), *others = self.box
        return len(others) > 1 and last - first == 1

    def of(self, model: nn.Module) -> Tensor:
        """Return the part as a view."""
        return self.cut(model.get_parameter(self.parameter))

    def cut(self, tensor: Tensor) -> Tensor:
        part = tensor[tuple(slice(first, last) for first, last in self.box)]
        return part.squeeze(0) if self.stacked else part


def observed(name: str, tensor: Tensor) -> dict[float, Part] | None:
    """Return number -> the box of a marked parameter that is filled with it; None if a number does not fill a box.

    Zeros beside a single number do not count: some classes set the row of padding to zero when they load it.
    """
    first, whole = tensor.detach().flatten()[0], Part(name, tuple((0, length) for length in tensor.shape))
    if bool((tensor == first).all()):
        return {float(first): whole}
    found, numbers = {}, torch.unique(tensor.detach()).tolist()
    if len(numbers) == 2 and 0.0 in numbers:
        return {sum(numbers): whole}
    for number in numbers:
        places = (tensor == number).nonzero()
        low, high = places.min(0).values, places.max(0).values + 1
        if int((high - low).prod()) != len(places):
            return None
        found[number] = Part(name, tuple(zip(low.tolist(), high.tolist(), strict=True)))
    return found


def assembled(pieces: Mapping[Part, Tensor]) -> dict[str, Tensor]:
    """Return name -> the parameter assembled from its parts; gradients flow back to them."""
    ordered = sorted(pieces, key=lambda part: (part.parameter, part.box))
    found = {}
    for name, parts in groupby(ordered, key=lambda part: part.parameter):
        rows = [list(row) for _, row in groupby(parts, key=lambda part: part.box[0] if part.stacked else 0)]
        matrices = [torch.cat([pieces[part] for part in row], _axis(row)) for row in rows]
        found[name] = torch.stack(matrices) if rows[0][0].stacked else matrices[0]
    return found


def _axis(row: list[Part]) -> int:
    """Return the axis of the pieces along which the boxes of one expert follow one another."""
    ranges = list(zip(*(part.box for part in row), strict=True))
    inner = ranges[1:] if row[0].stacked else ranges
    return next((axis for axis, along in enumerate(inner) if len(set(along)) > 1), 0)


ROW = 16  # bytes: torch's grouped products require rows of a multiple of this size


def one_by_one(model: nn.Module) -> None:
    """Let a model call its experts one after another, each on the tokens routed to it."""
    for config in _calling_experts(model):
        config._experts_implementation = "eager"


def _calling_experts(model: nn.Module) -> Iterator[Any]:
    """Return the configurations that determine how a model's experts are called."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return (config for config in configs.values() if hasattr(config, "_experts_implementation"))


def one_by_one_where_needed(model: nn.Module) -> None:
    """Call `one_by_one` if torch's grouped products cannot run the experts: in float64, or with rows of other sizes."""
    stacks = [p for m in model.modules() if hasattr(m, "config") for p in m.parameters(recurse=False) if p.dim() == 3]
    if any(p.dtype == torch.float64 or any(s * p.itemsize % ROW for s in p.stride()[:-1]) for p in stacks):
        one_by_one(model)


@contextmanager
def running_experts(model: nn.Module) -> Iterator[None]:
    """Call `one_by_one_where_needed` for the duration of the block."""
    before = [(config, config._experts_implementation) for config in _calling_experts(model)]
    one_by_one_where_needed(model)
    try:
        yield
    finally:
        for config, how in before:
            config._experts_implementation = how
