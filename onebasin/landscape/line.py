# SPDX-License-Identifier: Apache-2.0
"""The straight line between two models: points on it, the loss along it, and its barrier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data import Task, evaluate, load_model
from onebasin.engine import Tell
from onebasin.models import Folder
from onebasin.settings import Points, checked

Model = Mapping[str, Tensor] | str | Path


def interpolate(a: Model, b: Model, lam: float) -> dict[str, Tensor]:
    """(1 - lam) a + lam b, tensor by tensor, in float32; exactly a at lam 0 and exactly b at lam 1.

    a, b: model folders or state dicts. A tensor that is not of floating point (a buffer) comes from a.
    Raises ValueError naming a tensor that one of them lacks or that has another shape.
    """
    first, second = _tensors(a), _tensors(b)
    refuse_unlike(first, second, "on one line")
    return {
        name: torch.lerp(x.float(), second[name].float(), lam) if x.is_floating_point() else x
        for name, x in first.items()
    }


def refuse_unlike(first: Mapping[str, Tensor], second: Mapping[str, Tensor], place: str) -> None:
    """Raises ValueError, saying that the models do not lie `place`, for a tensor that one lacks or of another shape."""
    for name in sorted(first.keys() ^ second.keys()):
        raise ValueError(f"the models do not lie {place}: only one of them has the tensor '{name}'")
    for name, tensor in first.items():
        if tensor.shape != second[name].shape:
            shapes = f"{tuple(tensor.shape)} and {tuple(second[name].shape)}"
            raise ValueError(f"the models do not lie {place}: the tensor '{name}' has the shapes {shapes}")


def barrier(loss_a: float, loss_b: float, losses: Sequence[float], lambdas: Sequence[float]) -> float:
    """The largest excess of `losses` over the straight line between the end losses.

    max over i of losses[i] - ((1 - lambdas[i]) loss_a + lambdas[i] loss_b), in the unit of the losses
    (Frankle et al., 2020; Entezari et al., 2022, Eq. 1).
    Raises ValueError for no points, unequal lengths, or a NaN.
    """
    if len(losses) != len(lambdas) or not losses:
        raise ValueError(f"a barrier needs one loss per point, not {len(losses)} losses for {len(lambdas)} points")
    if any(map(math.isnan, [loss_a, loss_b, *losses])):
        raise ValueError("the loss along the line is not a number, so there is no barrier")
    return max(loss - ((1 - lam) * loss_a + lam * loss_b) for loss, lam in zip(losses, lambdas, strict=True))


def curve(
    a: str | Path,
    b: str | Path,
    task: Task,
    points: int = 11,
    *,
    device: str = "cpu",
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Loss and accuracy at `points` equally spaced models, from folder `a` (lambda 0) to `b` (lambda 1).

    Both ends are among the points. tell: called with a line about what happens now.
    Returns `lambdas`, `losses`, `accuracies` (lists), `barrier` (number) and `end_losses` ([a, b]).
    Raises ValueError for fewer than 2 points, models that do not fit the task, and models not on one line.
    """
    points = checked(Points, "points", points)
    model, other = load_model(a, task.name), load_model(b, task.name)
    ends = [{name: tensor.clone() for name, tensor in one.state_dict().items()} for one in (model, other)]
    if len(list(other.parameters())) > len(list(model.parameters())):
        model = other  # where one model ties two tensors and the other does not, only the latter can hold both
    model.to(device)  # type: ignore[arg-type]
    lambdas = [i / (points - 1) for i in range(points)]
    losses, accuracies = [], []
    for lam in lambdas:
        if tell:
            tell(f"evaluating at lambda {lam:.3g}")
        model.load_state_dict(interpolate(ends[0], ends[1], lam))
        scores = evaluate(model, task)
        losses.append(scores.loss)
        accuracies.append(scores.accuracy)
    return {
        "lambdas": lambdas,
        "losses": losses,
        "accuracies": accuracies,
        "barrier": barrier(losses[0], losses[-1], losses, lambdas),
        "end_losses": [losses[0], losses[-1]],
    }


def _tensors(model: Model) -> Mapping[str, Tensor]:
    if isinstance(model, Mapping):
        return model
    checkpoint = Folder(model)
    try:
        return {name: checkpoint.read_name(name) for name in checkpoint.files}
    finally:
        checkpoint.close()
