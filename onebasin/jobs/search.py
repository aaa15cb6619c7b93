# SPDX-License-Identifier: Apache-2.0
"""Choosing how to merge: candidates in the order of what they cost, while time lasts; data held out decide.

    closed forms     the average of models matched by weights, then by activations, and of models as they are;
                     each with progressive merging after it, and the best of them with `spread`
    learning         matching learned at level `invertible`, from the best start, on pictures that the models imagine:
                     what is distilled on them gets worse on real ones, exact copies of the models do not
    distilling       else, the best so far, taught by the models

Without `--budget` learning takes three minutes and distilling one, where models that were trained apart imagine or know
the inputs; or what is left of five, where the best closed form is not shown to work by the measure of the verdict.
Models of one base stay as they are, averaged; with data, progressive merging is a candidate, too.

The candidate is taken whose predictions have the least KL divergence from the mixture of the models', on a quarter of
the data on which nothing was fitted. No family has a rule of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onebasin.data.calibration import Data, is_for, noised, recut
from onebasin.data.made import LENGTH, guessed
from onebasin.data.teaching import (
    Forward,
    Teachers,
    divergence,
    example_losses,
    forward_of,
    predictions,
)
from onebasin.engine import MOST_STEPS, Tell, available_memory, bfloat16_is_faster
from onebasin.fusion.average import Average
from onebasin.fusion.method import Merged, Method, Sources
from onebasin.fusion.progressive import AVERAGE, FITTED, ProgressiveMerge, merge_progressively
from onebasin.fusion.refine import Refining, refine
from onebasin.models import Folder, Held, Model, ModelError, numel
from onebasin.models.errors import one_line
from onebasin.models.kinship import APART, Kinship
from onebasin.running import LoadedModel, loaded_model
from onebasin.running.classes import runnable
from onebasin.running.probes import probe
from onebasin.running.trace import Batch, examples_in, run

from .aligning import Aligned, align_all
from .options import Options
from .verdict import GUESSED, Load, judge

QUALITIES = {"fast": 30.0, "balanced": 300.0, "best": 1800.0}  # names of budgets, in seconds
USUAL = 300.0  # seconds where no budget is given,
MORE, MORE_IMAGINED = 60.0, 180.0  # of which distilling, and learning on pictures, take so many if a closed form works
LEVEL, LEARNED_LEVEL = "full", "invertible"
LEARNED_LR = 0.02  # measured: docs/merge.md
CHOOSING = 1 / 4  # share of the data that are held out to choose by, and to judge by at the end
LEARNING = 3 / 4  # share of what is left of a budget that matching is learned in; then it is merged
SHORTEST = 5.0  # seconds that a descent is worth beginning for
CLOSED, CLOSED_SHARE = 150.0, 1 / 8  # seconds for all closed forms, or this share of a budget where that is more
PASSES, IMAGINING = 8, 60  # over the data by each model: of all closed forms, and to imagine pictures
SPEED = 2e10  # operations a second, of two processor cores
COPIES = 1e-4  # relative distance of matched models that are copies of one another
DISTILLED, LONG = 16, 256  # examples of a step of distillation; fewer where texts of more tokens make larger maps
TAUGHT, ROUNDS = 4096, 20  # examples of given data that distillation takes, and how often without a budget
DISTILLING = "distilled"  # what such a candidate's name ends in
LAMBDAS = tuple(i / 10 for i in range(11))
FEWEST = 32  # examples that are made whatever they cost
SYNTHETIC = {"pixel_values": 4, "input_ids": 2}  # times as many inputs are made as samples are asked for, being cheap


@dataclass(frozen=True)
class Chosen:
    """The best candidate, and what to say about it.

    merged: None where the method has not run yet. held: the data that nothing was fitted on, empty where nothing was
    tried. judged_on: what they are.
    """

    aligned: Aligned
    method: Method
    merged: Merged | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    held: Sequence[Batch] = ()
    judged_on: str = ""


@dataclass(frozen=True)
class Candidate:
    """A merged model. tensors: by role. losses: divergence on every example held out, (examples,)."""

    name: str
    aligned: Aligned
    method: Method
    tensors: Mapping[str, Tensor]
    losses: Tensor
    facts: Mapping[str, Any]

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclass(frozen=True)
class Earlier:
    """What a search has found before. chosen: the candidate. few: examples that closed forms took. sha256: of all files
    of the models that it was made of."""

    model: Folder
    chosen: str
    few: int
    sha256: list[Mapping[str, str]]

    @property
    def method(self) -> Method:
        if FITTED not in self.chosen:
            return Average()
        return ProgressiveMerge(spread="spread" in self.chosen)

    @classmethod
    def of(cls, folder: str | Path, family: str | None) -> Earlier | None:
        """Read it off a folder that a search has written; None where there is none."""
        try:
            facts = json.loads((Path(folder) / "onebasin.json").read_text("utf-8"))
            report, inputs = facts["result"]["search"], facts["inputs"]
            return cls(Folder(Path(folder), family), report["chosen"], report["few"], [one["sha256"] for one in inputs])
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Search:
    """A search for the best way to merge.

    models: in canonical form where they are matched. shares: one per model. budget: seconds after `started`, None for
    closed forms alone. draws: whether the curve over lambda is wanted. earlier: the result of a search among the same
    models, to go on from.
    """

    models: Sequence[Model]
    centre: int
    template: int
    shares: Sequence[float]
    kin: Kinship
    opt: Options
    budget: float | None
    started: float
    tell: Tell | None
    draws: bool = False
    earlier: Earlier | None = None

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.started + (self.budget or USUAL) - time.perf_counter()

    def has_time(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return self.left >= seconds

    @cached_property
    def data(self) -> Data:
        """The data that candidates are fitted on and chosen by."""
        opt = self.opt
        if not opt.data or opt.samples == Options().samples:
            opt = replace(opt, data=opt.data or "self", samples=self.few if opt.self_made else TAUGHT)
        return Data(self.models, opt, opt, self.tell, opt.labels)

    @cached_property
    def few(self) -> int:
        """How many examples the closed forms take: all that were asked for, or what is affordable; of an earlier search
        as many as there, so that nothing that was fitted on is held out now."""
        if self.earlier is not None:
            return self.earlier.few
        return self.affordable() if self.opt.samples == Options().samples else self.opt.samples

    def affordable(self) -> int:
        """How many examples: as many as were asked for, and held out besides, more of what is cheap; fewer where a
        machine of `SPEED` could not try all closed forms on them in their share of the time."""
        stock = self.stock[self.centre]
        if self.opt.self_made:
            example = probe(stock.model, stock.model, 1, self.opt.context or LENGTH, self.opt.seed)
        else:
            rows = recut(self.data.batches, 1, by_length=True)
            example = rows[len(rows) // 2]
        with FlopCounterMode(display=False) as counter:
            run(stock, example)
        kind = next((name for name in SYNTHETIC if name in example), None)
        wanted = self.opt.samples / (1 - CHOOSING) * SYNTHETIC.get(kind or "", 1)
        passes = (len(self.models) + 1) * (PASSES + (IMAGINING if kind == "pixel_values" and self.opt.self_made else 0))
        seconds = passes * counter.get_total_flops() / SPEED
        budget = self.budget or USUAL
        affordable = min(max(CLOSED_SHARE * budget, CLOSED), budget / 2) / seconds if seconds else wanted
        return round(min(wanted, max(affordable, FEWEST)))

    @cached_property
    def spare(self) -> Sequence[Batch]:
        """Given data beyond those that closed forms take; distillation has them besides."""
        return self.data.batches[self._most :]

    @cached_property
    def split(self) -> tuple[Sequence[Batch], Sequence[Batch]]:
        """The batches to fit on, and those to choose by; in each, texts of like length share a batch."""
        batches = self.data.batches[: self._most]
        size = examples_in(batches[0])
        fit, held = (recut(part, size, by_length=True) for part in noised(batches, self.opt, CHOOSING))
        return fit, held

    @property
    def _most(self) -> int:
        """The batches that hold as many examples as closed forms take, at least one to fit on and one to choose by."""
        return max(2, -(-self.few // examples_in(self.data.batches[0])))

    @property
    def imagines(self) -> bool:
        """Whether the inputs are pictures that the models made."""
        return self.opt.self_made and "pixel_values" in self.split[0][0]

    @property
    def known(self) -> bool:
        """Whether the inputs are what the models were trained for: data that were given, or text that they wrote."""
        wrote = any(is_for(self.models[0], task) for task in ("causal-lm", "masked-lm"))
        return not self.opt.self_made or wrote

    @cached_property
    def stock(self) -> list[LoadedModel]:
        """The models as they are, loaded once; nobody changes them."""
        return [loaded_model(model, dtype=self.opt.dtype, device=self.opt.device) for model in self.models]

    @cached_property
    def answers(self) -> Teachers:
        return Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in self.stock])

    @cached_property
    def forward(self) -> Forward:
        return forward_of(self.stock[self.template])

    @cached_property
    def mixed(self) -> bool:
        """Whether to learn and distil in bfloat16: where it is faster, since time is what is short."""
        return self.opt.mixed or (self.opt.dtype == torch.float32 and bfloat16_is_faster(self.opt.device))

    def sources(self, aligned: Aligned) -> Sources:
        return Sources(aligned.models, self.shares, self.centre, self.template)

    def aligned(self, level: str, **how: Any) -> Aligned:
        how["symmetry"] = self.opt.symmetry if level == "none" else level
        return align_all(self.models, self.centre, level, replace(self.opt, **how), self.tell, *self.split)

    def candidate(
        self, name: str, aligned: Aligned, method: Method, tensors: Mapping[str, Tensor], **facts: Any
    ) -> Candidate:
        parts = [share / sum(self.shares) for share in self.shares]
        model = partial(self.forward, tensors)
        losses = example_losses(divergence, model, self.answers, parts, self.split[1])
        return Candidate(name, aligned, method, tensors, losses, facts)

    def closed(self, name: str, aligned: Aligned, spread: bool = False) -> Candidate:
        """The average of aligned models, or their progressive merge where that is better."""
        how = ProgressiveMerge(spread=spread, settle=False)
        found = merge_progressively(self.sources(aligned), *self.split, how, self.opt, self.tell)
        method = ProgressiveMerge(spread=spread) if found.fitted else Average()
        facts = {"ridges": found.ridges, "held_out_losses": found.losses}
        name = f"{name}, {FITTED if found.fitted else AVERAGE}" + (", spread" if spread and found.fitted else "")
        return self.candidate(name, aligned, method, found.tensors, **facts)

    def line(self, aligned: Aligned) -> list[float]:
        """Return the divergence of the averages of two aligned models, with the weights 1 - lambda and lambda, from the
        mixture of their predictions with the same weights, on a few examples held out."""
        first, second = aligned.models
        rows = recut(self.split[1], 1)
        batches, found = recut(rows[:: -(-len(rows) // FEWEST)], FEWEST), list[float]()
        for lam in LAMBDAS:
            tensors = {}
            for role in aligned.models[self.template].signature.tensors:
                x = aligned.models[self.template].read(role, self.opt.dtype, self.opt.device)
                if all(role in one.signature.tensors and one.signature.tensors[role].shape == tuple(x.shape)
                       for one in (first, second)):  # fmt: skip
                    a, b = (one.read(role, self.opt.dtype, self.opt.device) for one in (first, second))
                    x = torch.lerp(a, b, lam)
                tensors[role] = x
            model, parts = partial(self.forward, tensors), [1 - lam, lam]
            found.append(float(example_losses(divergence, model, self.answers, parts, batches).mean()))
        return found

    def lacks(self, one: Candidate) -> bool:
        """Whether the verdict on a candidate would be that it is broken, or guessed inputs leave that open."""

        def source(number: int) -> Load:
            return lambda: lambda batch: self.answers(batch)[number]

        with torch.no_grad():
            sources = list(map(source, range(len(self.models))))
            what = judged_on(self.opt, self.models[0])
            works = judge(lambda: partial(self.forward, one.tensors), sources, self.split[1], what).works
            return works is False or what == GUESSED

    def matched(self, start: str) -> Candidate:
        """The best closed form after matching by weights or activations."""
        return self.closed(start, self.aligned(LEVEL, match_with=start))

    def resumed(self, earlier: Earlier) -> Candidate:
        """The result of an earlier search, beside the models as they were aligned for it."""
        start = earlier.chosen.split(",")[0].removeprefix("learned from ")
        matched = start in ("weights", "activations") and self.kin.kind == APART
        aligned = self.aligned(LEVEL, match_with=start) if matched else self.aligned("none")
        entries = self.models[self.template].signature.tensors.items()
        tensors = {
            role: earlier.model.read(role, self.opt.dtype, self.opt.device) for role, entry in entries if entry.stored
        }
        return self.candidate(earlier.chosen, aligned, earlier.method, tensors)

    def learned(self, start: str, seconds: float) -> Candidate:
        """The average after learned matching, or its progressive merge.

        It learns logits: models are sure of pictures that they imagine, so their divergence asks for little there.
        """
        aligned = self.aligned(LEARNED_LEVEL, match_with="learned", start=start, seconds=seconds, mixed=self.mixed,
                               loss="logits", lr=LEARNED_LR)  # fmt: skip
        return self.closed(f"learned from {start}", aligned)

    def distilled(self, best: Candidate, seconds: float) -> Candidate:
        """The best so far after some steps of distillation."""
        (fit, held), tell = self.split, self.tell
        batches = shortened(recut([*fit, *self.spare], DISTILLED, by_length=True))
        steps = MOST_STEPS if self.budget is not None else ROUNDS * len(batches)
        how = Refining(weights=[*self.shares], seed=self.opt.seed, steps=steps, seconds=seconds, mixed=self.mixed)
        found = refine(
            Held(self.models[self.template], best.tensors), self.stock, batches, how, self.opt, held_out=held,
            progress=tell and (lambda text, loss: tell(f"distilling: {text}, loss {loss:.4g}")),
        )  # fmt: skip
        again = " again" if best.name.endswith(DISTILLING) else f", {DISTILLING}"
        return self.candidate(f"{best.name}{again}", best.aligned, best.method, found.tensors,
                              **best.facts, distilled=found.step)  # fmt: skip


def choose(search: Search) -> Chosen:
    """Align and merge models in every way that there is time for, and keep the best; by weights alone where they make
    no inputs for one another.

    Raises:
        ValueError: for given data that do not fit the models, and for models without an output in common.
    """
    opt, notes, found = search.opt, list[str](), list[Candidate]()
    if too_large(search.models, opt):
        return by_weights(search, "the models are too large for this machine's memory to try anything on data")
    seconds: dict[str, float] = {}

    def consider(name: str, make: Callable[[], Candidate], needed: float = 0.0) -> None:
        if found and not search.has_time(needed):
            notes.append(f"no time for a candidate: {name}")
            return
        begun = time.perf_counter()
        try:
            one = make()
        except ModelError as error:
            notes.append(f"no candidate: {name} ({error})")
            return
        found.append(one)
        seconds[one.name] = time.perf_counter() - begun

    def best() -> Candidate:
        return min(found, key=lambda one: one.loss)

    def longest() -> float:
        return max(seconds.values(), default=0.0)

    def copies() -> bool:
        return max((pair.after.relative for pair in found[0].aligned.found), default=1.0) < COPIES

    def closed_forms() -> None:
        for start in ("weights", "activations") if search.kin.kind == APART else ():
            consider(start, partial(search.matched, start), longest())
            if found and copies():
                notes.append("matching finds that the models are one function, written differently")
                break
        else:
            consider("unmatched", lambda: search.closed("unmatched", search.aligned("none")), longest())
        if not found:
            return
        first = best()
        if isinstance(first.method, ProgressiveMerge):
            name = first.name.split(",")[0]
            consider(f"{name}, spread", lambda: search.closed(name, first.aligned, spread=True), seconds[first.name])

    def go_on() -> None:
        """Distil the best so far; or learn matching on pictures that the models imagine, since distilling lowers the
        loss on these while the model of real ones gets worse."""
        unbounded = search.budget is not None or search.lacks(best())
        apart = search.kin.kind == APART and not copies()
        goes_on = apart and (search.known or search.imagines)
        more = MORE_IMAGINED if search.imagines else MORE
        seconds = search.left if unbounded else min(search.left, more) if goes_on else 0.0
        if not search.imagines and seconds > SHORTEST:
            consider("distilled", lambda: search.distilled(best(), seconds))
        elif search.imagines and apart and one_shape(search.models) and seconds * LEARNING > SHORTEST:
            start = "activations" if any(one.name.startswith("activations") for one in found) else "weights"
            consider("learned", lambda: search.learned(start, seconds * LEARNING))
        if search.imagines and unbounded:
            notes.append("not distilled on pictures that the models imagine; give --data FILE")

    try:
        for model in search.models:
            runnable(model.origin)
        if not comparable(search.stock, search.split[1][0]):
            raise ValueError("the models predict nothing that can be compared: their heads have no output in common")
    except Exception as error:  # each model class fails in its own way on inputs that it does not take
        if opt.data:
            raise
        return by_weights(search, f"nothing could be tried on inputs that the models make ({one_line(error)})")
    try:
        if search.earlier is not None:
            consider("the earlier result", partial(search.resumed, search.earlier))
        if not found:
            closed_forms()
        if not found:
            return by_weights(search, "; ".join(notes))
        go_on()
    except KeyboardInterrupt:
        if search.budget is None or not found:
            raise
        notes.append("stopped by Ctrl-C: the best so far is written")
    taken = best()
    sources = search.sources(taken.aligned)
    entries = sources.signature.tensors.items()
    pairs = (pair for role, entry in entries if entry.stored for pair in entry.split(taken.tensors[role]))
    report: dict[str, Any] = {
        "budget": search.budget,
        "chosen": taken.name,
        "candidates": {one.name: {"loss": one.loss, "seconds": round(seconds[one.name], 1)} for one in found},
        "data": opt.data or "self",
        "held_out": len(taken.losses),
        "few": search.few,
    }
    if search.draws and len(search.models) == 2:
        curves = {"unmatched": search.aligned("none"), "matched": taken.aligned}
        if not any(pair.alignment.elements for pair in taken.aligned.found):
            del curves["matched"]
        report["line"] = {"lambdas": list(LAMBDAS), **{name: search.line(one) for name, one in curves.items()}}
    losses = ", ".join(f"{one.name} {one.loss:.4g}" for one in sorted(found, key=lambda one: one.loss))
    notes = [f"chosen by KL divergence on {len(taken.losses)} examples held out: {losses}", *notes]
    return Chosen(
        taken.aligned,
        taken.method,
        Merged(pairs, taken.facts),
        report,
        notes,
        search.split[1],
        judged_on(opt, search.models[0]),
    )


def shortened(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches with fewer examples where texts are long, so that maps of attention have no more entries in all
    than those of `DISTILLED` texts of `LONG` tokens."""
    found = list[Batch]()
    for batch in batches:
        length = batch["input_ids"].shape[-1] if "input_ids" in batch else LONG
        found += recut([batch], max(1, DISTILLED * LONG**2 // max(length, LONG) ** 2))
    return found


def judged_on(opt: Options, model: Model) -> str:
    """Return what a verdict says of its inputs."""
    if not opt.self_made:
        return "data held out"
    return GUESSED if guessed(model) else "inputs that the models made"


def too_large(models: Sequence[Model], opt: Options) -> bool:
    """Whether the models, the merged one, and two copies of a model do not fit in memory together."""
    room = available_memory()
    return room is not None and opt.device == "cpu" and (
        opt.dtype.itemsize * sum(map(numel, [*models, *models, models[0], models[0]])) > room
    )  # fmt: skip


def by_weights(search: Search, why: str) -> Chosen:
    """Return what needs no data: the average of models matched by their weights; those of one base stay as they are."""
    level = LEVEL if search.kin.kind == APART else "none"
    aligned = align_all(search.models, search.centre, level, search.opt, search.tell)
    return Chosen(aligned, Average(), notes=[f"{why}: averaged by weights alone"])


def comparable(models: Sequence[LoadedModel], batch: Batch) -> bool:
    """Whether the models have an output in common, unlike those with classes of different tasks."""
    example = {name: value[:1] for name, value in batch.items() if name != "labels"}
    shapes = [{(name, value.shape) for name, value in predictions(run(model, example)).items()} for model in models]
    return bool(set.intersection(*shapes))


def one_shape(models: Sequence[Model]) -> bool:
    """Whether all tensors of the models have one shape, which learning needs."""
    shapes = [{role: entry.shape for role, entry in model.signature.tensors.items()} for model in models]
    return all(shape == shapes[0] for shape in shapes)
