# SPDX-License-Identifier: Apache-2.0
"""The loss over all weighted averages of three models, which form a triangle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data import Task, evaluate, load_model
from onebasin.engine import Tell
from onebasin.settings import Points, checked

from .line import interpolate


@torch.no_grad()
def simplex(models: Sequence[str | Path], task: Task, points: int = 6, *, tell: Tell | None = None) -> dict[str, Any]:
    """Return losses of sum_i w_i model_i over a regular grid of weights w, as plotted by Theus et al. (2025).

    Args:
        models: Three model folders, already matched to each other.
        task: The task to evaluate on.
        points: Number of points on each edge of the triangle.
        tell: Receives progress messages.

    Returns:
        `shares` (the weights, a list of triples), `losses`, `accuracies`, `end_losses` (one per model) and `barrier`,
        the largest excess of a loss over the same weighted average of the end losses.

    Raises:
        ValueError: There are not three models, fewer than 2 points, or the models cannot be averaged.
    """
    points = checked(Points, "points", points)
    if len(models) != 3:
        raise ValueError("a triangle of losses needs three models")
    loaded = [load_model(folder, task.name) for folder in models]
    states = [{name: tensor.clone() for name, tensor in one.state_dict().items()} for one in loaded]
    model = max(loaded, key=lambda one: len(list(one.parameters())))  # one that ties the fewest tensors holds all
    steps = points - 1
    shares = [(i / steps, j / steps, (steps - i - j) / steps) for i in range(points) for j in range(points - i)]
    losses, accuracies = [], []
    for number, share in enumerate(shares, 1):
        if tell:
            tell(f"evaluating average {number} of {len(shares)}")
        model.load_state_dict(average(states, share))
        scores = evaluate(model, task)
        losses.append(scores.loss)
        accuracies.append(scores.accuracy)
    corners = [shares.index(corner) for corner in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))]
    ends = [losses[corner] for corner in corners]
    flat = [sum(w * end for w, end in zip(share, ends, strict=True)) for share in shares]
    return {
        "shares": [list(share) for share in shares],
        "losses": losses,
        "accuracies": accuracies,
        "end_losses": ends,
        "barrier": max(loss - level for loss, level in zip(losses, flat, strict=True)),
    }


def average(states: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return sum_i w_i state_i of three states; exactly the state of a model whose weight is 1."""
    first, second, third = shares
    pair = interpolate(states[0], states[1], second / (first + second) if first + second else 0.0)
    return interpolate(pair, states[2], third)
