# SPDX-License-Identifier: Apache-2.0
"""onebasin merge: match every model to an anchor, then merge them into one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.engine import peak_memory
from onebasin.fusion import MERGE_METHODS, merged_tensors
from onebasin.fusion.progressive import Progressive, merge_progressively
from onebasin.fusion.regmean import Regression
from onebasin.models import Checkpoint, write_model
from onebasin.running import load_model
from onebasin.symmetry import LEVELS, Alignment
from onebasin.symmetry.coupling import Softened

from .aligning import Found, align_all, calibration, noised, softened
from .folders import common_roles, numel, one_vocabulary, opened, refuse_existing, unit_folder, workplace
from .frame import Frame, in_one_frame
from .options import Fusion, Model, Options, Tell, Written, refuse_out_of_range, shares_of, stored_dtype, taken
from .quality import LEVEL, choose, refuse_settled
from .statistics import combination
from .transporting import of_one_width, transported
from .writing import Record, hashed, moved, ready_to_verify

FITTED = ("ot", "fisher", "regmean", "progressive")  # methods that need the models as exact copies, of one vocabulary


def merge(
    models: Sequence[Model],
    output: str | Path | None = None,
    *,
    method: str = "average",
    quality: str | None = None,
    weights: Sequence[float] | None = None,
    match: str = "paper",
    anchor: int | str = "auto",
    heads_from: int | None = None,
    soft: float | None = None,
    tokenizer_source: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool | str = "outputs",
    tell: Tell | None = None,
    command: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Match every model to an anchor, then merge them into one.

    method: one of `MERGE_METHODS`; `fisher`, `regmean` and `progressive` look at calibration data. quality: fast,
    balanced or best, which choose level, matching and method by themselves, see `onebasin.jobs.quality`. weights: one
    per model (default: equal); they are used as given. match: "none" or a level of symmetry. anchor: the model that
    stays as it is, counted from 0, or "auto": the one nearest to the mean of all. heads_from: the model whose task
    head, labels and configuration the result takes (default: the anchor). soft: temperature of a coupling that mixes
    FFN neurons after matching (semi-permutations; the mixed models are then no longer the same functions). verify:
    check that every matched model still computes its source's function, as in `match`. tokenizer_source: for models of
    different vocabularies, union, base (the anchor's; the first model's where that is auto) or one of the models.
    options: those of `Options`, `Fusion` and `Written`.

    Returns as `match`, with lists over the matched models. Raises ValueError as `match` does.
    """
    started = time.perf_counter()
    stored = stored_dtype(dtype)
    how, look = taken(Fusion, options), taken(Written, options)
    if quality is not None:
        given_match = options.get("match_with", "weights")
        refuse_settled(
            quality, method=method, match=match, match_with=given_match, soft=soft, spread=how.spread
        )  # fmt: skip
        match = LEVEL
    opt = Options(**options, symmetry="paper" if match == "none" else match)
    centre = None if anchor == "auto" else int(anchor)
    plan = Plan(method, quality, match, shares_of(weights, len(models)), centre, heads_from, soft, how, verify, tell)
    if tokenizer_source is not None and (quality is not None or method in FITTED):
        raise ValueError("--tokenizer-source: models of different vocabularies can be averaged, not fitted")
    if opt.permutations == "sinkhorn" and (soft is not None or method in FITTED):
        raise ValueError("permutations 'sinkhorn' make models for averaging: leave out --soft and --method " + method)
    with ExitStack() as stack:
        sources = stack.enter_context(opened(models, opt.family))
        target = stack.enter_context(workplace(output))
        refuse_existing(target, sources, overwrite)
        opt = stack.enter_context(unit_folder(output, opt))
        sha256 = stack.enter_context(hashed(sources))
        given, unified = stack.enter_context(one_vocabulary(sources, tokenizer_source, centre or 0))
        frame, chosen = aligned(plan, given, opt)
        layout = frame.centre if heads_from is None else heads_from
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": frame.centre,
            "method": chosen.method,
            "match": match if any(item.alignment.elements for item in frame.found) else "none",
            "weights": plan.shares,
            "distance_before": [item.before.distance for item in frame.found],
            "distance_after": [item.after.distance for item in frame.found],
            "objective": frame.found[0].objective,
        }
        if how.of(chosen.method):
            result["settings"] = how.of(chosen.method)
        if chosen.report:
            result["quality"] = chosen.report
        merged, rewrites = rewritten_models(plan, frame, chosen, opt)
        result["notes"] = notes_of(plan, frame, chosen, layout)
        if unified is not None:
            merged = unified.filled([moved(*pair, opt) for pair in zip(merged, rewrites, strict=True)], opt.dtype)
            rewrites = [Alignment() for _ in merged]
        tensors: Iterable[tuple[str, Tensor]]
        if chosen.fitted is not None:
            result["ridges"], result["held_back_losses"] = chosen.fitted.ridges, chosen.fitted.losses
            whole, entries = chosen.fitted.tensors, merged[layout].signature.tensors
            tensors = (pair for role, entry in entries.items() if entry.stored for pair in entry.split(whole[role]))
        else:
            measured = chosen.method in ("fisher", "regmean")
            combine = combination(method, merged, frame.alignments, how, opt, tell) if measured else None
            tensors = merged_tensors(merged, rewrites, plan.shares, layout, set(frame.common.roles),
                                     method=chosen.method, combine=combine, dtype=opt.dtype, device=opt.device,
                                     workers=opt.workers, ray=None if measured else opt.ray)  # fmt: skip
            if isinstance(combine, Regression):
                result["jitter"] = combine.jitter  # layer -> number, as they are solved
        record = Record("merge", command, sources, opt, result, frame.found, sha256)

        def complete(folder: Path) -> None:
            """Before anyone sees the folder."""
            result["max_output_difference"] = frame.differences(opt, tell)
            record.write(folder, look.write_model_card)

        if tell:
            tell("writing")
        stack.enter_context(ready_to_verify(given, frame.how))
        write_model(
            target,
            tensors,
            merged[layout],
            overwrite=overwrite,
            dtype=stored,
            config_updates=merged[layout].config_updates,
            check=complete,
            **look.told,
        )  # fmt: skip
        if output is None:
            result["model"] = load_model(target)
    result["seconds"], result["peak_memory"] = round(time.perf_counter() - started, 3), peak_memory()
    return result


