# SPDX-License-Identifier: Apache-2.0
"""Fitting the layers of a merged model one after another, in forward passes beside the models that it was merged from.

`progressive` explains what is fitted and why.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from onebasin.engine import Spill, Tell
from onebasin.models import ModelError
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call, samples
from onebasin.symmetry.tables.axes import space_leaves

from .compression import Compression
from .paused_forward import Seen, Walk
from .ridge import Spread, Sums, best_solution, cross, gram, solution

ROOM = 2**27  # bytes that paused passes may hold in memory


@dataclass
class Fitting:
    """The layers of `student`, fitted in forward passes over all batches beside those of the `teachers`.

    room: bytes of memory for what the paused passes hold; the rest is in a temporary file in `folder`. chosen: module
    -> its ridge: the only one, or the one with the least squared error on `held_out` (None where no change is best).
    compression: which of the teachers' outputs are asked of the student (default: their mean). repeated: modules that
    are called several times in one pass. made: module -> its change since the average, where
    there is something to repeat.
    """

    teachers: Sequence[LoadedModel]
    student: LoadedModel
    weights: Sequence[float]
    ridges: Sequence[float]
    calls: Sequence[Call]
    batches: Sequence[Batch]
    held_out: Sequence[Batch] = ()
    spread: bool = False
    compression: Compression | None = None
    tell: Tell | None = None
    room: int = ROOM
    folder: str | None = None

    def __post_init__(self) -> None:
        self.every = [*self.batches, *self.held_out]
        self.masks = [batch.get("attention_mask") for batch in self.every]
        self.times = Counter(call.module for call in self.calls)
        kept = {call.module for call in self.calls
                if self.compression and self.compression.covers(call.axes(self.student)[1])}  # fmt: skip
        self.spreading = {call.module for call in self.calls
                          if self.spread and call.module not in kept and _inside(call, self.student)}  # fmt: skip
        self.repeated = {module for module, times in self.times.items() if times > 1}
        self.layers = {call.module: _Layer(self.student, call) for call in self.calls}
        self.made: dict[str, Tensor] = {}
        self.chosen: dict[str, float | None] = {}
        self.places: dict[str, int] = {}  # module name without numbers -> index of the ridge of the last such layer
        self.sums: dict[str, tuple[Sums, Sums]] = {}  # of repeated modules

    def walk(self, settled: bool = False) -> None:
        """Run teachers and student through all batches in step, and fit each layer of the student on the way.

        A layer that is called several times is fitted, at each call, to all calls so far. If `settled`, it is only
        measured.
        """
        self.sums = {}
        spill = Spill(self.room, self.folder)
        walks = [Walk(stock, self.calls, self.every, spill) for stock in (*self.teachers, self.student)]
        try:
            with spill:
                self._fit(walks[:-1], walks[-1], spill, settled)
            for walk in walks:
                walk.close()
            spill.restore()  # what outlives the passes
        finally:
            for walk in walks:
                walk.close()
            spill.close()

    def _fit(self, teachers: Sequence[Walk], student: Walk, spill: Spill, settled: bool) -> None:
        everything = range(len(self.every))
        asked: list[deque[Tensor]] = [deque() for _ in everything]  # targets of the next calls
        last: dict[int, Seen] = {}  # batch -> what the student showed at the last call
        lacking: Callable[[Seen], None] | None = None  # gives it the change of that call's layer
        grams, had_constant, numbers = list[Tensor](), False, count(1)
        for block in _blocks(self.calls, self.student):
            moments = {call.module: [Spread() for _ in (*teachers, student)] for call in block
                       if call.module in self.spreading}  # fmt: skip
            for b in everything if moments else ():
                asked[b] = self._ahead(teachers, block, b, moments)
                spill.rest(b)
            for call in block:
                number = next(numbers)
                if self.tell:
                    self.tell(f"fitting layer {number} of {len(self.calls)}: {call.module}")
                layer, times = self.layers[call.module], self.times[call.module]
                constant = layer.bias is not None
                crosses = [layer.weight.new_zeros(layer.shape) for _ in range(2)]
                fresh = [layer.weight.new_zeros(layer.shape[:1] * 2) for _ in range(2)]
                same = set()
                for b, mask in enumerate(self.masks):
                    part = int(b >= len(self.batches))
                    asked[b] = asked[b] or self._ahead(teachers, block, b, moments)
                    wanted = asked[b].popleft()
                    if call.module in moments:
                        self._spread_out(wanted, moments[call.module])
                    if lacking is not None:
                        lacking(last[b])
                    here = student.advance(b, call)
                    x = samples(here.inputs, mask)
                    same.add(b in last and constant == had_constant and here.same_inputs(last[b]))
                    if False in same:
                        fresh[part] += gram(x, constant)
                    crosses[part] += cross(x, samples(wanted.sub_(here.asked(times)), mask), constant)
                    if number < len(self.calls):
                        last[b] = here
                    spill.rest(b)
                if len(same) > 1:
                    raise ModelError(f"the batches do not run in the same way through '{call.module}'")
                grams, had_constant = fresh if False in same else grams, constant
                sums = self._sums(call.module, grams, crosses)
                change = None if settled and call.module in self.repeated else self._change(call.module, sums)
                lacking = None if change is None else partial(layer.apply, change)

    def change_repeated(self, step: float = 1.0) -> None:
        """Change the layers that are called several times by the solution for all their calls, times `step`."""
        for module in sorted(self.repeated):
            self._change(module, self.sums[module], step)

    def _ahead(
        self, teachers: Sequence[Walk], block: Sequence[Call], b: int, moments: Mapping[str, Sequence[Spread]]
    ) -> deque[Tensor]:
        """Advance a batch of the teachers through a block, and return what is asked of each call: the mean of their
        outputs. Those of a teacher, and at last the mean, enter the moments."""
        found = deque[Tensor]()
        for call in block:
            theirs = [walk.advance(b, call).asked(self.times[call.module]) for walk in teachers]
            if self.compression:
                mean = self.compression.outputs(call.axes(self.student)[1], theirs)
            else:
                mean = self.weights[0] * theirs[0]
                for weight, value in zip(self.weights[1:], theirs[1:], strict=True):
                    mean.add_(value, alpha=weight)
            if b < len(self.batches):
                for own, value in zip(moments.get(call.module, ()), (*theirs, mean), strict=False):
                    own.add(samples(value, self.masks[b]))
            found.append(mean)
        return found

    def _sums(self, module: str, grams: Sequence[Tensor], crosses: Sequence[Tensor]) -> tuple[Sums, Sums]:
        """Return the sums of all calls of a layer so far."""
        if module in self.made:  # an earlier call made part of this change: ask for all of it
            for own, product in zip(crosses, grams, strict=True):
                own += product @ self.made[module]
        fit, held = (Sums(*pair) for pair in zip(grams, crosses, strict=True))
        if module in self.sums:
            fit, held = self.sums[module][0] + fit, self.sums[module][1] + held
        if module in self.repeated:
            self.sums[module] = fit, held
        return fit, held

    def _spread_out(self, wanted: Tensor, moments: Sequence[Spread]) -> None:
        """Scale, in every coordinate, the standard deviation of the mean outputs to the mean of the models'
        deviations."""
        *theirs, of_mean = moments
        mean = sum(weight * own.deviation for weight, own in zip(self.weights, theirs, strict=True))
        most = len(self.weights) ** 0.5  # the ratio for outputs that are independent and equally weighted
        scale = (mean / of_mean.deviation).nan_to_num(1.0).clamp(1.0, most).to(wanted)
        centre = of_mean.mean.to(wanted)
        wanted.sub_(centre).mul_(scale).add_(centre)

    def _change(self, module: str, sums: tuple[Sums, Sums], step: float = 1.0) -> Tensor:
        """Change a layer by the solution of its sums, times `step`, and return the change."""
        fit, held = sums
        made = self.made.get(module, torch.zeros_like(fit.cross))
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
        if self.repeated:
            self.made[module] = made + change
        self.layers[module].change(change)
        return change


def _blocks(calls: Sequence[Call], stock: LoadedModel) -> list[list[Call]]:
    """Return the calls in the order given, those of one layer of the model together, none of a module twice.

    The teachers run ahead by a block: between the layers of a model a pass holds least.
    """
    found: list[list[Call]] = []
    place: int | None = None
    for call in calls:
        layer = stock.signature.tensors[call.weight].layer
        if layer is None or layer != place or call.module in {other.module for other in found[-1]}:
            found.append([])
        found[-1].append(call)
        place = layer
    return found


def _inside(call: Call, stock: LoadedModel) -> bool:
    """Whether an output stays inside attention or a feed-forward layer."""
    roots = [stock.signature.root[leaf.space] for leaf in space_leaves(call.axes(stock)[1])]
    return not call.norm and all(stock.signature.spaces[root].part in ("attention", "ffn") for root in roots)


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

    def apply(self, delta: Tensor, seen: Seen) -> None:
        """Let what a call returned have the change `delta` of its layer."""
        x, value = seen.inputs, seen.value
        rows = delta if self.bias is None else delta[:-1]
        if value.is_contiguous():  # in one pass over it
            value.view(-1, value.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), rows)
        else:
            value.add_(x @ rows)
        if self.bias is not None:
            value.add_(delta[-1])
