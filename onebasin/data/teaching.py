# SPDX-License-Identifier: Apache-2.0
"""Models as teachers of another: their predictions on calibration data, losses, and the order of the steps.

Learned matching and distillation share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from onebasin.engine import bfloat16_is_faster, in_bfloat16
from onebasin.running.classes import without_cache
from onebasin.running.float64 import throughout
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, examples, examples_in, rows_of

from .batches import IGNORED

Outputs = Mapping[str, Tensor]
Forward = Callable[[Mapping[str, Tensor], Batch], Outputs]  # (role -> tensor, batch) -> outputs
Kept = tuple[Tensor, Tensor | None]  # an output; or the rows that count, and their places
Loss = Callable[[Outputs, Sequence[Outputs], Sequence[float], Batch], Tensor]  # merged, models', weights, batch

HELD_OUT = 1 / 16  # share of the calibration batches on which a ridge or the best step is chosen
KEPT = 2**26  # numbers in the models' outputs that are kept at most, rather than computed again
PIECE = 2**22  # numbers in a model's outputs that are looked at together, where no gradient needs them all


def forward_of(stock: LoadedModel, mixed: bool = False) -> Forward:
    """Return a model as a function of its tensors: (role -> tensor, batch) -> `predictions`. The model is left
    unchanged. Running statistics, and tensors of stacked experts or divided ones, that are not given are its own.

    mixed: multiply matrices in bfloat16, which is faster on graphics cards and recent processors (Micikevicius et al.,
    2018); predictions are in float32.
    """
    options = {**without_cache(stock.model), "return_dict": True}

    def forward(tensors: Mapping[str, Tensor], batch: Batch) -> Outputs:
        given = {key: value.to(stock.model.device) for key, value in batch.items()}
        state = {name: tensors[role] for role, name in stock.names.items()}
        state |= {name: tensors[role] for role, name in stock.buffer.items() if role in tensors}
        if {*stock.parts, *stock.pieces} <= tensors.keys():
            state |= stock.rearranged(tensors)
        with throughout(stock.model.dtype), in_bfloat16(stock.model.device, mixed):
            outputs = predictions(functional_call(stock.model, state, (), {**given, **options}))
        return {name: output.float() for name, output in outputs.items()} if mixed else outputs

    return forward


def attention_of(mixed: bool, device: str) -> str | None:
    """Return the attention of a model that learns through `forward_of`, as `loaded_model` takes it. On processors, the
    gradient of torch's fused attention multiplies many small blocks in bfloat16, which is slow."""
    return "eager" if mixed and torch.device(device).type == "cpu" else None


def slowed(mixed: bool, device: str) -> str:
    """Return what progress says besides where products in bfloat16 were asked for and take longer; else nothing."""
    return "; bfloat16 is slower than float32 on this machine" if mixed and not bfloat16_is_faster(device) else ""


