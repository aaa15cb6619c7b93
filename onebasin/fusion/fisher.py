# SPDX-License-Identifier: Apache-2.0
"""Fisher merging: every parameter is averaged with its Fisher information in each model as the weight.

    theta = sum_i w_i (F_i + eps) theta_i / sum_i w_i (F_i + eps),     F_i = mean_x E_y [(d log p_i(y | x) / d theta)^2]

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, Eqs. 2 and 5. Gradients are squared
example by example, which is not the square of a batch's mean gradient. Labels y are drawn from the model itself (the
Fisher information), or given ("empirical Fisher").

The diagonal depends on the basis: measure it on the matched model, not on its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import logsigmoid

from onebasin.data.calibration import Data, task_of
from onebasin.data.teaching import predictions
from onebasin.engine import Means, Tell
from onebasin.models import Model
from onebasin.running.classes import seeded, without_cache
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch, examples_in
from onebasin.settings import Few, Share, checked, setting
from onebasin.symmetry import Entry, Signature

from .examples import alike, unpadded
from .method import Merged, Sources
from .statistics import Statistics, StatisticsMethod, measured
from .tensors import Combine, merged_tensors

EPS = 1e-6  # of the mean of all diagonals
ROOM = 2**28  # numbers in per-example gradients that are held at once
IGNORED = -100

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fisher(StatisticsMethod):
    """The average of every parameter, weighted by its Fisher information in each model."""

    kind: ClassVar[str] = "fisher"

    labels: Literal["sampled", "given"] = setting(
        "sampled", "Labels sampled from the model (the true Fisher information), or given by the data."
    )
    draws: Few = setting(1, "Labels sampled per example.")
    eps: Share = setting(EPS, "Least weight of a parameter, as a share of the mean.")
    normalize: bool = setting(False, "Divide every model's information by its mean.")

    def given_labels(self) -> bool:
        return self.labels == "given"

    def measure(self, model: Model, data: Data, means: Means, tell: Tell | None) -> Statistics:
        given = data.labels
        if given and "self" in data.given.datasets:
            raise ValueError("given labels need data with labels: --data FILE; or let the model draw them (sampled)")
        batches = data.batches
        stock = loaded_model(model, dtype=means.dtype, device=means.device, attention="eager")
        causal = given and (data.given.task or task_of(model)) == "causal-lm"
        diagonal, count = fisher_diagonal(stock, batches, self, causal=causal, seed=data.given.seed, tell=tell)
        return measured(self.kind, diagonal, count, (), model)

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        diagonals = [one.tensors for one in self.of_sources(sources, data, means, tell)]
        combine = fisher_mean(diagonals, self.eps, self.normalize)
        return Merged(merged_tensors(sources, combine, replace(means, ray=None)))


# --- measuring --------------------------------------------------------------------------------------------------


def fisher_diagonal(
    stock: LoadedModel,
    batches: Sequence[Batch],
    way: Fisher | None = None,
    *,
    causal: bool = False,
    chunk: int | None = None,
    seed: int = 0,
    tell: Tell | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Return role -> mean over examples of the squared gradient of log p(y | x), and the number of examples.

    Labels of several positions are drawn independently given the inputs, so that the expected square of their summed
    gradient is the sum of their Fisher information.

    Args:
        stock: The model, best in float32 and with eager attention, which `torch.func` can follow everywhere.
        batches: Inputs; with labels, only the positions whose label is not -100 count, else all but padding.
        way: Where labels come from, and how many are drawn. Labels sampled from the model are classes; for a regression
            with one output, or a model without logits, they are drawn from a normal distribution of variance 1 around
            the output; for multi-label models, each label is drawn by itself.
        causal: Whether a position predicts the label of the next one.
        chunk: Examples at once (default: as many as fit into 1 GiB of gradients).
        seed: Of the draws.
        tell: Called with a sentence about the progress.

    Raises:
        ValueError: There are no examples, an example is only padding, given labels are missing, or no label counts.
    """
    way = way or Fisher()
    labels, draws = way.labels, way.draws
    examples = [example for batch in batches for example in unpadded(batch)]
    if not examples:
        raise ValueError("the Fisher information needs at least one example")
    if labels == "given" and any("labels" not in example for example in examples):
        raise ValueError("given labels need data with labels; or let the model draw them (--labels sampled)")
    answers = [example["labels"] for example in examples if "labels" in example]
    if answers and all(bool((answer == IGNORED).all()) for answer in answers):
        raise ValueError("the data leave nothing to predict: no label counts")
    tensors = {role: stock.tensor(role).detach() for role in stock.roles}
    squares = {role: torch.zeros_like(tensor) for role, tensor in tensors.items()}
    held = chunk or max(1, min(64, ROOM // sum(tensor.numel() for tensor in tensors.values())))
    gradients = _Gradients(stock, labels, causal)
    done = 0
    with seeded(seed, stock.model.device):
        for some in alike(examples, held):
            for _ in range(draws if labels == "sampled" else 1):
                for role, gradient in gradients(tensors, some).items():
                    squares[role] += gradient.square().sum(0)
            done += examples_in(some)
            if tell:
                tell(f"Fisher information: example {done} of {len(examples)}")
    count = len(examples) * (draws if labels == "sampled" else 1)
    return {role: square / count for role, square in squares.items()}, len(examples)


class _Gradients:
    """Per-example gradients of the log-likelihood: vectorised, or one by one for a model that cannot be vectorised."""

    def __init__(self, stock: LoadedModel, labels: str, causal: bool) -> None:
        self.stock, self.labels, self.causal = stock, labels, causal
        self.options = {**without_cache(stock.model), "return_dict": True}
        self.vectorised = True

    def __call__(self, tensors: Tensors, examples: Batch) -> dict[str, Tensor]:
        """Return role -> gradients, (examples, *shape)."""
        given = {name: tensor.to(self.stock.model.device) for name, tensor in examples.items()}
        gradient = grad(self._likelihood)
        if self.vectorised:
            try:
                together: dict[str, Tensor] = vmap(gradient, (None, 0), randomness="different")(tensors, given)
                return together
            except RuntimeError:  # data-dependent control flow (a router, say), or an operator without a batching rule
                self.vectorised = False
        found: dict[str, list[Tensor]] = {}
        for row in range(examples_in(given)):
            free = {role: tensor.detach().requires_grad_() for role, tensor in tensors.items()}
            value = self._likelihood(free, {name: tensor[row] for name, tensor in given.items()})
            alone = torch.autograd.grad(value, list(free.values()), allow_unused=True, materialize_grads=True)
            for role, one in zip(free, alone, strict=True):
                found.setdefault(role, []).append(one)
        return {role: torch.stack(several) for role, several in found.items()}

    def _likelihood(self, tensors: Tensors, example: Batch) -> Tensor:
        """Return log p(y | x) of one example, a scalar, with y drawn here or given."""
        inputs = {name: tensor.unsqueeze(0) for name, tensor in example.items() if name != "labels"}
        if "input_ids" in inputs and "attention_mask" not in inputs:  # else some models look for padding in Python
            inputs["attention_mask"] = torch.ones((1, *example["input_ids"].shape), dtype=torch.long,
                                                  device=self.stock.model.device)  # fmt: skip
        output = functional_call(self.stock.model, self.stock.state(tensors), (), {**inputs, **self.options})
        config = self.stock.model.config
        problem = getattr(config, "problem_type", None)
        total = next(iter(tensors.values())).new_zeros(())
        for name, value in predictions(output).items():
            answer = example.get("labels")
            value, answer = value[0], answer if self.labels == "given" or "logits" in name else None
            if self.causal and answer is not None and answer.dim() == 1 and value.shape[0] == len(answer):
                value, answer = value[:-1], answer[1:]
            drawn = self.labels == "sampled"
            if "logits" not in name or value.shape[-1] == 1 or problem == "regression":
                total = total + _normal(value, None if drawn else answer)
            elif problem == "multi_label_classification":
                total = total + _bernoulli(value, None if drawn else answer)
            else:
                total = total + _categorical(value, answer, drawn)
        return total


def _categorical(logits: Tensor, labels: Tensor | None, drawn: bool) -> Tensor:
    """logits: (*positions, classes). labels: (*positions), -100 at positions that do not count."""
    log = logits.log_softmax(-1)
    counts = None if labels is None else (labels != IGNORED).to(log)
    if drawn:  # the inverse of the distribution function at a uniform number
        uniform = torch.rand((*logits.shape[:-1], 1), dtype=log.dtype, device=log.device)
        label = (log.detach().exp().cumsum(-1) < uniform).sum(-1).clamp_max(logits.shape[-1] - 1)
    else:
        assert labels is not None
        label = labels.clamp_min(0)
    chosen = log.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    return chosen.sum() if counts is None else (chosen * counts).sum()


def _normal(mean: Tensor, given: Tensor | None) -> Tensor:
    target = mean.detach() + torch.randn_like(mean.detach()) if given is None else given.to(mean).reshape(mean.shape)
    return -0.5 * (target - mean).square().sum()


def _bernoulli(logits: Tensor, given: Tensor | None) -> Tensor:
    target = torch.rand_like(logits.detach()) < logits.detach().sigmoid() if given is None else given
    sign = 2 * target.to(logits) - 1
    return logsigmoid(sign * logits).sum()


# --- merging ----------------------------------------------------------------------------------------------------


def fisher_mean(diagonals: Sequence[Tensors], eps: float = EPS, normalize: bool = False) -> Combine:
    """Return the average of aligned tensors with weights w_i (F_i + eps m), where m is the mean of all diagonals.

    Args:
        diagonals: One for every model, role -> F in the shapes of the aligned tensors. Roles without one, and
            parameters whose F is zero in every model, are averaged plainly.
        eps: See above, in (0, 1].
        normalize: Divide every model's diagonal by its mean first. The diagonal of a model that is sure of its answers
            is small everywhere, so that without this the result is nearly the other model.

    Raises:
        ValueError: eps is out of bounds. The average raises it too, for weights that are negative or all zero.
    """
    eps = checked(Share, "eps", eps)
    if normalize:
        means = [_mean(diagonal.values()) or 1.0 for diagonal in diagonals]
        diagonals = [
            {role: f / mean for role, f in diagonal.items()} for diagonal, mean in zip(diagonals, means, strict=True)
        ]
    floor = eps * _mean(f for diagonal in diagonals for f in diagonal.values()) or 1.0

    def combine(tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        if min(weights) < 0 or not sum(weights) > 0:
            raise ValueError("Fisher merging needs weights that are not negative, and not all zero")
        above, below = torch.zeros_like(tensors[0]), torch.zeros_like(tensors[0])
        for tensor, weight, diagonal in zip(tensors, weights, diagonals, strict=True):
            role = next((name for name in (entry.role, entry.alias) if name in diagonal), None)
            precision = torch.full_like(tensor, floor)
            if role is not None:
                corner = tuple(slice(0, length) for length in tensor.shape)
                precision += diagonal[role].to(tensor)[corner]
            above += weight * precision * tensor
            below += weight * precision
        return above / below

    return combine


def _mean(tensors: Iterable[Tensor]) -> float:
    """Return the mean of all entries; 0 if there are none."""
    tensors = list(tensors)
    return sum(float(f.sum(dtype=torch.float64)) for f in tensors) / max(1, sum(f.numel() for f in tensors))
