# SPDX-License-Identifier: Apache-2.0
"""The scores of a model on a task: mean loss, accuracy and the task's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, mse_loss

from onebasin.engine import Tell
from onebasin.settings import choose_from

from . import metrics
from .batches import IGNORED
from .tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Scores:
    """The scores of a model on a task.

    Attributes:
        loss: The mean over all labels that count, of the cross-entropy in nats, or of the squared error (regression).
        accuracy: The share of the labels predicted; NaN for regression.
        metrics: The others by name, which are attributes too: macro_f1, micro_f1, matthews (classification), entity_f1
            (tags such as B-PER), pearson, spearman (regression), perplexity (language models).
    """

    loss: float
    accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        """Return a metric.

        Raises:
            ValueError: The task lacks it, or its library is not installed.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.metrics:
            hint = f"; it needs the package {metrics.NEEDS[name]}" if name in metrics.NEEDS else ""
            known = choose_from(name, ["loss", "accuracy", *self.metrics])
            raise ValueError(f"these examples have no metric '{name}'{hint}; {known}")
        return self.metrics[name]


@torch.inference_mode()
def evaluate(model: PreTrainedModel, task: Task, tell: Tell | None = None) -> Scores:
    """Return the loss, accuracy and the task's other metrics of `model` over all batches.

    The loss is the mean over labels, not over batches, so it does not depend on the batch size. A causal
    model predicts each token but the first from those before it.

    Args:
        model: Runs in eval mode, on its device.
        task: The batches, and the name that decides how they are scored.
        tell: Called with a sentence about every batch.

    Raises:
        ValueError: There is no label to predict.
    """
    model.train(False)
    loss, right, count = 0.0, 0, 0
    answers: list[tuple[list[Any], list[Any]]] = []  # of every row: predicted, right
    keeps = task.name.endswith(("-classification", "-regression"))
    for number, batch in enumerate(task.batches, 1):
        if tell:
            tell(f"evaluating: batch {number} of {len(task.batches)}")
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        logits = model(**inputs, output_attentions=False, output_hidden_states=False).logits.float()
        if task.name == "text-regression":
            guesses = logits.reshape(labels.shape)
            loss += float(mse_loss(guesses, labels.to(guesses), reduction="sum"))
        else:
            if task.name == "causal-lm":
                logits, labels = logits[:, :-1], labels[:, 1:]
            guesses = logits.argmax(-1)
            flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
            loss += float(cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"))
            right += int((guesses == labels).sum())
        counts = labels != IGNORED
        count += int(counts.sum())
        if keeps:
            rows = zip(guesses, labels, counts, strict=True)
            answers += [(guess[kept].tolist(), label[kept].tolist()) for guess, label, kept in rows]
    if not count:
        raise ValueError("the data leave nothing to predict")
    accuracy = float("nan") if task.name == "text-regression" else right / count
    return Scores(loss / count, accuracy, _metrics(model, task.name, loss / count, answers))


def _metrics(
    model: PreTrainedModel, task: str, loss: float, answers: list[tuple[list[Any], list[Any]]]
) -> dict[str, float]:
    if task.endswith("-lm"):
        return {"perplexity": metrics.perplexity(loss)}
    predicted, right = ([value for row in answers for value in _listed(row[side])] for side in (0, 1))
    if task == "text-regression":
        return metrics.of_numbers(predicted, right)
    if not task.endswith("-classification"):
        return {}
    found = metrics.of_classes(predicted, right)
    if task == "token-classification":
        names = model.config.id2label or {}
        tags = ([[str(names.get(value, value)) for value in row[side]] for row in answers] for side in (0, 1))
        found |= metrics.of_entities(*tags)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
