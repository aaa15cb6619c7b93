# SPDX-License-Identifier: Apache-2.0
"""The search for the best way to merge: candidates are tried in order of cost until time is up, and judged on held-out
data.

    closed forms     the average of models matched by activations (also with even norms, which lets the streams of
                     post-norm models rotate), by weights, and not matched; each also merged progressively, and the best
                     of them once more with `spread`. If the inputs are guesses, these are averages only
    learning         matching learned at level `invertible` from the best start, on images that the models imagine:
                     distillation on these makes a model worse on real images, while exact copies of the models stay
                     as good as they are
    distilling       on other inputs: the best candidate so far, taught by the models

Without `--budget`, models that were trained apart get three minutes of learning, or one of distillation if the inputs
are like their training data. If the verdict on the best closed form would not be that it works, it is what is left of
five minutes. Models of one base are averaged without matching; with data, progressive merging is a candidate, too.

The candidate is chosen whose predictions have the least KL divergence from the mixture of the models' predictions, on a
quarter of the data, on which nothing was fitted. No family has rules of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onebasin.data.calibration import Data, is_for, noised, recut
from onebasin.data.made import LENGTH, guessed, writes
from onebasin.data.teaching import Forward, Teachers, divergence, example_losses, forward_of, predictions
from onebasin.engine import MOST_STEPS, Tell, available_memory, bfloat16_is_faster
from onebasin.fusion.average import Average
from onebasin.fusion.method import Merged, Method, Sources
from onebasin.fusion.progressive import AVERAGE, FITTED, ProgressiveMerge, merge_progressively
from onebasin.fusion.refine import Refining, refine
from onebasin.fusion.tensors import averaged
from onebasin.models import Held, Model, ModelError, numel
from onebasin.models.errors import one_line
from onebasin.models.kinship import APART, Kinship
from onebasin.running import LoadedModel, loaded_model
from onebasin.running.classes import runnable
from onebasin.running.trace import Batch, examples_in, run
from onebasin.running.valid_inputs import first_that_runs

from .aligning import Aligned, align_all
from .candidates import Candidate, Chosen, Earlier
from .frame import Frame, with_even_norms
from .options import Options
from .verdict import GUESSED, IMAGINED, Run, Verdict, judge, proves_nothing, sources_agree

QUALITIES = {"fast": 30.0, "balanced": 300.0, "best": 1800.0}  # names of budgets, in seconds
USUAL = 280.0  # seconds without a budget; writing and judging take the rest of five minutes
MORE, MORE_IMAGINED = 60.0, 180.0  # of these for distillation, or for learning on images, if a closed form works
LEVEL, LEARNED_LEVEL = "full", "invertible"
LEARNED_LR = 0.02  # measured: docs/merge.md
CHOOSING = 1 / 4  # share of the data that is held out, to choose by and for the verdict
LEARNING = 3 / 4  # share of the remaining budget for learned matching; the rest is for merging
SHORTEST = 5.0  # seconds; a shorter descent is not worth starting
CLOSED, CLOSED_SHARE = 150.0, 1 / 8  # seconds for all closed forms, or this share of a budget if that is more
PASSES, IMAGINING = 8, 60  # passes of each model over the data: for all closed forms, and to imagine images
SPEED = 2e10  # FLOP per second of two slow processor cores
COPIES = 1e-4  # relative distance below which matched models are the same function
DISTILLED, LONG = 16, 256  # examples per step of distillation, for texts of up to `LONG` tokens; fewer for longer ones
TAUGHT, ROUNDS = 4096, 20  # examples of given data for distillation, and epochs without a budget
DISTILLING = "distilled"  # last word of such a candidate's name
EVEN = " with even norms"  # end of the way of matching in such a candidate's name
LAMBDAS = tuple(i / 10 for i in range(11))
FEWEST = 32  # examples are made, whatever they cost
SYNTHETIC = {"pixel_values": 4, "input_ids": 2}  # inputs made per requested sample, where they are cheap


@dataclass(frozen=True)
class Search:
    """A search for the best way to merge.

    frame: the models, in canonical form if they are matched. shares: weights of the models. budget: in seconds after
    `started`; None for the usual time. draws: whether to compute the curve over lambda. earlier: the result of a search
    among the same models, to continue from.
    """

    frame: Frame
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
    def models(self) -> Sequence[Model]:
        return self.frame.models

    @property
    def centre(self) -> int:
        return self.frame.centre

    @cached_property
    def even(self) -> Frame | None:
        """The frame of the models with even norms, where that gives their streams more freedom."""
        return with_even_norms(self.frame, self.opt) if self.kin.kind == APART else None

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.started + (self.budget or USUAL) - time.perf_counter()

    def has_time(self, seconds: float, spent: float) -> bool:
        """Return whether this many seconds are left, also of the time for closed forms, on which so many were spent."""
        return seconds <= min(self.left, self.closed_seconds - spent)

    @cached_property
    def data(self) -> Data:
        """The data to fit candidates on and to choose by."""
        opt = self.opt
        if not opt.data or opt.samples == Options().samples:
            opt = replace(opt, data=opt.data or "self", samples=self.few if opt.self_made else TAUGHT)
        return Data(self.models, opt, opt, self.tell, opt.labels)

    @cached_property
    def few(self) -> int:
        """How many examples closed forms use: as many as requested or affordable; after an earlier search as many as it
        used, so that nothing is held out now that was fitted on then."""
        if self.earlier is not None:
            return self.earlier.few
        return self.affordable() if self.opt.samples == Options().samples else self.opt.samples

    def affordable(self) -> int:
        """Return how many examples to use: those requested and as many as are held out, more if they are cheap; fewer
        if a machine of `SPEED` could not try all closed forms on them in their share of the time."""
        stock = self.stock[self.centre]
        if self.opt.self_made:
            length, seed = self.opt.context or LENGTH, self.opt.seed
            example = first_that_runs(stock.model, stock.model, 1, length, seed, partial(run, stock))[1]
        else:
            rows = recut(self.data.batches, 1, by_length=True)
            example = rows[len(rows) // 2]
        with FlopCounterMode(display=False) as counter:
            run(stock, example)
        kind = next((name for name in SYNTHETIC if name in example), None)
        wanted = self.opt.samples / (1 - CHOOSING) * SYNTHETIC.get(kind or "", 1)
        passes = (len(self.models) + 1) * (PASSES + (IMAGINING if kind == "pixel_values" and self.opt.self_made else 0))
        seconds = passes * counter.get_total_flops() / SPEED
        affordable = self.closed_seconds / seconds if seconds else wanted
        return round(min(wanted, max(affordable, FEWEST)))

    @property
    def closed_seconds(self) -> float:
        """Return the seconds that all closed forms may take."""
        budget = self.budget or USUAL
        return min(max(CLOSED_SHARE * budget, CLOSED), budget / 2)

    @cached_property
    def spare(self) -> Sequence[Batch]:
        """Given data that closed forms do not use, for distillation."""
        return self.data.batches[self._most :]

    @cached_property
    def split(self) -> tuple[Sequence[Batch], Sequence[Batch]]:
        """The batches to fit on and those to choose by, each with texts of similar length."""
        batches = self.data.batches[: self._most]
        size = examples_in(batches[0])
        fit, held = (recut(part, size, by_length=True) for part in noised(batches, self.opt, CHOOSING))
        return fit, held

    @property
    def _most(self) -> int:
        """How many batches closed forms use: at least one to fit on and one to choose by."""
        return max(2, -(-self.few // examples_in(self.data.batches[0])))

    @property
    def imagines(self) -> bool:
        """Whether the inputs are images that the models imagined."""
        return self.opt.self_made and "pixel_values" in self.split[0][0]

    @property
    def only_averages(self) -> bool:
        """Whether closed forms are not fitted: the inputs are guesses, and norms can be even, which makes the average
        good. A fit lowers the divergence on guesses and raises it on real inputs (measured: docs/merge.md)."""
        return self.judged_on == GUESSED and self.even is not None

    @property
    def known(self) -> bool:
        """Whether the inputs are like the training data: given data, or text that the models wrote."""
        return not self.opt.self_made or is_for(self.models[0], "masked-lm") or writes(self.stock[0].model)

    @cached_property
    def stock(self) -> list[LoadedModel]:
        """The unchanged models, loaded once."""
        return [self.loaded(model) for model in self.models]

    @cached_property
    def answers(self) -> Teachers:
        return Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in self.stock])

    def forward(self, frame: Frame) -> Forward:
        """Return a frame's template as a function of its tensors."""
        return forward_of(self.stock[self.template] if frame is self.frame else self.even_template)

    @cached_property
    def even_template(self) -> LoadedModel:
        assert self.even is not None
        return self.loaded(self.even.models[self.template])

    def loaded(self, model: Model) -> LoadedModel:
        return loaded_model(model, dtype=self.opt.dtype, device=self.opt.device)

    def run(self, one: Candidate) -> Run:
        """Return a candidate as a function of a batch."""
        return partial(self.forward(one.frame), one.tensors)

    @cached_property
    def mixed(self) -> bool:
        """Whether to learn and distil in bfloat16: if it is faster, since time is short."""
        return self.opt.mixed or (self.opt.dtype == torch.float32 and bfloat16_is_faster(self.opt.device))

    def sources(self, aligned: Aligned) -> Sources:
        return Sources(aligned.models, self.shares, self.centre, self.template)

    def aligned(self, level: str, frame: Frame | None = None, **how: Any) -> Aligned:
        frame = frame or self.frame
        how["symmetry"] = self.opt.symmetry if level == "none" else level
        return align_all(frame.models, frame.centre, level, replace(self.opt, **how), self.tell, *self.split)

    def candidate(
        self, name: str, frame: Frame, aligned: Aligned, method: Method, tensors: Mapping[str, Tensor], **facts: Any
    ) -> Candidate:
        parts = [share / sum(self.shares) for share in self.shares]
        one = Candidate(name, frame, aligned, method, tensors, torch.empty(0), facts)
        return replace(one, losses=example_losses(divergence, self.run(one), self.answers, parts, self.split[1]))

    def closed(self, name: str, aligned: Aligned, frame: Frame | None = None, spread: bool = False) -> Candidate:
        """Return the average of aligned models, or their progressive merge if that is better and can be made."""
        frame = frame or self.frame
        if not self.only_averages:
            with suppress(ModelError):  # its layers cannot be followed
                return self.fitted(name, aligned, frame, spread)
        mean = averaged(self.sources(aligned), self.opt)
        tensors = {role: mean(role) for role in frame.models[self.template].signature.tensors}
        return self.candidate(f"{name}, {AVERAGE}", frame, aligned, Average(), tensors)

    def fitted(self, name: str, aligned: Aligned, frame: Frame, spread: bool) -> Candidate:
        """Return the progressive merge of aligned models, or their average if that is better."""
        how = ProgressiveMerge(spread=spread, settle=False)
        found = merge_progressively(self.sources(aligned), *self.split, how, self.opt, self.tell)
        method = ProgressiveMerge(spread=spread) if found.fitted else Average()
        facts = {"ridges": found.ridges, "held_out_losses": found.losses}
        name = f"{name}, {FITTED if found.fitted else AVERAGE}" + (", spread" if spread and found.fitted else "")
        return self.candidate(name, frame, aligned, method, found.tensors, **facts)

    def line(self, aligned: Aligned, frame: Frame) -> list[float]:
        """Return, for each lambda, the divergence of (1 - lambda) A + lambda B from the mixture of the two models'
        predictions with the same weights, on a few held-out examples."""
        (first, second), forward = aligned.models, self.forward(frame)
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
            model, parts = partial(forward, tensors), [1 - lam, lam]
            found.append(float(example_losses(divergence, model, self.answers, parts, batches).mean()))
        return found

    def too_easy(self) -> bool:
        """Return whether the models agree on nearly all pictures that they imagined. What is fitted to such pictures is
        worse on real ones than the average of matched models (measured: docs/merge.md)."""
        return self.imagines and proves_nothing(self.judged_on, sources_agree(self.runs, self.split[1]))

    def lacks(self, one: Candidate) -> bool:
        """Return whether the verdict on a candidate would be that it is broken, or open because of the inputs."""
        verdict = self.judged(self.run(one))
        return verdict.works is False or proves_nothing(self.judged_on, verdict.sources_agree)

    def judged(self, model: Run) -> Verdict:
        """Return the verdict on a model, on the data to choose by."""
        return judge(lambda: model, [partial(_same, run) for run in self.runs], self.split[1], self.judged_on)

    @property
    def runs(self) -> list[Run]:
        """Return the models, each of which returns its output for a batch."""
        return [partial(self.answer, number) for number in range(len(self.models))]

    def answer(self, number: int, batch: Batch) -> Mapping[str, Any]:
        """Return the output of one of the models."""
        return self.answers(batch)[number]

    @cached_property
    def judged_on(self) -> str:
        """Return how a verdict describes the data."""
        return judged_on(self.opt, self.models[0])

    def matched(self, start: str) -> Candidate:
        """Return the best closed form after matching by weights or activations, with even norms if the name says so."""
        frame = self.frame_of(start)
        return self.closed(start, self.aligned(LEVEL, frame, match_with=start.removesuffix(EVEN)), frame)

    def frame_of(self, start: str) -> Frame:
        """Return the frame of the candidates whose names begin so."""
        return self.even if start.endswith(EVEN) and self.even is not None else self.frame

    def unmatched(self) -> Candidate:
        """Return the best closed form of the models as they are."""
        return self.closed("unmatched", self.aligned("none"))

    def resumed(self, earlier: Earlier) -> Candidate:
        """Return the result of an earlier search as a candidate, with the models aligned as they were for it."""
        start = earlier.chosen.split(",")[0].removeprefix("learned from ")
        how, frame = start.removesuffix(EVEN), self.frame_of(start)
        matched = how in ("weights", "activations") and self.kin.kind == APART
        aligned = self.aligned(LEVEL, frame, match_with=how) if matched else self.aligned("none")
        entries = frame.models[self.template].signature.tensors.items()
        tensors = {
            role: earlier.model.read(role, self.opt.dtype, self.opt.device) for role, entry in entries if entry.stored
        }
        return self.candidate(earlier.chosen, frame, aligned, earlier.method, tensors)

    def learned(self, start: str, seconds: float) -> Candidate:
        """Return the average after learned matching, or the progressive merge.

        The loss compares logits: models are so sure of images that they imagined that the KL divergence is almost flat.
        """
        frame = self.frame_of(start)
        aligned = self.aligned(LEARNED_LEVEL, frame, match_with="learned", start=start.removesuffix(EVEN),
                               seconds=seconds, mixed=self.mixed, loss="logits", lr=LEARNED_LR)  # fmt: skip
        return self.closed(f"learned from {start}", aligned, frame)

    def distilled(self, best: Candidate, seconds: float) -> Candidate:
        """Return the best candidate so far after some steps of distillation."""
        (fit, held), tell = self.split, self.tell
        batches = shortened(recut([*fit, *self.spare], DISTILLED, by_length=True))
        steps = MOST_STEPS if self.budget is not None else ROUNDS * len(batches)
        how = Refining(weights=[*self.shares], seed=self.opt.seed, steps=steps, seconds=seconds, mixed=self.mixed)
        found = refine(
            Held(best.frame.models[self.template], best.tensors), self.stock, batches, how, self.opt, held_out=held,
            progress=tell and (lambda text, loss: tell(f"distilling: {text}, loss {loss:.4g}")),
        )  # fmt: skip
        again = " again" if best.name.endswith(DISTILLING) else f", {DISTILLING}"
        return self.candidate(f"{best.name}{again}", best.frame, best.aligned, best.method, found.tensors,
                              **best.facts, distilled=found.step)  # fmt: skip


