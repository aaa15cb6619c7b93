# SPDX-License-Identifier: Apache-2.0
"""Linear interpolation between two models: points on the line, the loss along it, and the loss barrier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.data import Scores, Task, evaluate, load_model
from onebasin.engine import Tell
from onebasin.models import Folder
from onebasin.models.pairing import refuse_unlike
from onebasin.settings import Points, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = Mapping[str, Tensor] | str | Path


def interpolate(a: Model, b: Model, lam: float) -> dict[str, Tensor]:
    """Return (1 - lam) a + lam b, tensor by tensor, in float32; exactly a at lam = 0 and exactly b at lam = 1.

    Tensors of integers (buffers) are taken from a.

    Args:
        a, b: Tensors by name, or model folders.
        lam: Position on the line, from 0 to 1.

    Raises:
        ValueError: A tensor is missing in one of the models, or has another shape there.
    """
    first, second = _tensors(a), _tensors(b)
    refuse_unlike(first, second, "the models do not lie on one line")
    return {
        name: torch.lerp(x.float(), second[name].float(), lam) if x.is_floating_point() else x
        for name, x in first.items()
    }


def barrier(loss_a: float, loss_b: float, losses: Sequence[float], lambdas: Sequence[float]) -> float:
    """Return the loss barrier: the largest excess of the losses over the line between the end losses, in their unit.

    It is max_i losses[i] - ((1 - lambdas[i]) loss_a + lambdas[i] loss_b) (Frankle et al., 2020; Entezari et al., 2022,
    Eq. 1).

    Args:
        loss_a, loss_b: Losses of the two models.
        losses: Losses of points on the line.
        lambdas: Positions of these points, from 0 to 1.

    Raises:
        ValueError: There are no points, the lengths differ, or a loss is NaN.
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
    """Return the loss and the accuracy of equally spaced models on the line from `a` to `b`.

    Args:
        a, b: Model folders.
        task: The task to evaluate on.
        points: Number of models, including both ends.
        device: Device that the models run on.
        tell: Receives progress messages.

    Returns:
        `lambdas`, `losses`, `accuracies` (lists), `barrier` (a number) and `end_losses` ([a, b]).

    Raises:
        ValueError: There are fewer than 2 points, or the models do not fit the task or each other.
    """
    points = checked(Points, "points", points)
    model, other = load_model(a, task.name), load_model(b, task.name)
    ends = [{name: tensor.clone() for name, tensor in one.state_dict().items()} for one in (model, other)]
    if len(list(other.parameters())) > len(list(model.parameters())):
        model = other  # if only one of the models ties two tensors, the other can hold both
    model.to(device)  # type: ignore[arg-type]

    def at(lam: float) -> PreTrainedModel:
        model.load_state_dict(interpolate(ends[0], ends[1], lam))
        return model

    lambdas = even(points)
    return measured(lambdas, map(at, lambdas), task, tell)


def even(points: int) -> list[float]:
    """Return equally spaced positions from 0 to 1."""
    return [i / (points - 1) for i in range(points)]


def measured(
    lambdas: Sequence[float], models: Iterable[PreTrainedModel], task: Task, tell: Tell | None = None
) -> dict[str, Any]:
    """Return what `curve` returns, for models that are created one after another."""
    scores: list[Scores] = []
    for lam, model in zip(lambdas, models, strict=True):
        if tell:
            tell(f"evaluating at lambda {lam:.3g}")
        scores.append(evaluate(model, task))
    losses = [score.loss for score in scores]
    return {
        "lambdas": list(lambdas),
        "losses": losses,
        "accuracies": [score.accuracy for score in scores],
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
