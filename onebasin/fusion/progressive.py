# SPDX-License-Identifier: Apache-2.0
"""Progressive merging: the merged model's linear layers are fitted one after another, in closed form.

Start from the plain average of aligned models. In the order of execution, let X be the inputs of a layer in the
*merged* model as it is by now, W its averaged weights (a bias is one more input, always 1), R what its output lacks:

    R = sum_j w_j Y_j - Y        Y: the layer's output; for layers that write the residual stream, the stream after it
    W <- W + (X^T X + r D)^-1 X^T R        D = diag(X^T X)

the least-squares solution with a ridge r towards the average. Each layer takes the ridge that leaves the least |R|^2
on calibration data that are held out: they walk along, but enter no sum. Because X comes from the merged model and R
compares with the stream rather than with the layer's own output, each layer also repairs what earlier ones left wrong.
With all weight on one model, or with equal models, R is zero and nothing changes.

The mean of outputs that agree in part varies less than each of them, so queries, keys and neurons are fitted smaller
than the softmax and the activation function after them expect. With `spread`, what stays inside attention or a
feed-forward layer is compared with mu + s (sum_j w_j Y_j - mu) instead, coordinate by coordinate: mu is the mean over
samples and s the models' mean standard deviation over that of the mean, which is 1 for equal models. (REPAIR, Jordan et
al., 2023, restores the same statistics after averaging.)

A layer that is called K times in one pass (ALBERT) has one W for all calls, and its earlier calls see later changes.
Every call is then asked for a K-th of what it inherits wrong, and the walk is repeated with these layers as they are by
now: what all their calls lack together gives the next change, which is halved until predictions on held-out data
improve. Where nothing is left to change, W solves the equations of all calls together.

RegMean (Jin et al., 2023, Eq. 2) solves the same kind of problem with the inputs of the models that are merged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onebasin.data.calibration import Data
from onebasin.data.teaching import Teachers, divergence, forward_of, mean_loss, split_held_out
from onebasin.engine import Means, Tell
from onebasin.models import ModelError
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch, Call, hooks, linear_calls, run, samples
from onebasin.settings import setting
from onebasin.symmetry.tables.axes import leaves

from .average import average
from .method import Merged, Method, Sources
from .paused_forward import Pass, current, pause
from .ridge import Sums, best_solution, cross, gram, solution
from .tensors import merged_tensors

RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
ROUNDS, SMALLEST = 6, 1 / 64  # where layers are called several times: walks at most, and the least part of a change
AVERAGE, FITTED = "average", "progressive"  # what is compared at the end


@dataclass(frozen=True)
class Progressive:
    """tensors: role -> merged tensor. fitted: False where the plain average was better in the end.

    ridges: module -> the ridge that its layer took, None where it kept its average. losses: of the plain average and of
    the fitted model on held-out data, empty where there was nothing to choose. skipped: linear layers that keep their
    average, because the models do not share them or they are tied.
    """

    tensors: dict[str, Tensor]
    fitted: bool
    ridges: dict[str, float | None] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def merged(self, sources: Sources) -> Merged:
        """Return the tensors under the template's names, and what is said about the fit."""
        entries = sources.signature.tensors.items()
        pairs = (pair for role, entry in entries if entry.stored for pair in entry.split(self.tensors[role]))
        return Merged(pairs, {"ridges": self.ridges, "held_out_losses": self.losses})


