# SPDX-License-Identifier: Apache-2.0
"""Progressive merging: the merged model's linear layers are fitted one after another, in closed form.

Start from the plain average of aligned models. In the order of execution, let X be the inputs of a layer in the
*merged* model with all changes so far, W its averaged weights (a bias is one more input, always 1), and R the error of
its output:

    R = sum_j w_j Y_j - Y        Y: the layer's output; for layers that write the residual stream, the stream after it
    W <- W + (X^T X + r D)^-1 X^T R        D = diag(X^T X)

the least-squares solution with a ridge r towards the average. Each layer takes the ridge that leaves the least |R|^2 on
held-out calibration data, which take part in the passes but in no sum. X comes from the merged model, and R compares
the stream rather than the layer's own output, so each layer also corrects errors of earlier ones. With all weight on
one model, or with equal models, R is zero and nothing changes.

The mean of outputs that only partly agree varies less than each of them, so fitted queries, keys and neurons are
smaller than the softmax and the activation function after them expect. With `spread`, outputs inside attention or a
feed-forward layer are compared instead, coordinate by coordinate, with mu + s (sum_j w_j Y_j - mu): mu is the mean over
samples, and s the mean of the models' standard deviations divided by that of the mean output; it is 1 for equal models.
(REPAIR, Jordan et al., 2023, restores the same statistics after averaging.)

With `select`, the models are not averaged but compressed to the best of their neurons, heads and directions of the
stream (`compression`). W is then that compression, and sum_j w_j Y_j becomes sum_j T_j Y_j.

A layer that is called K times in one pass (ALBERT) has one W for all calls, and its earlier calls see later changes.
Every call then corrects a K-th of the error that it inherits, and the passes are repeated with these layers as they are
by then: the errors of all their calls together give the next change, which is halved until predictions on held-out data
improve. Once nothing changes any more, W solves the equations of all calls together.

A fit to few inputs that are unlike real ones depends on which they are. With several bags, the data are divided among
as many fits, and the result is their mean: what they share stays, and the variance of the rest is divided by their
number (bagging, Breiman, 1996). On real data, one fit to all of them is better.

RegMean (Jin et al., 2023, Eq. 2) solves the same kind of problem with the inputs of the models that are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from onebasin.data.calibration import Data, recut
from onebasin.data.teaching import Teachers, divergence, forward_of, mean_loss, split_held_out
from onebasin.engine import Means, Tell
from onebasin.models.pairing import corner
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import Batch, examples, examples_in, linear_calls, routed
from onebasin.settings import Count, setting

from .compression import Compression, compress
from .fitting import Fitting
from .method import Merged, Method, Sources
from .tensors import averaged

RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
ROUNDS, SMALLEST = 6, 1 / 64  # where layers are called several times: most passes, and the least share of a change
AVERAGE, FITTED = "average", "progressive"  # what is compared at the end


@dataclass(frozen=True)
class Progressive:
    """tensors: role -> merged tensor. fitted: False if the plain average was better.

    ridges: module -> the ridge of its layer in each bag, None where that kept its average. losses: on held-out data, of
    the plain average and of the fitted model; empty if there was nothing to choose.
    """

    tensors: dict[str, Tensor]
    fitted: bool
    ridges: dict[str, list[float | None]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def merged(self, sources: Sources) -> Merged:
        """Return the tensors under the template's names, with facts about the fit."""
        entries = sources.signature.tensors.items()
        pairs = (pair for role, entry in entries if entry.stored for pair in entry.split(self.tensors[role]))
        return Merged(pairs, {"ridges": self.ridges, "held_out_losses": self.losses})


@dataclass(frozen=True)
class ProgressiveMerge(Method):
    """The average, with its linear layers then fitted to calibration data one after another.

    spread: whether targets inside attention and feed-forward layers keep the models' spread, as above. ridge: one
    value, or several, of which each layer takes the best on held-out data. select: whether to compress the models
    instead of averaging them. settle: whether to repeat the passes where layers are called several times, which takes
    up to seven times as long. bags: how many parts of the data are fitted to one by one, as above.
    """

    fitted: ClassVar[bool] = True

    spread: bool = setting(False, "Let queries, keys and neurons vary as much as the models' do.")
    ridge: float | Sequence[float] = RIDGES
    settle: bool = True
    select: bool = setting(
        False, "Keep the best neurons, heads and directions of all models, instead of the mean of pairs."
    )
    bags: Count = setting(1, "Fit to so many parts of the data one by one, and take the mean of the fits.")

    @property
    def needs_data(self) -> bool:
        return True

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        return merge_progressively(sources, *data.split, self, means, tell).merged(sources)


