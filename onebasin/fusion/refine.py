# SPDX-License-Identifier: Apache-2.0
"""Refinement: a few steps of distillation of a merged model from the models that it was merged from.

This is training, not alignment: the weights leave all lines between the models. Merging only gives the start, so
compare results with as many steps from another start, such as the plain average of unaligned models. The method is that
of Hinton, Vinyals and Dean, 2015, at temperature 1, with the mixture of several teachers as the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.data.hiding import Hiding
from onebasin.data.teaching import (
    Teachers,
    attention_of,
    divergence,
    drawn_order,
    forward_of,
    mean_loss,
    split_held_out,
)
from onebasin.engine import Descent, Means, Pace
from onebasin.models import Model
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch
from onebasin.settings import Count, Rate, Seconds, Seeded, Weight, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKS = 10  # at the held-out loss in one run
ROUNDS = 2  # in which the same tokens are hidden, so that teachers read only half of the texts that their student reads


@dataclass(frozen=True)
class Refined:
    """model: in eval mode. tensors: role -> tensor, all that a folder stores, of the step with the least held-out loss.

    losses: step -> loss on held-out batches; step 0 is the merged model as it was.
    """

    model: PreTrainedModel
    tensors: dict[str, Tensor]
    step: int
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Refining(Seeded):
    """How a merged model is distilled: matrices by Muon, all other tensors by Adam, with linear warm-up and decay, and
    again from the start at a lower rate where the first steps only harm.

    seconds: how long it takes at most.
    """

    section: ClassVar[str] = "Options"

    steps: Count = setting(200, "Steps of distillation.")
    batch: Count = setting(16, "Examples in a step.")
    lr: Rate = setting(1e-3, "The largest learning rate.")
    weights: list[Weight] | None = setting(None, "One number per teacher, such as 1,2 [default: equal].")
    mixed: bool = setting(False, "Multiply in bfloat16: faster where the hardware does.")
    checkpoint: str | None = setting(None, "Save the run in this file as it goes, and continue from it.")
    seconds: Seconds | None = None

    def shares(self, count: int) -> list[float]:
        """Return the shares of `count` teachers, which sum to 1. Raises ValueError for weights that do not fit."""
        if not count:
            raise ValueError("refinement needs at least one teacher")
        weights = [1.0] * count if self.weights is None else self.weights
        if len(weights) != count or min(weights) <= 0:
            raise ValueError(f"{count} teachers need {count} positive weights")
        return [weight / sum(weights) for weight in weights]


def refine(
    merged: Model,
    teachers: Sequence[Model | LoadedModel],
    batches: Sequence[Batch],
    how: Refining | None = None,
    means: Means | None = None,
    *,
    held_out: Sequence[Batch] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Refined:
    """Distil `teachers` into `merged`, by the KL divergence from the mixture of their predictions.

    Args:
        merged: The model that learns.
        teachers: The models that it came from, in memory or not.
        batches: Inputs; a step takes one batch. In masked texts, other tokens are hidden in every second round.
        how: The settings (default: all defaults). `mixed` is as in `forward_of`; on processors, whole attention maps
            are then held. The checkpoint is as in `Descent`, and holds four numbers for each parameter of the model.
        means: The type of the weights and their updates, and the device.
        held_out: Batches to choose the step by (default: a sixteenth of `batches`, at least one, on which nothing is
            then learned).
        progress: As in `Descent`.

    Raises:
        ValueError: There are too few batches, no teachers, weights that do not fit, models without a common output, or
            a checkpoint of another run.
    """
    how, means = how or Refining(), means or Means()
    shares = how.shares(len(teachers))
    loaded = partial(loaded_model, dtype=means.dtype, device=means.device)
    fit, held = split_held_out(batches, held_out)
    masters = [teacher if isinstance(teacher, LoadedModel) else loaded(teacher) for teacher in teachers]
    answers = Teachers([partial(forward_of(master, how.mixed), master.parameter) for master in masters])
    student = loaded(merged, attention=attention_of(how.mixed, means.device))
    forward = forward_of(student, how.mixed)
    free: list[Tensor] = list(student.model.parameters())  # also those that stack the tensors of experts
    for parameter in free:
        parameter.requires_grad_()
    hiding = Hiding.of(fit)
    order = drawn_order(np.random.default_rng(how.seed), how.steps, len(fit))

    def held_out_loss() -> float:
        return mean_loss(divergence, partial(forward, student.parameter), answers, shares, held)

    hidden = dict[int, tuple[int, Batch]]()  # number of a batch -> how often other tokens were hidden, and the result

    def batch_at(step: int) -> Batch:
        number, times = order[step - 1], (step - 1) // len(fit) // ROUNDS
        before, batch = hidden.get(number, (0, fit[number]))  # the first rounds take the texts as they are
        if hiding is not None and before < times:
            answers.forget(batch)
            batch = hiding.anew(fit[number], torch.Generator().manual_seed(hash((how.seed, number, times))))
            hidden[number] = times, batch
        return batch

    def loss_at(step: int) -> Tensor:
        batch = batch_at(step)
        return divergence(forward(student.parameter, batch), answers(batch), shares, batch)

    pace = Pace(how.steps, how.lr, LOOKS, seconds=how.seconds, careful=True)
    run = Descent(free, pace, matrices=_matrices(student), seed=how.seed, batches=len(fit),
                  weights=shares, mixed=how.mixed)  # fmt: skip
    run.descend(loss_at, held_out_loss, checkpoint=how.checkpoint, progress=progress)
    for parameter in free:
        parameter.requires_grad_(False)
    tensors = {role: tensor.detach() for role, tensor in student.tensors.items()}
    for role, entry in merged.signature.tensors.items():  # what the class does not compute with, and running statistics
        if role not in tensors and entry.stored:
            learned = entry.alias in tensors
            tensors[role] = tensors[str(entry.alias)] if learned else merged.read(role, means.dtype, means.device)
    return Refined(student.model, tensors, run.best_step, run.losses)


def _matrices(stock: LoadedModel) -> list[Tensor]:
    """Return the weights of linear layers except the last: those that are no table of vectors for tokens or classes."""
    last = stock.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        parameter
        for role, parameter in stock.parameter.items()
        if parameter.dim() == 2
        and not isinstance(module := stock.module(role), nn.Embedding)
        and module is not last
        and not stock.shared(role)
    ]