@dataclass(frozen=True)
class ProgressiveMerge(Method):
    """The average, whose linear layers are then fitted to calibration data one after another.

    spread: whether targets inside attention and feed-forward layers keep the models' spread, as above. ridge: one
    value, or several, of which each layer takes its best on data held out. settle: whether to walk again where layers
    are called several times, which takes up to seven times as long.
    """

    fitted: ClassVar[bool] = True

    spread: bool = setting(False, "Let queries, keys and neurons vary as much as the models' do.")
    ridge: float | Sequence[float] = RIDGES
    settle: bool = True

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

    With several ridges the plain average is kept where it predicts better than the fitted model on held-out data: by
    the KL divergence from the mixture of the models' predictions; without logits, by squared distance from their mean
    output.

    Args:
        sources: the models.
        batches: their inputs; padding is left out where there is an attention_mask.
        held_out: those that ridges are chosen by (default: a sixteenth of the batches, at least one, which then fit
            nothing).
        how: the settings (default: those of `ProgressiveMerge()`).
        means: the type and device of the arithmetic.
        tell: called with a sentence for every layer.

    Raises:
        ValueError: for too few batches.
        ModelError: for a model whose layers cannot be followed.
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
    by_name = {entry.name: role for role, entry in student.signature.tensors.items()}
    plain = merged_tensors(sources, average, replace(means, workers=1, ray=None))
    mean = {by_name[name]: tensor for name, tensor in plain}
    student.fill(mean.__getitem__)
    student.fill_buffers(mean.__getitem__)
    calls = linear_calls(student, {key: value[:2] for key, value in fit[0].items()})
    answers = Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in teachers])

    def held_out_loss() -> float:
        shares = [weight / sum(weights) for weight in weights]
        return mean_loss(divergence, partial(forward_of(student), student.parameter), answers, shares, held or fit)

    losses = {AVERAGE: held_out_loss()} if held else {}
    fitted = [call for call in calls if call.weight in sources.shared and not student.shared(call.weight)]
    fitting = Fitting(teachers, student, weights, ridges, fitted, fit, held, how.spread, tell)
    fitting.walk()
    if fitting.repeated and how.settle:
        _settle(fitting, held_out_loss)
    skipped = [call.weight for call in calls if call not in fitted]
    if held:
        losses[FITTED] = held_out_loss()
    better = not held or losses[FITTED] < losses[AVERAGE]
    if better:
        mean.update({role: tensor.detach() for role, tensor in student.parameter.items()})
    return Progressive(mean, better, fitting.chosen, losses, skipped)


