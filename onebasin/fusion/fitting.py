# SPDX-License-Identifier: Apache-2.0
"""Fitting the layers of a merged model one after another, in forward passes beside the models that it was merged from.

`progressive` explains what is fitted and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from onebasin.engine import Tell
from onebasin.models import ModelError
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call, hooks, run, samples
from onebasin.symmetry.tables.axes import leaves

from .paused_forward import Pass, current, pause
from .ridge import Sums, best_solution, cross, gram, solution


@dataclass
class Fitting:
    """The layers of `student`, fitted in forward passes over all batches beside those of the `teachers`.

    chosen: module -> its ridge: the only one, or the one with the least squared error on `held_out` (None where no
    change is best). repeated: modules that are called several times in one pass. made: module -> its change since the
    average.
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
        self.places: dict[str, int] = {}  # module name without numbers -> index of the ridge of the last such layer
        self.sums: dict[str, tuple[Sums, Sums]] = {}

    def walk(self, settled: bool = False) -> None:
        """Run teachers and student through all batches in step, and fit each layer of the student on the way.

        A layer that is called several times is fitted, at each call, to all calls so far. If `settled`, it is only
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
        """Change the layers that are called several times by the solution for all their calls, times `step`."""
        for module in sorted(self.repeated):
            self._change(module, step)

    def _grams(self, mine: Sequence[_Seen], constant: bool) -> tuple[Tensor, Tensor]:
        """Return the Gram matrices of the student's inputs: of the batches to fit on, and of those held out."""
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
        """Add the error of one call of a layer to its sums."""
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
        if bool(made.any()):  # an earlier call made part of this change: ask for all of it
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
        """Scale, in every coordinate, the standard deviation of the mean outputs to the mean of the models'
        deviations."""
        centre, deviation = self._moments(wanted)
        mean = torch.zeros_like(deviation)
        for weight, seen in zip(self.weights, theirs, strict=True):
            mean += weight * self._moments([one.value for one in seen])[1]
        most = len(self.weights) ** 0.5  # the ratio for outputs that are independent and equally weighted
        scale = (mean / deviation).nan_to_num(1.0).clamp(1.0, most)
        for value in wanted:
            value.sub_(centre).mul_(scale).add_(centre)

    def _moments(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation over the batches to fit on, (n,) each."""
        rows = [samples(value, mask) for value, mask in zip(values, self.masks, strict=True)][: len(self.batches)]
        count = sum(map(len, rows))
        mean = torch.stack([some.sum(0) for some in rows]).double().sum(0) / count
        square = torch.stack([torch.linalg.vector_norm(some, dim=0) for some in rows]).double().square().sum(0) / count
        deviation = (square - mean.square()).clamp_min(0.0).sqrt()
        return mean.to(values[0]), deviation.to(values[0])

    def _change(self, module: str, step: float = 1.0) -> Tensor:
        """Change a layer by the solution of its sums, times `step`, and return the change."""
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
    """Whether an output stays inside attention or a feed-forward layer."""
    roots = [stock.signature.root[leaf.space] for leaf in leaves(call.axes(stock)[1]) if not leaf.constant]
    return not call.norm and all(stock.signature.spaces[root].part in ("attention", "ffn") for root in roots)


def _same(first: Sequence[tuple[Tensor, int]], second: Sequence[tuple[Tensor, int]]) -> bool:
    return all(a is b and v == w for (a, v), (b, w) in zip(first, second, strict=True))


@dataclass(frozen=True)
class _Seen:
    """inputs, output: of the layer. value: the output, or the input of a norm that contains it; changes to it reach the
    rest of the pass."""

    inputs: Tensor
    output: Tensor
    value: Tensor

    def asked(self, times: int) -> Tensor:
        """Return the outputs that are compared, with a share of the rest of the value."""
        return self.value if times == 1 or self.output is self.value else self.output.lerp(self.value, 1 / times)


class _Walk:
    """One model's passes over all batches, which pause at every call that is measured."""

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
        """Advance every pass to `call`."""
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
        """Add to `value` the inputs x times the change `delta`."""
        rows = delta if self.bias is None else delta[:-1]
        if value.is_contiguous():  # in one pass over it
            value.view(-1, value.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), rows)
        else:
            value.add_(x @ rows)
        if self.bias is not None:
            value.add_(delta[-1])