def merge_progressively(
    sources: Sources,
    batches: Sequence[Batch],
    held_out: Sequence[Batch] | None = None,
    how: ProgressiveMerge | None = None,
    means: Means | None = None,
    tell: Tell | None = None,
) -> Progressive:
    """Merge aligned models over calibration batches.

    With several ridges, the plain average is kept if it predicts better than the fitted model on held-out data, by the
    KL divergence from the mixture of the models' predictions; without logits, by the squared distance from their mean
    output.

    Args:
        sources: the models.
        batches: their inputs; padding is left out where there is an attention_mask.
        held_out: batches to choose ridges by (default: a sixteenth of `batches`, at least one, on which nothing is then
            fitted).
        how: the settings (default: those of `ProgressiveMerge()`).
        means: the type and device of the arithmetic.
        tell: called with a sentence for every layer.

    Raises:
        ValueError: for too few batches, or fewer examples than bags.
        ModelError: for a model whose layers cannot be traced.
    """
    how, means, weights = how or ProgressiveMerge(), means or Means(), sources.weights
    place: dict[str, Any] = {"dtype": means.dtype, "device": means.device}
    ridges = [float(how.ridge)] if isinstance(how.ridge, (int, float)) else sorted(map(float, how.ridge))
    if not ridges or min(ridges) <= 0:
        raise ValueError("the ridge of progressive merging must be positive")
    if not batches:
        raise ValueError("progressive merging needs calibration data")
    fit, held = split_held_out(batches, held_out) if len(ridges) > 1 else (list(batches), [])
    teachers = [loaded_model(model, **place) for model in sources.models]
    student = loaded_model(sources.models[sources.template], **place)
    mean = averaged(sources, means)
    student.fill(mean)
    student.fill_buffers(mean)
    example = examples(fit[0], 0, 2)
    calls = linear_calls(student, example)
    other = routed([student, *teachers], example, {call.module for call in calls})
    calls = [call for call in calls if call.module not in other]
    answers = Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in teachers])

    def loss_on(some: Sequence[Batch]) -> float:
        shares = [weight / sum(weights) for weight in weights]
        return mean_loss(divergence, partial(forward_of(student), student.parameter), answers, shares, some)

    losses = {AVERAGE: loss_on(held)} if held else {}
    fitted = [call for call in calls if call.weight in sources.shared and not student.shared(call.weight)]
    parts = list(zip(bagged(fit, how.bags), bagged(held, how.bags) if held else [[]] * how.bags, strict=True))
    ridges_of: dict[str, list[float | None]] = {call.module: [] for call in fitted}
    total: dict[str, Tensor] = {}
    compression = compress(teachers, calls, fit, weights) if how.select else None
    start = partial(_compressed, sources, means, compression) if compression else mean
    for number, (some, choosing) in enumerate(parts, 1):
        if number > 1 or compression:
            student.fill(start)
        fitting = Fitting(
            teachers, student, weights, ridges, fitted, some, choosing, how.spread, compression, tell,
            folder=means.units,
        )  # fmt: skip
        fitting.walk()
        if fitting.repeated and how.settle:
            _settle(fitting, partial(loss_on, choosing or some))
        for module, ridge in fitting.chosen.items():
            ridges_of[module].append(ridge)
        if len(parts) > 1:
            for role, tensor in student.tensors.items():
                share = tensor.detach() / len(parts)
                total[role] = total[role].add_(share) if role in total else share
    if total:
        student.fill(total.__getitem__)
    if held:
        losses[FITTED] = loss_on(held)
    better = not held or losses[FITTED] < losses[AVERAGE]
    if not better:
        student.fill(mean)
    tensors = {
        role: student.parameter[role].detach() if role in student.parameter else mean(role)
        for role in sources.signature.tensors
    }
    return Progressive(tensors, better, ridges_of, losses)


def _compressed(sources: Sources, means: Means, compression: Compression, role: str) -> Tensor:
    """Return a tensor of the compressed model. Rows that a model lacks (positions) are taken to be the template's."""
    entry = sources.signature.tensors[role]
    if not sources.has(role):
        tensor = sources.models[sources.template].read(role, means.dtype, means.device)
        alone = [float(j == sources.template) for j in range(len(sources.models))]
        return replace(compression, weights=alone).share(sources.template, entry.axes, tensor, entry.diagonal)
    tensors = sources.read(role, means)
    base, common = tensors[sources.template], corner(tensor.shape for tensor in tensors)
    for j, tensor in enumerate(tensors):
        if tensor.shape != base.shape:
            tensors[j] = base.clone()
            tensors[j][common] = tensor[common]
    return compression.joined(entry.axes, tensors, entry.diagonal)


def bagged(batches: Sequence[Batch], bags: int) -> list[Sequence[Batch]]:
    """Return batches divided into bags of nearly as many examples. Raises ValueError for fewer examples than bags."""
    if bags == 1:
        return [batches]
    rows = recut(batches, 1)
    if len(rows) < bags:
        raise ValueError(f"{len(rows)} examples cannot be divided into {bags} bags; give more data, or fewer bags")
    most = max(examples_in(batch) for batch in batches)
    return [recut(rows[number::bags], most) for number in range(bags)]


def _settle(fitting: Fitting, loss: Callable[[], float]) -> None:
    """Repeat the passes and change the layers that are called several times, as long as that helps.

    A change that makes predictions worse is undone and halved.
    """
    least, step = loss(), 1.0
    for _ in range(ROUNDS):
        before = _state(fitting)
        fitting.walk(settled=True)
        walked = _state(fitting)
        fitting.change_repeated(step)
        while (found := loss()) >= least and step > SMALLEST:
            _restore(fitting, walked)
            step /= 2
            fitting.change_repeated(step)
        if found >= least:
            _restore(fitting, before)
            return
        least = found


_State = tuple[dict[str, Tensor], dict[str, Tensor]]


def _state(fitting: Fitting) -> _State:
    return {role: tensor.detach().clone() for role, tensor in fitting.student.tensors.items()}, dict(fitting.made)


def _restore(fitting: Fitting, state: _State) -> None:
    fitting.student.fill(state[0].__getitem__)
    fitting.made = dict(state[1])
