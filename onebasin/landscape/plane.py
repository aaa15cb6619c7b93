# SPDX-License-Identifier: Apache-2.0
"""The loss over the plane through three models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data import Task, evaluate, load_model
from onebasin.engine import Tell
from onebasin.models.pairing import refuse_unlike

Tensors = dict[str, Tensor]


def plane(
    a: str | Path, b: str | Path, c: str | Path, task: Task, points: int = 11, *, margin: float = 0.25,
    tell: Tell | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return losses on a grid over the plane through three models (Garipov et al., 2018, section 3).

    The origin is a. The first axis points to b, the second is the component of c - a orthogonal to it, so distances on
    the grid are distances between weights.

    Args:
        a, b, c: Model folders.
        task: The task to evaluate on.
        points: Number of points along each axis.
        margin: How far the grid extends beyond the models, as a share of their extent.
        tell: Receives progress messages.

    Returns:
        `x`, `y` (coordinates, lists of `points`), `z` (losses, rows along y) and `marks` (name -> coordinates).

    Raises:
        ValueError: The models have different tensors, or lie on one line.
    """
    model = load_model(a, task.name)
    origin = _state(model)
    to_b, to_c = (_from(origin, load_model(folder, task.name)) for folder in (b, c))
    width, along = sqrt(_dot(to_b, to_b)), _dot(to_b, to_c)
    if not width:
        raise ValueError("the first two models are identical, so there is no plane through all three")
    along /= width
    rest = {name: to_c[name] - along / width * to_b[name] for name in to_c}
    height = sqrt(_dot(rest, rest))
    if height < 1e-6 * width:
        raise ValueError("the three models lie on one line, so they define no plane")
    places = {"A": (0.0, 0.0), "B": (width, 0.0), "C": (along, height)}
    left, right = min(0.0, along), max(width, along)
    x = _ticks(left, right, margin, points)
    y = _ticks(0.0, height, margin, points)
    z: list[list[float]] = []
    for row, v in enumerate(y):
        if tell:
            tell(f"plane: row {row + 1} of {points}")
        z.append([])
        for u in x:
            at = {name: origin[name] + u / width * to_b[name] + v / height * rest[name] for name in origin}
            model.load_state_dict(at, strict=False)
            z[-1].append(evaluate(model, task).loss)
    return {"x": x, "y": y, "z": z, "marks": places}


def _state(model: torch.nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def _from(origin: Tensors, model: torch.nn.Module) -> Tensors:
    there = _state(model)
    refuse_unlike(origin, there, "the models do not lie in one plane")
    return {name: there[name] - origin[name] for name in origin}


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The inner product, summed in float64 because it has millions of small terms."""
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _ticks(low: float, high: float, margin: float, points: int) -> list[float]:
    reach = margin * (high - low)
    ticks: Sequence[float] = torch.linspace(low - reach, high + reach, points, dtype=torch.float64).tolist()
    return list(ticks)
