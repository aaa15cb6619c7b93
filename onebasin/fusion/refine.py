# SPDX-License-Identifier: Apache-2.0
"""Refinement: some steps of distillation of a merged model from the models that it was merged from.

This is training, not alignment: the weights leave every line between the models. What merging contributes is the start,
so results belong beside the same number of steps from another start, such as the plain average of unaligned models.
Hinton, Vinyals and Dean, 2015, with the mixture of several teachers as the target and temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onebasin.data.teaching import (
    Forward,
    Loss,
    Outputs,
    Teachers,
    divergence,
    drawn_order,
    forward_of,
    mean_loss,
    split_held_out,
)
from onebasin.engine import MOST_STEPS, Descent
from onebasin.models import Model
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch
from onebasin.settings import Count, Rate, Weight, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKS = 10  # at the held-out loss in one run


@dataclass(frozen=True)
class Refined:
    """model: in eval mode, holding `tensors` (role -> tensor), those of the step with the least held-out loss.

    losses: step -> loss on held-out batches; step 0 is the merged model as it was.
    """

    model: PreTrainedModel
    tensors: dict[str, Tensor]
    step: int
    losses: dict[int, float] = field(default_factory=dict)


def refine(
    merged: Model,
    teachers: Sequence[Model],
    batches: Sequence[Batch],
    *,
    held_out: Sequence[Batch] | None = None,
    start: Mapping[str, Tensor] | None = None,
    steps: int = 200,
    seconds: float | None = None,
    lr: float = 1e-3,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    mixed: bool = False,
    checkpoint: str | Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Refined:
    """Distil `teachers` into `merged` with Adam (linear warm-up and decay); one batch makes a step.

    Args:
        merged: The model that learns.
        teachers: The models that it came from.
        batches: Inputs.
        held_out: Batches to choose the step by (default: a sixteenth of `batches`, at least one; they then teach
            nothing).
        start: Role -> tensor, instead of those of `merged`.
        steps: How many.
        seconds: How long it takes, instead of `steps`.
        lr: The largest learning rate.
        weights: Of the teachers' predictions (default: equal).
        seed: Of the order of batches.
        loss: Default: the KL divergence from the mixture of the teachers' predictions.
        dtype: Of the weights and their updates.
        device: Where it runs.
        mixed: Products of matrices in bfloat16, which graphics cards and recent processors do faster (Micikevicius et
            al., 2018); on processors with attention maps held whole.
        checkpoint: As in `Descent`; it holds four numbers for each of the model's.
        progress: As in `Descent`.

    Raises:
        ValueError: There are too few batches, no teachers, weights, steps or a learning rate that are not positive,
            models without an output in common, or a checkpoint of another run.
    """
    shares = check(len(teachers), weights, steps, lr)
    loss = loss or divergence
    fit, held = split_held_out(batches, held_out)
    masters = [loaded_model(teacher, dtype=dtype, device=device) for teacher in teachers]
    function_of = _in_bfloat16 if mixed else forward_of
    answers = Teachers([partial(function_of(master), master.parameter) for master in masters])
    # On processors the gradient of torch's fused attention multiplies many small blocks, each at a cost of its own.
    attention = "eager" if mixed and torch.device(device).type == "cpu" else None
    student = loaded_model(merged, dtype=dtype, device=device, attention=attention)
    if start is not None:
        student.fill(start.__getitem__)
        student.fill_buffers(start.__getitem__)
    steps = MOST_STEPS if seconds else steps
    forward = function_of(student)
    free = student.parameter
    for parameter in free.values():
        parameter.requires_grad_()
    order = drawn_order(np.random.default_rng(seed), steps, len(fit))

    def held_out_loss() -> float:
        return mean_loss(loss, partial(forward, free), answers, shares, held)

    def loss_at(step: int) -> Tensor:
        batch = fit[order[step - 1]]
        return loss(forward(free, batch), answers(batch), shares, batch)

    run = Descent(list(free.values()), steps=steps, lr=lr, looks=LOOKS, seconds=seconds, seed=seed,
                  batches=len(fit), weights=shares, mixed=mixed)  # fmt: skip
    run.descend(loss_at, held_out_loss, checkpoint=checkpoint, progress=progress)
    for parameter in free.values():
        parameter.requires_grad_(False)
    tensors = {role: parameter.detach() for role, parameter in free.items()}
    return Refined(student.model, tensors, run.best_step, run.losses)


def _in_bfloat16(stock: LoadedModel) -> Forward:
    """`forward_of`, its products of matrices in bfloat16; what it gives is in float32."""
    forward = forward_of(stock)

    def cast(tensors: Mapping[str, Tensor], batch: Batch) -> Outputs:
        with torch.autocast(stock.model.device.type, torch.bfloat16):
            outputs = forward(tensors, batch)
        return {name: output.float() for name, output in outputs.items()}

    return cast


def check(count: int, weights: Sequence[float] | None, steps: int, lr: float) -> list[float]:
    """Return the shares of `count` teachers, which sum to 1. Raises ValueError as `refine` does, before any work."""
    checked(Count, "steps", steps)
    checked(Rate, "lr", lr)
    if not count:
        raise ValueError("refinement needs at least one teacher")
    given: list[float] = checked(list[Weight], "weights", [1.0] * count if weights is None else list(weights))
    if len(given) != count or min(given) <= 0:
        raise ValueError(f"{count} teachers need {count} positive weights")
    return [weight / sum(given) for weight in given]