@dataclass
class Trials:
    """The candidates that a search has tried, the seconds that each took, and notes on those that it did not try."""

    search: Search
    found: list[Candidate] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        return min(self.found, key=lambda one: one.loss)

    @property
    def apart(self) -> bool:
        """Whether matching changes what is merged: the models were trained apart, and are not one function."""
        distances = [pair.after.relative for pair in self.found[0].aligned.found] if self.found else []
        return self.search.kin.kind == APART and max(distances, default=1.0) >= COPIES

    def consider_closed(self, name: str, make: Callable[[], Candidate], needed: float) -> None:
        """Try a closed form, unless there are others and no time for one that takes so many seconds."""
        if self.found and not self.search.has_time(needed, sum(self.seconds.values())):
            self.notes.append(f"no time for a candidate: {name}")
        else:
            self.consider(name, make)

    def consider(self, name: str, make: Callable[[], Candidate]) -> None:
        """Try a candidate."""
        begun = time.perf_counter()
        try:
            one = make()
        except Exception as error:  # a class that cannot be followed, say; the data were already run on
            self.notes.append(f"no candidate: {name} ({one_line(error)})")
            return
        self.found.append(one)
        self.seconds[one.name] = time.perf_counter() - begun

    def try_closed_forms(self) -> None:
        """Try the average and progressive merging, each after every matching by a closed form."""
        search, ways = self.search, ["activations", "weights", "unmatched"]
        if search.even is not None:
            ways.insert(0, f"activations{EVEN}")
        for way in ways if search.kin.kind == APART else ways[-1:]:
            make = partial(search.matched, way) if way != "unmatched" else search.unmatched
            self.consider_closed(way, make, max(self.seconds.values(), default=0.0))
            if way in ("activations", "weights") and self.found and not self.apart:
                self.notes.append("matching finds that the models are one function, written differently")
                break
        if self.found and isinstance((first := self.best).method, ProgressiveMerge):
            name = first.name.split(",")[0]
            spread = partial(search.closed, name, first.aligned, first.frame, spread=True)
            self.consider_closed(f"{name}, spread", spread, self.seconds[first.name])

    def improve(self) -> None:
        """Distil the best candidate; or learn matching if the inputs are imagined images, on which distillation lowers
        the loss while the model gets worse on real ones."""
        search = self.search
        unbounded = search.budget is not None or search.lacks(self.best)
        more = MORE_IMAGINED if search.imagines else MORE
        goes_on = self.apart and (search.known or search.imagines)
        seconds = search.left if unbounded else min(search.left, more) if goes_on else 0.0
        if not search.imagines and seconds > SHORTEST:
            self.consider("distilled", lambda: search.distilled(self.best, seconds))
        elif search.imagines and self.apart and one_shape(search.models) and seconds * LEARNING > SHORTEST:
            starts = [one.name.split(",")[0] for one in self.found]
            start = next((start for start in starts if start.startswith("activations")), "weights")
            self.consider("learned", lambda: search.learned(start, seconds * LEARNING))
        if search.imagines and unbounded:
            self.notes.append("not distilled on pictures that the models imagine; give --data FILE")

    def chosen(self) -> Chosen:
        """Return the best candidate, with a report on all of them."""
        search, taken = self.search, self.best
        signature = taken.frame.models[search.template].signature
        entries = signature.tensors.items()
        pairs = (pair for role, entry in entries if entry.stored for pair in entry.split(taken.tensors[role]))
        report: dict[str, Any] = {
            "budget": search.budget,
            "chosen": taken.name,
            "candidates": {
                one.name: {"loss": one.loss, "seconds": round(self.seconds[one.name], 1)} for one in self.found
            },
            "data": search.opt.data or "self",
            "held_out": len(taken.losses),
            "few": search.few,
        }
        if search.draws and len(search.models) == 2:
            report["line"] = {
                "lambdas": list(LAMBDAS), "unmatched": search.line(search.aligned("none"), search.frame)
            }  # fmt: skip
            if any(pair.alignment.elements for pair in taken.aligned.found):
                report["line"]["matched"] = search.line(taken.aligned, taken.frame)
        losses = ", ".join(f"{one.name} {one.loss:.4g}" for one in sorted(self.found, key=lambda one: one.loss))
        notes = [f"chosen by KL divergence on {len(taken.losses)} examples held out: {losses}", *self.notes]
        merged = Merged(pairs, taken.facts)
        return Chosen(taken.frame, taken.aligned, taken.method, merged, report, notes, search.split[1],
                      search.judged_on)  # fmt: skip


