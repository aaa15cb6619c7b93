# SPDX-License-Identifier: Apache-2.0
"""The setup of a search for the best way to merge: its models, data and time, and how it judges."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import floor, log2
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from onebasin.data.calibration import Data, is_for, noised, recut
from onebasin.data.made import SEVERAL, STEPS, SURE, guessed, made, reads_sentences, usual_length, writes
from onebasin.data.teaching import Forward, Teachers, forward_of, predictions
from onebasin.engine import Tell, available_memory, bfloat16_is_faster, fastest_threads
from onebasin.fusion.compression import operations
from onebasin.jobs.frame import Frame, with_even_norms
from onebasin.jobs.options import Options
from onebasin.jobs.verdict import GUESSED, IMAGINED, Run, judge, proves_nothing, sources_agree
from onebasin.models import Model, numel
from onebasin.models.kinship import APART, Kinship
from onebasin.running import LoadedModel, loaded_model
from onebasin.running.trace import Batch, examples, examples_in, run
from onebasin.running.valid_inputs import first_that_runs

from .chosen import Candidate, Earlier

QUALITIES = {"fast": "30s", "balanced": "5m", "best": "30m"}  # names of budgets
USUAL = 280.0  # seconds without a budget; writing and judging take the rest of five minutes
CLOSED, CLOSED_SHARE = 150.0, 1 / 8  # seconds for all closed forms, or this share of a budget if that is more
LEARNING, FEWEST_STEPS = 3 / 4, 200  # share of the remaining time for learned matching, if it makes so many steps
PASSES, STEP = 8, 3  # passes of each model over the data: for all closed forms, and for a step towards an image
GUESSING = 4  # passes for the one closed form that is tried on guesses, and for making these
SLOW = 2e10  # FLOP per second of two slow processor cores
TIMED = 0.25  # seconds on these of the pass by which a machine is timed
CHOOSING = 1 / 4  # share of the data that is held out, to choose by and for the verdict
FEWEST = 32  # examples are made, whatever they cost
JUDGED = 48, 256  # images to judge on, at least and at most
JUDGING = 1 / 8  # their share of the time for closed forms
BAGS = 4  # fits to few imagined images, of which the mean is taken
SYNTHETIC = {"pixel_values": 4, "input_ids": 2}  # inputs made per requested sample, where they are cheap
TAUGHT, WRITTEN = 4096, 1024  # examples of given data for distillation; at most so many texts are written for it
EVEN = " with even norms"  # end of the way of matching in a candidate's name
LEVEL = "full"
CLOSE = 1e-3  # relative decrease per sweep of matching by weights; what further sweeps gain is lost in the merge


@dataclass(frozen=True)
class Setup:
    """The models, settings and time of a search.

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
    def matching(self) -> Options:
        """The options of matching."""
        return replace(self.opt, tolerance=max(self.opt.tolerance, CLOSE))

    @property
    def centre(self) -> int:
        return self.frame.centre

    @cached_property
    def even(self) -> Frame | None:
        """The frame of the models with even norms, where that gives their streams more freedom."""
        return with_even_norms(self.frame, self.opt) if self.kin.kind == APART else None

    def frame_of(self, way: str) -> Frame:
        """Return the frame of the candidates that are matched in a way."""
        return self.even if way.endswith(EVEN) and self.even is not None else self.frame

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.started + (self.budget or USUAL) - time.perf_counter()

    def has_time(self, seconds: float, spent: float) -> bool:
        """Return whether this many seconds are left, also of the time for closed forms, on which so many were spent."""
        return seconds <= min(self.left, self.closed_seconds - spent)

    @property
    def closed_seconds(self) -> float:
        """Return the seconds that all closed forms may take."""
        budget = self.budget or USUAL
        if self.only_fits:
            return 3 / 4 * budget
        return min(max(CLOSED_SHARE * budget, CLOSED), budget / 2)

    @property
    def selecting(self) -> float:
        """Return how many seconds the choice of neurons and heads takes."""
        return operations(self.models[0].signature, len(self.models)) / self.speed

    @property
    def only_fits(self) -> bool:
        """Whether the models imagine images, without the time to learn from them."""
        return self.imagines and not self.learns(LEARNING * (self.budget or USUAL) / 2)

    @property
    def imagines(self) -> bool:
        """Whether the models imagine images."""
        return self.opt.self_made and self.example[0] == "pixel_values"

    @property
    def bags(self) -> int:
        """How many fits to take the mean of. There are several if time allows only few imagined images: a fit to few
        depends much on which they are (measured: docs/results/plain-command.md)."""
        return BAGS if self.only_fits else 1

    def learns(self, seconds: float) -> bool:
        """Return whether learned matching makes enough steps in some seconds. After a few, the average is worse than
        before."""
        step = 2 * SEVERAL * self.example[1]
        return seconds >= FEWEST_STEPS * step

    @cached_property
    def gathered(self) -> tuple[list[Batch], float]:
        """The data to fit candidates on and to choose by, and the seconds that an example of them took."""
        opt = self.opt
        if not opt.data or opt.samples == Options().samples:
            opt = replace(opt, data=opt.data or "self", samples=self.few if opt.self_made else TAUGHT)
        begun = time.perf_counter()
        batches = Data(self.models, opt, opt, self.tell, opt.labels).batches
        return batches, (time.perf_counter() - begun) / sum(map(examples_in, batches))

    @property
    def batches(self) -> list[Batch]:
        """The data to fit candidates on and to choose by."""
        return self.gathered[0]

    @cached_property
    def few(self) -> int:
        """How many examples closed forms use: as many as requested or affordable. After an earlier search they use as
        many as it did, so that no example is held out that it fitted on."""
        if self.earlier is not None:
            return self.earlier.few
        return self.affordable() if self.opt.samples == Options().samples else self.opt.samples

    @cached_property
    def example(self) -> tuple[str | None, float]:
        """The cheap kind of input that an example has, if any, and the seconds of one pass of all models and the merged
        one over it."""
        example, needed = self.measured
        kind = next((name for name in SYNTHETIC if name in example), None)
        return kind, (len(self.models) + 1) * needed / self.speed

    @cached_property
    def measured(self) -> tuple[Batch, int]:
        """An example, and the FLOP of a model's pass over it."""
        stock = self.stock[self.centre]
        if self.opt.self_made:
            length, seed = self.opt.context or usual_length(self.judged_on == GUESSED), self.opt.seed
            example: Batch = first_that_runs(stock.model, stock.model, 1, length, seed, partial(run, stock))[1]
        else:
            rows = recut(self.batches, 1, by_length=True)
            example = rows[len(rows) // 2]
        with FlopCounterMode(display=False) as counter:
            run(stock, example)
        return example, counter.get_total_flops()

    @cached_property
    def timed(self) -> tuple[int, float]:
        """The threads that are fastest here, and the seconds that they take for a pass over several examples."""
        batch = self.several  # ran once, so the model is warm
        return fastest_threads(partial(self.work, batch))

    @cached_property
    def speed(self) -> float:
        """FLOP per second that this machine makes in a pass over several examples: `SLOW` times a power of two, so that
        the same machine usually counts on the same. Fewer than `SLOW` in many small operations."""
        _, needed = self.measured
        doublings = log2(examples_in(self.several) * needed / self.timed[1] / SLOW) if needed else 0
        return SLOW * 2.0 ** floor(doublings)

    @cached_property
    def several(self) -> Batch:
        """Copies of an example, by which a machine is timed; one, if the class takes no more."""
        example, needed = self.measured
        count = round(min(SEVERAL, max(1, SLOW * TIMED / max(needed, 1))))
        batch = {name: torch.cat([value] * count) for name, value in example.items()}
        try:
            run(self.stock[self.centre], batch)
        except Exception:  # each class refuses inputs in its own way
            return example
        return batch

    def work(self, batch: Batch) -> None:
        """Run a model, and wait for what comes out."""
        output = predictions(run(self.stock[self.centre], batch))
        next(iter(output.values())).sum().item()  # another device computes until it is asked

    def affordable(self) -> int:
        """Return how many examples to use: those requested and as many as are held out, more if they are cheap; fewer
        if all closed forms could not be tried on them in their share of the time."""
        kind, seconds = self.example
        imagining = STEP * STEPS if self.imagines else 0
        wanted = self.opt.samples / (1 - CHOOSING) * SYNTHETIC.get(kind or "", 1)
        seconds *= GUESSING if self.blind else PASSES + imagining
        affordable = self.closed_seconds / seconds if seconds else wanted
        return round(min(wanted, max(affordable, FEWEST)))

    def spare(self, seconds: float) -> Sequence[Batch]:
        """Return data that closed forms do not use, for some seconds of distillation. Causal models write them: as many
        texts as are written and read once in this time."""
        if not self.opt.self_made or not writes(self.stock[0].model):
            return self.batches[self._most :]
        _, writing = self.gathered
        _, reading = self.example
        count = min(WRITTEN, round(seconds / (writing + STEP * reading)))
        return made(self.models, count, self.opt, seed=self.opt.seed + 2, means=self.opt) if count else []

    @cached_property
    def split(self) -> tuple[Sequence[Batch], Sequence[Batch]]:
        """The batches to fit on and those to choose by, each with texts of similar length."""
        batches = self.batches[: self._most]
        size = examples_in(batches[0])
        fit, held = (recut(part, size, by_length=True) for part in noised(batches, self.opt, CHOOSING))
        return fit, held

    @property
    def _most(self) -> int:
        """How many batches closed forms use: at least one to fit on and one to choose by."""
        return max(2, -(-self.few // examples_in(self.batches[0])))

    @property
    def blind(self) -> bool:
        """Whether closed forms are neither fitted nor chosen: the inputs are guesses, and norms can be even, which
        makes the average good. What has a lower divergence on guesses may have a higher one on real inputs (measured:
        docs/results/plain-command.md)."""
        return self.judged_on == GUESSED and self.even is not None

    @property
    def known(self) -> bool:
        """Whether the inputs are like the training data: given data, text that the models wrote, or sentences that
        encoders read (measured: docs/results/plain-command.md)."""
        if not self.opt.self_made or is_for(self.models[0], "masked-lm") or writes(self.stock[0].model):
            return True
        return reads_sentences(self.models[0], self.measured[0])

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

    @cached_property
    def mixed(self) -> bool:
        """Whether to learn and distil in bfloat16: if it is faster, since time is short."""
        return self.opt.mixed or (self.opt.dtype == torch.float32 and bfloat16_is_faster(self.opt.device))

    @cached_property
    def judged_on(self) -> str:
        """Return how a verdict describes the data."""
        return judged_on(self.opt, self.models[0])

    @cached_property
    def judging(self) -> Sequence[Batch]:
        """The inputs for the verdict, which nothing was fitted to: those to choose by, or, if the models imagine
        images, some of which they are sure."""
        if not self.imagines:
            return self.split[1]
        _, seconds = self.example
        count = self.closed_seconds * JUDGING / (SURE * STEP * seconds) if seconds else max(JUDGED)
        count = round(min(max(count, min(JUDGED)), max(JUDGED)))
        return made(self.models, count, self.opt, seed=self.opt.seed + 1, means=self.opt, steps=SURE)

    def too_easy(self) -> bool:
        """Return whether the models agree on nearly all pictures of which they are sure. If they do, a merge that is
        fitted to such pictures is worse on real ones than the average of the matched models (measured:
        docs/results/plain-command.md)."""
        return self.imagines and proves_nothing(self.judged_on, sources_agree(self.runs, self.judging))

    def lacks(self, one: Candidate) -> bool:
        """Return whether the verdict on a candidate would be that it is broken, or open because of the inputs."""
        merged, *sources = (partial(_same, run) for run in (self.run(one), *self.runs))
        verdict = judge(merged, sources, self.judging, self.judged_on)
        return verdict.works is False or proves_nothing(self.judged_on, verdict.sources_agree)

    def run(self, one: Candidate) -> Run:
        """Return a candidate as a function of a batch."""
        return partial(self.forward(one.frame), one.tensors)

    @property
    def runs(self) -> list[Run]:
        """Return the models, each of which returns its output for a batch."""
        return [partial(self.answer, number) for number in range(len(self.models))]

    def answer(self, number: int, batch: Batch) -> Mapping[str, Any]:
        """Return the output of one of the models."""
        return self.answers(batch)[number]


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


def comparable(models: Sequence[LoadedModel], batch: Batch) -> bool:
    """Return whether the models have an output in common, unlike classifiers for different tasks."""
    example = examples(batch, 0, 1)
    shapes = [{(name, value.shape) for name, value in predictions(run(model, example)).items()} for model in models]
    return bool(set.intersection(*shapes))


def one_shape(models: Sequence[Model]) -> bool:
    """Return whether all models have tensors of the same shapes, as learned matching requires."""
    shapes = [{role: entry.shape for role, entry in model.signature.tensors.items()} for model in models]
    return all(shape == shapes[0] for shape in shapes)


def _same(run: Run) -> Run:
    return run