def predictions(output: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the logits of a model's output (and the loss, if labels were given); without logits, all float tensors,
    which may be in lists (the feature maps of a backbone), and a loss last."""
    several = {f"{name}.{i}": each for name, value in output.items() if isinstance(value, tuple | list)
               for i, each in enumerate(value)}  # fmt: skip
    found = ({name: value for name, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()}
             for named in (output, several))  # fmt: skip
    tensors = next(filter(None, found), {})
    logits = {name: value for name, value in tensors.items() if "logits" in name or name == "loss"}
    return logits if logits.keys() - {"loss"} else dict(sorted(tensors.items(), key=lambda one: one[0] == "loss"))


def divergence(own: Outputs, theirs: Sequence[Outputs], weights: Sequence[float], batch: Batch) -> Tensor:
    """Return the mean KL(mixture of their predictions || own) in nats, or a squared distance where there are no logits.

    If the batch has labels of the predictions' shape, only positions with a label count: a masked language model was
    never trained to predict tokens that it sees. Otherwise padding is left out by the attention_mask.

    Args:
        own: The model's outputs.
        theirs: The outputs of every teacher.
        weights: The teachers' shares.
        batch: The inputs.

    Raises:
        ValueError: No output is common to all.
    """

    def from_mixture(mine: Tensor, others: Sequence[Tensor]) -> Tensor:
        mixture = _mean(weights, [other.softmax(-1) for other in others]).clamp_min(0)  # weights may be negative
        floor = torch.finfo(mine.dtype).tiny
        return (mixture * (mixture.clamp_min(floor).log() - mine.log_softmax(-1))).sum(-1)

    return _mean_over_outputs(from_mixture, own, theirs, weights, batch)


def logit_distance(own: Outputs, theirs: Sequence[Outputs], weights: Sequence[float], batch: Batch) -> Tensor:
    """Return half the mean squared distance of the logits from the mean of theirs, up to the constant that a softmax
    ignores.

    The limit of T^2 `divergence` at a high temperature T (Hinton et al., 2015, section 2.1). It compares all logits of
    an example, where the divergence hardly depends on an example of which the models are sure. Positions, outputs
    without logits, arguments and errors are as in `divergence`.
    """

    def from_mean(mine: Tensor, others: Sequence[Tensor]) -> Tensor:
        apart = mine - _mean(weights, others)
        return (apart - apart.mean(-1, keepdim=True)).square().mean(-1) / 2

    return _mean_over_outputs(from_mean, own, theirs, weights, batch)


def _mean_over_outputs(
    of_logits: Callable[[Tensor, Sequence[Tensor]], Tensor],
    own: Outputs,
    theirs: Sequence[Outputs],
    weights: Sequence[float],
    batch: Batch,
) -> Tensor:
    """Return the mean, over all predictions that count, of `of_logits` or of the squared distance from the mean of
    theirs."""
    terms = []
    for name, mine in own.items():
        others = [outputs[name] for outputs in theirs if name in outputs and outputs[name].shape == mine.shape]
        if name == "loss" or len(others) < len(theirs):
            continue
        counted = where_counted(mine, batch)
        if counted is not None:
            mine, others = mine[counted], [other[counted] for other in others]
        if "logits" in name and mine.shape[-1] > 1:  # a single number is a regression
            terms.append(of_logits(mine, others).flatten())
        else:
            terms.append((mine - _mean(weights, others)).square().sum(-1).flatten())
    if not terms:
        raise ValueError("the models have no output in common to learn from")
    return torch.cat(terms).mean()


def where_counted(output: Tensor, batch: Batch) -> Tensor | None:
    """Return the positions of an output (..., classes) that count, (...) bool; None if all do."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if labels is not None and labels.shape == output.shape[:-1]:
        counted = labels != IGNORED
    elif mask is not None and mask.shape == output.shape[:-1]:
        counted = mask.bool()
    else:
        return None
    return None if bool(counted.all()) else counted


def _mean(weights: Sequence[float], outputs: Sequence[Tensor]) -> Tensor:
    return sum((w * output for w, output in zip(weights, outputs, strict=True)), outputs[0].new_zeros(()))


def own_loss(own: Outputs, theirs: Sequence[Outputs], weights: Sequence[float], batch: Batch) -> Tensor:
    """Return the merged model's loss on the labels in the batch, by its own class."""
    if "loss" not in own:
        raise ValueError("the task's own loss needs calibration data with labels")
    return own["loss"]


LOSSES: dict[str, Loss] = {"divergence": divergence, "logits": logit_distance, "task": own_loss}  # by their options


class Teachers:
    """The predictions of models for batches, without gradients, kept for the next time as long as there is room.

    Only positions that count are kept, and the others come back as zeros: few tokens of masked texts are hidden.
    """

    def __init__(self, models: Sequence[Callable[[Batch], Outputs]]) -> None:
        self.models = models
        self.kept: dict[int, list[dict[str, Kept]]] = {}
        self.cut: dict[int, list[Batch]] = {}
        self.room = KEPT

    @torch.no_grad()
    def pieces(self, batch: Batch) -> list[Batch]:
        """Return a batch in pieces of one example or more, the same at every call: as many as leave a model's outputs
        at `PIECE` numbers."""
        if id(batch) not in self.cut:
            numbers = sum(value.numel() for value in self.models[0](examples(batch, 0, 1)).values())
            count, step = examples_in(batch), max(1, PIECE // max(numbers, 1))
            self.cut[id(batch)] = [examples(batch, i, i + step) for i in range(0, count, step)]
        return self.cut[id(batch)]

    def forget(self, batch: Batch) -> None:
        """Make room for others: the batch does not come again."""
        self.room += _numbers(self.kept.pop(id(batch), ()))
        self.cut.pop(id(batch), None)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> list[Outputs]:
        if id(batch) in self.kept:
            return [{name: _restored(*value) for name, value in output.items()} for output in self.kept[id(batch)]]
        outputs = [model(batch) for model in self.models]
        packed = [{name: _packed(value, batch) for name, value in output.items()} for output in outputs]
        if (needed := _numbers(packed)) <= self.room:
            self.kept[id(batch)] = packed
            self.room -= needed
        return outputs


def _numbers(kept: Sequence[Mapping[str, Kept]]) -> int:
    return sum(value.numel() for output in kept for value, _ in output.values())


def _packed(output: Tensor, batch: Batch) -> Kept:
    counted = where_counted(output, batch)
    return (output, None) if counted is None else (output[counted], counted)


def _restored(rows: Tensor, counted: Tensor | None) -> Tensor:
    if counted is None:
        return rows
    output = rows.new_zeros(*counted.shape, rows.shape[-1])
    output[counted] = rows
    return output


def drawn_order(rng: np.random.Generator, steps: int, batches: int) -> list[int]:
    """Return the number of the batch for every step. Batches come in rounds, each in a new order."""
    rounds = -(-steps // batches)
    order: list[int] = np.concatenate([rng.permutation(batches) for _ in range(rounds)])[:steps].tolist()
    return order


def drawn_shares(
    rng: np.random.Generator, steps: int, models: int, interval: Sequence[float], concentration: float
) -> list[list[float]]:
    """Return the weights of the models at every step, which sum to 1.

    Args:
        rng: Draws them.
        steps: How many steps.
        models: How many weights a step.
        interval: The weight of the second of two models is uniform between these two numbers.
        concentration: The weights of more than two models are Dirichlet with this parameter for each: 1 is uniform over
            the simplex, more prefers equal weights, less prefers its edges and corners.
    """
    if models == 2:
        second = rng.uniform(interval[0], interval[1], steps)
        drawn = np.stack([1 - second, second], 1)
    else:
        drawn = rng.dirichlet([concentration] * models, steps)
    shares: list[list[float]] = drawn.tolist()
    return shares


def split_held_out(
    batches: Sequence[Batch], held_out: Sequence[Batch] | None, share: float = HELD_OUT
) -> tuple[list[Batch], list[Batch]]:
    """Split batches into those to fit on and those to choose on.

    Args:
        batches: All batches.
        held_out: The batches to choose on (default: the last `share` of all).
        share: Of the batches that are held out.

    Raises:
        ValueError: There are too few for both.
    """
    if held_out is not None and batches and held_out:
        return list(batches), list(held_out)
    if len(batches) < 2:
        raise ValueError("at least two batches of calibration data are needed, one of which is held out to choose by; "
                         "give more data, or smaller batches")  # fmt: skip
    count = max(1, round(share * len(batches)))
    return list(batches[:-count]), list(batches[-count:])


@torch.no_grad()
def mean_loss(
    loss: Loss,
    model: Callable[[Batch], Outputs],
    answers: Teachers,
    weights: Sequence[float],
    batches: Sequence[Batch],
) -> float:
    """Return the loss of a model against its teachers' answers, averaged over the predictions of every batch, and then
    over batches."""
    means = []
    for batch in batches:
        total, count = 0.0, 0
        for piece in answers.pieces(batch):
            own = model(piece)
            if here := _counted(own, piece):
                total += here * float(loss(own, answers(piece), weights, piece))
                count += here
        means.append(total / count if count else math.nan)
    return sum(means) / len(means)


def _counted(own: Outputs, batch: Batch) -> int:
    """Return how many predictions of a model count."""
    found = 0
    for name, output in own.items():
        if name != "loss":
            counted = where_counted(output, batch)
            found += output.shape[:-1].numel() if counted is None else int(counted.sum())
    return found


@torch.no_grad()
def example_losses(
    loss: Loss,
    model: Callable[[Batch], Outputs],
    answers: Callable[[Batch], Sequence[Outputs]],
    weights: Sequence[float],
    batches: Sequence[Batch],
) -> Tensor:
    """Return the loss of a model against its teachers' answers, for every example: (examples,)."""
    found = []
    for batch in batches:
        own, theirs, count = model(batch), answers(batch), examples_in(batch)
        for i in range(count):
            here = [{name: rows_of(value, count, i, i + 1) for name, value in one.items() if value.dim()}
                    for one in (own, *theirs)]  # fmt: skip
            found.append(loss(here[0], here[1:], weights, examples(batch, i, i + 1)))
    return torch.stack(found)