def choose(search: Search) -> Chosen:
    """Align and merge models in every way that there is time for, and return the best.

    If the models cannot make inputs for each other, they are matched by weights alone.

    Raises:
        ValueError: Given data do not fit the models, or the models have no output in common.
    """
    if too_large(search.models, search.opt):
        return by_weights(search, "the models are too large for this machine's memory to try anything on data")
    try:
        for model in search.models:
            runnable(model.origin)
        if not comparable(search.stock, search.split[1][0]):
            raise ValueError("the models predict nothing that can be compared: their heads have no output in common")
    except Exception as error:  # each model class fails in its own way on inputs that it does not accept
        if search.opt.data:
            raise
        return by_weights(search, f"nothing could be tried on inputs that the models make ({one_line(error)})")
    if search.too_easy():
        return by_weights(search, "the models agree on nearly all pictures that they imagine, so nothing was fitted to "
                                  "these; give --data FILE", search.split[1])  # fmt: skip
    trials = Trials(search)
    try:
        if search.earlier is not None:
            trials.consider("the earlier result", partial(search.resumed, search.earlier))
        if not trials.found:
            trials.try_closed_forms()
        if not trials.found:
            return by_weights(search, "; ".join(trials.notes))
        trials.improve()
    except KeyboardInterrupt:
        if search.budget is None or not trials.found:
            raise
        trials.notes.append("stopped by Ctrl-C: the best so far is written")
    return trials.chosen()


