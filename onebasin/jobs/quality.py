# SPDX-License-Identifier: Apache-2.0
"""Choosing how to merge, by how much time it may take.

    fast        the nearest weights and their average: no data, no forward passes
    balanced    progressive merging after matching by weights and by activations: closed forms
    best        these, and progressive merging after learned matching: gradients

What the models do on data that nothing was fitted on decides between the candidates of a level: the KL divergence of
the merged model's predictions from the mixture of the models'. A quarter of the data is held out for that. Of the
candidates that are within one standard error of the best, example by example, the first is taken, which needs least
(the one-standard-error rule, Breiman et al., 1984, section 3.4.3), and fitted once more on nearly all data. No family
has a rule of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from onebasin.data.calibration import Data, is_for, noised, noisy
from onebasin.data.teaching import Teachers, divergence, example_losses, forward_of, predictions, split_held_out
from onebasin.fusion.average import Average
from onebasin.fusion.method import Merged, Method, Sources
from onebasin.fusion.progressive import AVERAGE, FITTED, Progressive, ProgressiveMerge, merge_progressively
from onebasin.models import Model, ModelError, distances
from onebasin.running import loaded_model
from onebasin.running.probes import probe
from onebasin.running.trace import Batch, run

from .aligning import Aligned, align_all, examples_per_step
from .options import Options, Tell

QUALITIES = ("fast", "balanced", "best")
LEVEL = "full"
RELATED = 0.7  # relative distance under which models share an origin, so that not matching them is a candidate, too
CHOOSING = 1 / 4  # share of the data that are held out to choose between candidates
BACKWARD = 3  # a step of learning in forward passes: forward and backward
SETTLED = {"method": "average", "match": "paper", "match_with": "weights", "soft": None, "spread": False}


@dataclass(frozen=True)
class Chosen:
    """The best candidate, and what to say about it. merged: None where the method has not run yet."""

    aligned: Aligned
    method: Method
    merged: Merged | None
    report: dict[str, Any]
    notes: list[str]


def refuse_settled(quality: str, **given: Any) -> None:
    """Raises ValueError for an unknown quality, and for options that it settles by itself."""
    if quality not in QUALITIES:
        raise ValueError(f"quality '{quality}': choose one of {', '.join(QUALITIES)}")
    for option, usual in SETTLED.items():
        if given[option] != usual:
            raise ValueError(f"quality chooses {option.replace('_', '-')} by itself; leave one of the two out")


def choose(
    quality: str,
    models: Sequence[Model],
    centre: int,
    layout: int,
    shares: Sequence[float],
    opt: Options,
    tell: Tell | None,
) -> Chosen:
    """Align and merge `models` in every way that the quality allows, and keep the best.

    models: in canonical form. centre, layout, shares: as in `merge`. Raises ValueError where data are needed and
    missing.
    """
    if quality == "fast":
        aligned = align_all(models, centre, LEVEL, opt, tell)
        why = "the nearest weights, averaged: what needs no data"
        report: dict[str, Any] = {"level": quality, "chosen": "weights, average", "candidates": {}, "why": why}
        return _told(Chosen(aligned, Average(), None, report, []), models, opt, None)
    if opt.data is None and is_for(models[0], "causal-lm"):  # it writes them itself
        opt = replace(opt, data="self")
    batches = Data(models, opt, opt, tell, opt.labels).batches
    fit, held = split_held_out(batches, None, CHOOSING)
    if opt.noise:
        fit, held = [*noisy(fit, opt.noise, opt.seed)], [*noisy(held, opt.noise, opt.seed + 1)]
    _refuse_incomparable(quality, models, held[0], opt)
    teachers = [loaded_model(model, dtype=opt.dtype, device=opt.device) for model in models]
    answers = Teachers([partial(forward_of(teacher), teacher.parameter) for teacher in teachers])
    forward, parts = forward_of(teachers[layout]), [share / sum(shares) for share in shares]
    candidates: dict[str, tuple[Aligned, Progressive]] = {}
    losses: dict[str, Tensor] = {}
    report = {"level": quality, "chosen": "", "candidates": {}, "why": ""}
    notes: list[str] = []

    def sources_of(aligned: Aligned) -> Sources:
        return Sources(aligned.models, shares, centre, layout)

    def consider(name: str, level: str = LEVEL, **how: Any) -> None:
        try:
            aligned = align_all(models, centre, level, replace(opt, **how), tell, fit, held)
            fitted = merge_progressively(sources_of(aligned), fit, held, means=opt, tell=tell)
        except ModelError as error:
            notes.append(f"no candidate: {name} ({error})")
            return
        candidates[name] = aligned, fitted
        losses[name] = example_losses(divergence, partial(forward, fitted.tensors), answers, parts, held)
        report["candidates"] |= {f"{name}, {method}": loss for method, loss in fitted.losses.items()}

    if all(distances(model, models[centre], dtype=opt.dtype).relative < RELATED for model in models):
        consider("unmatched", "none")
    for start in ("weights", "activations"):
        consider(start, match_with=start)
    if quality == "best" and _one_shape(models):
        seen = report["candidates"]
        start = min(("weights", "activations"), key=lambda name: seen.get(f"{name}, {AVERAGE}", float("inf")))
        consider(f"learned from {start}", match_with="learned", start=start)
    if not candidates:
        raise ModelError(f"quality '{quality}' cannot follow these models; use fast. " + "; ".join(notes))
    name = simplest_of_best(losses)
    aligned, fitted = candidates[name]
    if fitted.fitted:
        fitted = merge_progressively(sources_of(aligned), *noised(batches, opt), means=opt, tell=tell)
    report["chosen"] = f"{name}, {FITTED if fitted.fitted else AVERAGE}"
    report["why"] = (
        f"KL divergence {losses[name].mean():.4g} from the models' mixture on {len(losses[name])} examples held out; "
        f"the least is {min(loss.mean() for loss in losses.values()):.4g}, a standard error or less below"
    )
    method: Method = ProgressiveMerge() if fitted.fitted else Average()
    return _told(Chosen(aligned, method, fitted.merged(sources_of(aligned)), report, notes), models, opt, batches)


def simplest_of_best(losses: Mapping[str, Tensor]) -> str:
    """The first of the candidates whose mean loss is within one standard error of the least.

    losses: candidate -> its losses on the same examples, (examples,); the error is that of the mean difference to the
    best candidate, example by example.
    """
    best = losses[min(losses, key=lambda name: float(losses[name].mean()))]
    for name, own in losses.items():
        more = own - best
        error = float(more.std()) / len(more) ** 0.5 if len(more) > 1 else 0.0
        if float(more.mean()) <= error:
            return name
    raise AssertionError


def _refuse_incomparable(quality: str, models: Sequence[Model], batch: Batch, opt: Options) -> None:
    """Raises ValueError where the models have no output in common, such as classes of different tasks."""
    example = {name: value[:1] for name, value in batch.items() if name != "labels"}
    shapes = []
    for model in models:
        stock = loaded_model(model, dtype=opt.dtype, device=opt.device)
        shapes.append({(name, value.shape) for name, value in predictions(run(stock, example)).items()})
    if not set.intersection(*shapes):
        raise ValueError(f"quality '{quality}' compares what the models predict, but their heads have no output in "
                         "common; choose matching and method yourself, or fast")  # fmt: skip


def _one_shape(models: Sequence[Model]) -> bool:
    shapes = [{role: entry.shape for role, entry in model.signature.tensors.items()} for model in models]
    return all(shape == shapes[0] for shape in shapes)


# --- what the next level would cost -------------------------------------------------------------------------------


def _told(chosen: Chosen, models: Sequence[Model], opt: Options, batches: Sequence[Batch] | None) -> Chosen:
    """With notes: what was chosen, why, and what the next level would cost."""
    report = chosen.report
    notes = [f"quality {report['level']}: {report['chosen']} ({report['why']})", *chosen.notes]
    if report["level"] == QUALITIES[-1]:
        return replace(chosen, notes=[*notes, "beyond this lies training: onebasin refine"])
    following = QUALITIES[QUALITIES.index(report["level"]) + 1]
    seconds, examples = _pass(models[0], opt, batches)
    passes = passes_of(following, len(models), examples * opt.steps / opt.samples)
    report["next"] = {"level": following, "passes": round(passes, 1), "seconds": round(passes * seconds, 1)}
    data = "" if batches else f" {opt.samples} sequences or images of calibration data, and"
    notes.append(f"the next quality, {following}, needs{data} about {passes:.0f} forward passes over them, "
                 f"some {passes * seconds:.2g} seconds here")  # fmt: skip
    return replace(chosen, notes=notes)


def passes_of(quality: str, count: int, rounds: float) -> float:
    """What a quality needs for `count` models, in forward passes of one model over all calibration data.

    Activations: both models of every pair. Progressive merging: all models and the merged one, for every start and once
    more for what is chosen. Learning: all models once, and forward and backward for every step. rounds: its steps, as
    rounds of the data.
    """
    progressive = count + 1
    return {
        "fast": 0.0,
        "balanced": 2 * (count - 1) + 3 * progressive,
        "best": 2 * (count - 1) + 4 * progressive + count + BACKWARD * rounds,
    }[quality]


def _pass(model: Model, opt: Options, batches: Sequence[Batch] | None) -> tuple[float, int]:
    """Seconds that one model takes for all calibration data, and the examples in a step of learning.

    Measured on one batch; where there are no data yet, on random inputs of at most 64 tokens.
    """
    stock = loaded_model(model, dtype=opt.dtype, device=opt.device)
    batch = batches[0] if batches else probe(stock.model, stock.model, 4, 64, 0)
    started = time.perf_counter()
    examples = examples_per_step(forward_of(stock), stock.parameter, [batch])
    run(stock, batch)
    rows = len(next(iter(batch.values()))) + 1  # the step's example is one more
    return (time.perf_counter() - started) * opt.samples / rows, examples