def _settle(fitting: Fitting, loss: Callable[[], float]) -> None:
    """Walk again with the layers that are called several times as they are, then change them, while that helps.

    A change that makes the predictions worse is taken back and halved.
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
    return {role: tensor.detach().clone() for role, tensor in fitting.student.parameter.items()}, dict(fitting.made)


def _restore(fitting: Fitting, state: _State) -> None:
    fitting.student.fill(state[0].__getitem__)
    fitting.made = dict(state[1])


# --- the fit ----------------------------------------------------------------------------------------------------


@dataclass
class Fitting:
    """The layers of `student`, fitted while it walks beside the `teachers` through all batches.

    chosen: module -> the ridge that it took: the only one, or that with the least squared error on `held_out` (None:
    no change is best). repeated: modules that are called several times in one pass. made: module -> its change since
    the average.
    """

    teachers: Sequence[LoadedModel]
    student: LoadedModel
    weights: Sequence[float]
    ridges: Sequence[float]
    calls: Sequence[Call]
    batches: Sequence[Batch]
    held_out: Sequence[Batch] = ()
    spread: bool = False
    tell: Tell | None = None

    def __post_init__(self) -> None:
        self.every = [*self.batches, *self.held_out]
        self.masks = [batch.get("attention_mask") for batch in self.every]
        self.times = Counter(call.module for call in self.calls)
        self.spreading = {call.module for call in self.calls if self.spread and _inside(call, self.student)}
        self.repeated = {module for module, count in self.times.items() if count > 1}
        self.layers = {call.module: _Layer(self.student, call) for call in self.calls}
        self.made = {name: layer.weight.new_zeros(layer.shape) for name, layer in self.layers.items()}
        self.chosen: dict[str, float | None] = {}
        self.places: dict[str, int] = {}  # module without numbers -> place of the ridge that the last such layer took
        self.sums: dict[str, tuple[Sums, Sums]] = {}

    def walk(self, settled: bool = False) -> None:
        """Walk teachers and student through all batches together; fit each layer of the student on the way.

        A layer that is called several times is fitted at each call to all calls so far; if `settled`, it is only
        measured.
        """
        self.sums = {}
        walks = [_Walk(stock, self.calls, self.every) for stock in (*self.teachers, self.student)]
        before: tuple[list[tuple[Tensor, int]], bool, tuple[Tensor, Tensor]] | None = None
        try:
            for number, call in enumerate(self.calls, 1):
                if self.tell:
                    self.tell(f"fitting layer {number} of {len(self.calls)}: {call.module}")
                *theirs, mine = [walk.advance(call) for walk in walks]
                layer = self.layers[call.module]
                inputs = [(here.inputs, here.inputs._version) for here in mine]
                constant = layer.bias is not None
                if before is None or before[1] != constant or not _same(before[0], inputs):
                    before = inputs, constant, self._grams(mine, constant)
                self._add(call, before[2], mine, theirs)
                if settled and call.module in self.repeated:
                    continue
                change = self._change(call.module)
                for here in mine:
                    layer.apply(change, here.inputs, here.value)
        finally:
            for walk in walks:
                walk.close()

    def change_repeated(self, step: float = 1.0) -> None:
        """Change the layers that are called several times by the errors of all their calls, times `step`."""
        for module in sorted(self.repeated):
            self._change(module, step)

    def _grams(self, mine: Sequence[_Seen], constant: bool) -> tuple[Tensor, Tensor]:
        """Of the student's inputs: what is fitted on, and what is held out."""
        found: list[Tensor | None] = [None, None]
        for b, here in enumerate(mine):
            new = gram(samples(here.inputs, self.masks[b]), constant)
            old = found[b >= len(self.batches)]
            found[b >= len(self.batches)] = new if old is None else old.add_(new)
        assert found[0] is not None
        return found[0], found[0] if found[1] is None else found[1]

    def _add(
        self, call: Call, grams: tuple[Tensor, Tensor], mine: Sequence[_Seen], theirs: Sequence[Sequence[_Seen]]
    ) -> None:
        """Add to the sums of a layer what one of its calls lacks."""
        layer, times = self.layers[call.module], self.times[call.module]
        wanted = [self._mean([seen[b].asked(times) for seen in theirs]) for b in range(len(mine))]
        if call.module in self.spreading:
            self._spread_out(wanted, theirs)
        crosses = [layer.weight.new_zeros(layer.shape) for _ in grams]
        for b, here in enumerate(mine):
            lacking, mask = wanted[b].sub_(here.asked(times)), self.masks[b]
            rows = samples(here.inputs, mask), samples(lacking, mask)
            crosses[b >= len(self.batches)] += cross(*rows, layer.bias is not None)
        made = self.made[call.module]
        if bool(made.any()):  # an earlier call made this part: ask for the whole change
            for own, product in zip(crosses, grams, strict=True):
                own += product @ made
        new = Sums(grams[0], crosses[0]), Sums(grams[1], crosses[1])
        old = self.sums.get(call.module)
        self.sums[call.module] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def _mean(self, values: Sequence[Tensor]) -> Tensor:
        total = self.weights[0] * values[0]
        for weight, value in zip(self.weights[1:], values[1:], strict=True):
            total.add_(value, alpha=weight)
        return total

    def _spread_out(self, wanted: list[Tensor], theirs: Sequence[Sequence[_Seen]]) -> None:
        """Bring the deviation of the mean outputs from their mean to that of the models', for every coordinate."""
        centre, deviation = self._moments(wanted)
        mean = torch.zeros_like(deviation)
        for weight, seen in zip(self.weights, theirs, strict=True):
            mean += weight * self._moments([one.value for one in seen])[1]
        most = len(self.weights) ** 0.5  # where the models' outputs have nothing in common
        scale = (mean / deviation).nan_to_num(1.0).clamp(1.0, most)
        for value in wanted:
            value.sub_(centre).mul_(scale).add_(centre)

    def _moments(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of what is fitted on, (n,) each."""
        rows = [samples(value, mask) for value, mask in zip(values, self.masks, strict=True)][: len(self.batches)]
        count = sum(map(len, rows))
        mean = torch.stack([some.sum(0) for some in rows]).double().sum(0) / count
        square = torch.stack([torch.linalg.vector_norm(some, dim=0) for some in rows]).double().square().sum(0) / count
        deviation = (square - mean.square()).clamp_min(0.0).sqrt()
        return mean.to(values[0]), deviation.to(values[0])

    def _change(self, module: str, step: float = 1.0) -> Tensor:
        """Change a layer by what its sums ask for, times `step`, and return the change."""
        (fit, held), made = self.sums[module], self.made[module]
        if self.held_out:
            kind = re.sub(r"\d+", "", module)
            first = self.places.get(kind, len(self.ridges) // 2)
            self.places[kind], wanted, error = best_solution(fit, held, self.ridges, first)
            better = error < held.error(made)
            self.chosen[module] = self.ridges[self.places[kind]] if better else None
            wanted = wanted if better else made
        else:
            wanted, self.chosen[module] = solution(fit, self.ridges[0]), self.ridges[0]
        change = step * (wanted - made)
        self.made[module] = made + change
        self.layers[module].change(change)
        return change


def _inside(call: Call, stock: LoadedModel) -> bool:
    """Whether the output stays inside attention or a feed-forward layer."""
    roots = [stock.signature.root[leaf.space] for leaf in leaves(call.axes(stock)[1]) if not leaf.constant]
    return not call.norm and all(stock.signature.spaces[root].part in ("attention", "ffn") for root in roots)


def _same(first: Sequence[tuple[Tensor, int]], second: Sequence[tuple[Tensor, int]]) -> bool:
    return all(a is b and v == w for (a, v), (b, w) in zip(first, second, strict=True))


@dataclass(frozen=True)
class _Seen:
    """inputs, output: of the layer. value: the output, or the norm's input that it is a part of; edits reach the
    rest."""

    inputs: Tensor
    output: Tensor
    value: Tensor

    def asked(self, times: int) -> Tensor:
        """Return the outputs that are compared, with a share of what the value holds besides."""
        return self.value if times == 1 or self.output is self.value else self.output.lerp(self.value, 1 / times)


class _Walk:
    """One model's passes over all batches, which stop where the calls are measured."""

    def __init__(self, stock: LoadedModel, calls: Sequence[Call], batches: Sequence[Batch]) -> None:
        of_module: dict[str, list[Call]] = {}
        for call in calls:
            of_module.setdefault(call.module, []).append(call)

        def returned(name: str) -> Callable[[Tensor, Tensor], None]:
            def look(x: Tensor, y: Tensor) -> None:
                here = current()
                call = of_module[name][here.counts[name]]
                here.counts[name] += 1
                if call.norm:
                    here.held[call.norm] = (call, x, y)
                else:
                    pause(call, x, y, y)

            return look

        def called(name: str) -> Callable[[Tensor], None]:
            def look(n: Tensor) -> None:
                if name in current().held:
                    pause(*current().held.pop(name), n)

            return look

        norms = {call.norm for call in calls if call.norm}
        self._hooks = hooks(stock, {name: returned(name) for name in of_module}, {name: called(name) for name in norms})
        self._hooks.__enter__()
        self.passes = [Pass(partial(run, stock, batch)) for batch in batches]

    def advance(self, call: Call) -> list[_Seen]:
        """Take every pass to `call`."""
        found = []
        for one in self.passes:
            event = one.advance()
            if event is None or event[0] != call:
                raise ModelError(f"the models do not run their layers in the same order, from '{call.module}' on")
            found.append(_Seen(*event[1:]))
        return found

    def close(self) -> None:
        for one in self.passes:
            one.close()
        self._hooks.__exit__(None, None, None)


class _Layer:
    """A linear layer as one matrix: its weight, (inputs, outputs), above its bias."""

    def __init__(self, stock: LoadedModel, call: Call) -> None:
        self.columns = call.columns
        self.weight = stock.parameter[call.weight]
        self.bias: nn.Parameter | None = stock.parameter[call.bias] if call.bias else None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape if self.columns else self.weight.mT.shape
        return inputs + (self.bias is not None), outputs

    def change(self, delta: Tensor) -> None:
        rows = delta if self.bias is None else delta[:-1]
        self.weight.data.add_(rows.mT if self.columns else rows)
        if self.bias is not None:
            self.bias.data.add_(delta[-1])

    def apply(self, delta: Tensor, x: Tensor, value: Tensor) -> None:
        """Add to `value` what the change `delta` makes of the inputs x."""
        rows = delta if self.bias is None else delta[:-1]
        if value.is_contiguous():  # in one pass over it
            value.view(-1, value.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), rows)
        else:
            value.add_(x @ rows)
        if self.bias is not None:
            value.add_(delta[-1])
