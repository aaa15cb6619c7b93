# SPDX-License-Identifier: Apache-2.0
"""Candidates are tried in order of cost until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onebasin.engine import threads
from onebasin.fusion.average import Average
from onebasin.fusion.circuits import Circuit
from onebasin.fusion.method import Merged
from onebasin.fusion.progressive import ProgressiveMerge
from onebasin.jobs.aligning import align_all
from onebasin.models.errors import one_line
from onebasin.models.kinship import APART
from onebasin.running.classes import runnable
from onebasin.running.trace import Batch

from .candidates import UNMATCHED, closed_form, distilled, fitted, learned, matched, resumed, selected
from .chosen import Candidate, Chosen
from .curve import LAMBDAS, line
from .setup import EVEN, LEARNING, LEVEL, Setup, comparable, one_shape, too_large

MORE, MORE_IMAGINED = 60.0, 180.0  # seconds of distillation, or of learning on images, if a closed form works
SHORTEST = 5.0  # seconds; a shorter descent is not worth starting
COPIES = 1e-4  # relative distance below which matched models are the same function


def choose(setup: Setup) -> Chosen:
    """Align and merge models in every way that there is time for, and return the best.

    If the models cannot make inputs for each other, they are matched by weights alone.

    Raises:
        ValueError: Given data do not fit the models, or the models have no output in common.
    """
    if too_large(setup.models, setup.opt):
        return by_weights(setup, "the models are too large for this machine's memory to try anything on data")
    with ExitStack() as stack:
        try:
            for model in setup.models:
                runnable(model.origin)
            stack.enter_context(threads(setup.timed[0]))
            if not comparable(setup.stock, setup.judging[0]):
                raise ValueError("the models predict nothing that is comparable: their heads have no output in common")
            too_easy = setup.too_easy()
        except Exception as error:  # each model class fails in its own way on inputs that it does not accept
            if setup.opt.data:
                raise
            return by_weights(setup, f"nothing could be tried on inputs that the models make ({one_line(error)})")
        if too_easy:
            return by_weights(setup, "nothing was fitted to the pictures that the models imagine, since they agree on "
                                      "nearly all of them; give --data FILE", setup.judging)  # fmt: skip
        return searched(setup)


def searched(setup: Setup) -> Chosen:
    """Return the best of what there is time for."""
    trials = Trials(setup)
    try:
        if setup.earlier is not None:
            trials.consider("the earlier result", partial(resumed, setup, setup.earlier))
        if not trials.found:
            trials.try_closed_forms()
        if not trials.found:
            return by_weights(setup, "; ".join(trials.notes))
        trials.improve()
    except KeyboardInterrupt:
        if setup.budget is None or not trials.found:
            raise
        trials.notes.append("stopped by Ctrl-C: the best so far is written")
    return trials.chosen()


def by_weights(setup: Setup, why: str, held: Sequence[Batch] = ()) -> Chosen:
    """Return the average of models matched by their weights, with heads matched by the maps that they compute
    (measured: docs/results/plain-command.md); or the plain average, if they have a common base.

    held: data to judge it on; made for that if there are none.
    """
    level, method = (LEVEL, Circuit()) if setup.kin.kind == APART else ("none", Average())
    aligned = align_all(setup.models, setup.centre, level, setup.matching, setup.tell)
    notes = [f"{why}: averaged by weights alone"]
    return Chosen(setup.frame, aligned, method, notes=notes, held=held, judged_on=setup.judged_on)


@dataclass
class Trials:
    """The candidates that a search has tried, the seconds that each took, and notes on those that it did not try."""

    setup: Setup
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
        return self.setup.kin.kind == APART and max(distances, default=1.0) >= COPIES

    def consider_closed(self, name: str, make: Callable[[], Candidate], needed: float) -> None:
        """Try a closed form, unless there is no time for one that takes so many seconds (0 if that is not known)."""
        if needed and not self.setup.has_time(needed, sum(self.seconds.values())):
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
        """Try the best units of all models, then the average and progressive merging after every closed-form matching.

        Activations on a few imagined images neither match nor choose well, and the spread of outputs on these is not
        that on real ones (measured: docs/results/plain-command.md).
        """
        setup, ways = self.setup, ["weights", UNMATCHED]
        if setup.kin.kind == APART and not setup.blind:
            way = f"weights{EVEN if setup.even is not None else ''}"
            self.consider_closed(f"{way}, select", partial(selected, setup, way), setup.selecting)
        if not setup.only_fits:
            ways.insert(0, "activations")
            if setup.even is not None:
                ways.insert(0, f"activations{EVEN}")
        for way in ways if setup.kin.kind == APART else ways[-1:]:
            self.consider_closed(way, partial(closed_form, setup, way), max(self.seconds.values(), default=0.0))
            if self.found and setup.blind:
                break
            if way in ("activations", "weights") and self.found and not self.apart:
                self.notes.append("matching finds that the models are one function, written differently")
                break
        if not self.found or setup.only_fits:
            return
        if (
            isinstance((first := self.best).method, ProgressiveMerge) and not first.method.select
        ):  # which keeps it anyway
            spread = partial(fitted, setup, first.way, first.aligned, spread=True)
            self.consider_closed(f"{first.way}, spread", spread, self.seconds[first.name])

    def improve(self) -> None:
        """Distil the best candidate; or learn matching if the inputs are imagined images, on which distillation lowers
        the loss while the model gets worse on real ones."""
        setup = self.setup
        unbounded = setup.budget is not None or setup.blind or setup.lacks(self.best)
        more = MORE_IMAGINED if setup.imagines else MORE
        goes_on = self.apart and (setup.known or setup.imagines)
        seconds = setup.left if unbounded else min(setup.left, more) if goes_on else 0.0
        learning = seconds * LEARNING
        if not setup.imagines and seconds > SHORTEST:
            self.consider("distilled", lambda: distilled(setup, self.best, seconds))
        able = self.apart and one_shape(setup.models) and learning > SHORTEST
        if setup.imagines and able and setup.learns(learning):
            start = next((one.way for one in self.found if one.way.startswith("activations")), "weights")
            self.consider("learned", lambda: learned(setup, start, learning))
        if setup.imagines and unbounded:
            self.notes.append("not distilled on pictures that the models imagine; give --data FILE")

    def chosen(self) -> Chosen:
        """Return the best candidate, with a report on all of them."""
        setup, taken = self.setup, self.best
        signature = taken.frame.models[setup.template].signature
        entries = signature.tensors.items()
        pairs = (pair for role, entry in entries if entry.stored for pair in entry.split(taken.tensors[role]))
        report: dict[str, Any] = {
            "budget": setup.budget,
            "chosen": taken.name,
            "candidates": {
                one.name: {"loss": one.loss, "seconds": round(self.seconds[one.name], 1)} for one in self.found
            },
            "data": setup.opt.data or "self",
            "held_out": len(taken.losses),
            "few": setup.few,
        }
        if setup.draws and len(setup.models) == 2:
            report["line"] = {
                "lambdas": list(LAMBDAS), "unmatched": line(setup, matched(setup, UNMATCHED), setup.frame)
            }  # fmt: skip
            if any(pair.alignment.elements for pair in taken.aligned.found):
                report["line"]["matched"] = line(setup, taken.aligned, taken.frame)
        losses = ", ".join(f"{one.name} {one.loss:.4g}" for one in sorted(self.found, key=lambda one: one.loss))
        notes = [f"chosen by KL divergence on {len(taken.losses)} examples held out: {losses}", *self.notes]
        merged = Merged(pairs, taken.facts)
        return Chosen(taken.frame, taken.aligned, taken.method, merged, report, notes, setup.judging, setup.judged_on)