@dataclass(frozen=True)
class Plan:
    """What `merge` was asked for; anchor: None for auto. Raises ValueError for what does not go together."""

    method: str
    quality: str | None
    match: str
    shares: list[float]
    anchor: int | None
    heads_from: int | None
    soft: float | None
    how: Fusion
    verify: bool | str
    tell: Tell | None

    def __post_init__(self) -> None:
        if self.match != "none" and self.match not in LEVELS:
            raise ValueError(f"unknown --match '{self.match}'; choose from none, {', '.join(LEVELS)}")
        if self.method not in MERGE_METHODS:
            raise ValueError(f"unknown method '{self.method}'; choose from {', '.join(MERGE_METHODS)}")
        if len(self.shares) < 2:
            raise ValueError("merging needs at least two models")
        if self.soft is not None and self.method in ("ot", "fisher", "regmean"):
            raise ValueError(f"--soft mixes models after they were measured: leave it out with --method {self.method}")
        refuse_out_of_range("heads-from", self.heads_from, len(self.shares))
        refuse_out_of_range("anchor", self.anchor, len(self.shares))


@dataclass(frozen=True)
class Way:
    """How the aligned models become one: by `method`, or as they were `fitted` already. report: of the choice of
    quality. transport: whether `ot` still has to carry them. given: models whose folders are merged."""

    method: str
    fitted: Progressive | None
    report: dict[str, Any]
    notes: list[str]
    transport: bool
    given: list[Checkpoint]


def aligned(plan: Plan, given: list[Checkpoint], opt: Options) -> tuple[Frame, Way]:
    """The models in one frame, and how to merge them there, which the quality may choose with the frame."""
    tell, anchor, models, transport = plan.tell, plan.anchor, given, plan.method == "ot"
    if transport and plan.match == "none" and not of_one_width(given):
        anchor = max(range(len(given)), key=lambda i: numel(given[i])) if anchor is None else anchor
        models, transport = transported(given, anchor, [Alignment()] * len(given), plan.how, opt, tell), False
    method, fitted, report, notes = plan.method, None, {}, []

    def align(models: Sequence[Checkpoint], centre: int) -> tuple[list[Found], list[Alignment]]:
        nonlocal method, fitted, report, notes
        layout = centre if plan.heads_from is None else plan.heads_from
        if plan.quality is not None:
            chosen = choose(plan.quality, models, centre, layout, plan.shares, opt, tell)
            fitted, report, notes = chosen.fitted, chosen.report, chosen.notes
            method = "progressive" if fitted is not None and fitted.fitted else "average"
            return chosen.found, chosen.alignments
        looks = method == "progressive" or (plan.match != "none" and opt.measures)
        batches, held = noised(calibration(models, opt, tell), opt) if looks else ([], None)
        found, alignments = align_all(models, centre, plan.match, opt, tell, batches, held)
        if method == "progressive":
            fitted = merge_progressively(models, alignments, plan.shares, layout, set(common_roles(models).roles),
                                         batches, held_back=held, spread=plan.how.spread, dtype=opt.dtype,
                                         device=opt.device, tell=tell)  # fmt: skip
        return found, alignments

    frame = in_one_frame(
        models, anchor, plan.match, opt, tell, shares=plan.shares, verify=plan.verify, align=align
    )  # fmt: skip
    return frame, Way(method, fitted, report, notes, transport, given)


def rewritten_models(
    plan: Plan, frame: Frame, way: Way, opt: Options
) -> tuple[list[Checkpoint], list[Alignment | Softened]]:
    """The models that are merged, and what each is rewritten by: relaxed, soft or transported where that was asked."""
    if way.transport:
        carried = transported(frame.models, frame.centre, frame.alignments, plan.how, opt, plan.tell)
        return carried, [Alignment() for _ in carried]
    rewrites: list[Alignment | Softened] = list(frame.alignments)
    for i, item in zip(frame.others, frame.found, strict=True):
        if item.couplings:
            rewrites[i] = Softened(frame.alignments[i], item.couplings)
        if plan.soft is not None:
            rewrites[i] = softened(frame.models[i], frame.models[frame.centre], frame.alignments[i], plan.soft, opt)
    return frame.models, rewrites


def notes_of(plan: Plan, frame: Frame, way: Way, layout: int) -> list[str]:
    """What the user should know about the result, each once."""
    notes = [*frame.models[layout].notes, *(note for item in frame.found for note in item.notes)]
    if frame.common.differing:
        notes.append(f"copied from model {layout} ({way.given[layout].given}), since the models differ there: "
                     + ", ".join(frame.common.differing))  # fmt: skip
    if any(item.couplings for item in frame.found):
        notes.append("relaxed permutations: the averaged models are no longer the same functions as their sources")
    if plan.soft is not None:
        notes.append("soft couplings: the mixed models are no longer the same functions as their sources")
    return list(dict.fromkeys([*notes, *way.notes]))