def _same(run: Run) -> Run:
    return run


def shortened(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches with fewer examples of long texts, so that their attention maps have no more entries than those of
    `DISTILLED` texts of `LONG` tokens."""
    found = list[Batch]()
    for batch in batches:
        length = batch["input_ids"].shape[-1] if "input_ids" in batch else LONG
        found += recut([batch], max(1, DISTILLED * LONG**2 // max(length, LONG) ** 2))
    return found


def judged_on(opt: Options, model: Model) -> str:
    """Return how a verdict describes its inputs."""
    if not opt.self_made:
        return "data held out"
    if is_for(model, "image-classification"):
        return IMAGINED
    return GUESSED if guessed(model) else "inputs that the models made"


def too_large(models: Sequence[Model], opt: Options) -> bool:
    """Return whether the models, the merged one and two copies of a model exceed the available memory."""
    room = available_memory()
    return room is not None and opt.device == "cpu" and (
        opt.dtype.itemsize * sum(map(numel, [*models, *models, models[0], models[0]])) > room
    )  # fmt: skip


def by_weights(search: Search, why: str, held: Sequence[Batch] = ()) -> Chosen:
    """Return the average of models matched by their weights, or as they are if they have a common base.

    held: data to judge it on; made for that if there are none.
    """
    level = LEVEL if search.kin.kind == APART else "none"
    aligned = align_all(search.models, search.centre, level, search.opt, search.tell)
    notes = [f"{why}: averaged by weights alone"]
    return Chosen(search.frame, aligned, Average(), notes=notes, held=held, judged_on=search.judged_on)


def comparable(models: Sequence[LoadedModel], batch: Batch) -> bool:
    """Return whether the models have an output in common, unlike classifiers for different tasks."""
    example = {name: value[:1] for name, value in batch.items() if name != "labels"}
    shapes = [{(name, value.shape) for name, value in predictions(run(model, example)).items()} for model in models]
    return bool(set.intersection(*shapes))


def one_shape(models: Sequence[Model]) -> bool:
    """Return whether all models have tensors of the same shapes, as learned matching requires."""
    shapes = [{role: entry.shape for role, entry in model.signature.tensors.items()} for model in models]
    return all(shape == shapes[0] for shape in shapes)
