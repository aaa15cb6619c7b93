# SPDX-License-Identifier: Apache-2.0
"""onebasin merge: match every model to an anchor, then merge them into one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.engine import peak_memory
from onebasin.fusion import MERGE_METHODS, merged_tensors
from onebasin.fusion.progressive import Progressive, merge_progressively
from onebasin.fusion.regmean import Regression
from onebasin.models import Model, Rewritten, write_model
from onebasin.models.outputs import Output
from onebasin.running import load_model
from onebasin.settings import Temperature, checked
from onebasin.symmetry import LEVELS
from onebasin.symmetry.coupling import Softened

from .aligning import Aligned, align_all, calibration, noised, softened
from .folders import numel, one_vocabulary, opened, refuse_places, together, unit_folder, workplace
from .frame import Frame, in_one_frame
from .options import Fusion, ModelSource, Options, Tell, Written, refuse_out_of_range, shares_of, stored_dtype, taken
from .quality import LEVEL, choose, refuse_settled
from .statistics import combination, refuse_statistics
from .transporting import of_one_width, transported
from .writing import Record, hashed, ready_to_verify

FITTED = ("ot", "fisher", "regmean", "progressive")  # methods that need the models as exact copies, of one vocabulary


def merge(
    models: Sequence[ModelSource],
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
        if method in ("fisher", "regmean"):
            refuse_statistics(how, len(sources))
        target = stack.enter_context(workplace(output))
        replaces = refuse_places([Output("the output", target if output is None else output)],
                                 [*sources, *map(Path, how.statistics or ())], overwrite, opt)  # fmt: skip
        opt = stack.enter_context(unit_folder(output, opt))
        sha256 = stack.enter_context(hashed(sources))
        given, unified = stack.enter_context(one_vocabulary(sources, tokenizer_source, centre or 0))
        sized, centre, carried = of_one_size(plan, given, opt)
        frame = in_one_frame(sized, centre, match, opt, tell, shares=plan.shares, verify=verify)
        layout = frame.centre if heads_from is None else heads_from
        chosen = fuse(plan, frame, layout, opt)
        found = chosen.aligned.found
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": frame.centre,
            "method": chosen.method,
            "match": match if any(item.alignment.elements for item in found) else "none",
            "weights": plan.shares,
            "distance_before": [item.before.distance for item in found],
            "distance_after": [item.after.distance for item in found],
            "objective": found[0].objective,
        }
        if how.of(chosen.method):
            result["settings"] = how.of(chosen.method)
        if chosen.report:
            result["quality"] = chosen.report
        if method == "ot" and not carried:
            merged = transported(chosen.aligned.models, frame.centre, how, opt, tell)
        else:
            merged = softly(plan, frame, chosen.aligned, opt)
        result["notes"] = notes_of(plan, frame, chosen, layout)
        if unified is not None:
            merged = unified.filled(merged, opt.dtype)
        tensors: Iterable[tuple[str, Tensor]]
        if chosen.fitted is not None:
            result["ridges"], result["held_out_losses"] = chosen.fitted.ridges, chosen.fitted.losses
            whole, entries = chosen.fitted.tensors, merged[layout].signature.tensors
            tensors = (pair for role, entry in entries.items() if entry.stored for pair in entry.split(whole[role]))
        else:
            measured = chosen.method in ("fisher", "regmean")
            combine = combination(method, chosen.aligned.models, how, opt, tell) if measured else None
            tensors = merged_tensors(merged, plan.shares, layout, set(frame.common.roles),
                                     method=chosen.method, combine=combine, dtype=opt.dtype, device=opt.device,
                                     workers=opt.workers, ray=None if measured else opt.ray)  # fmt: skip
            if isinstance(combine, Regression):
                result["jitter"] = combine.jitter  # layer -> number, as they are solved
        record = Record("merge", command, sources, opt, result, found, sha256)

        def complete(folder: Path) -> None:
            """Before anyone sees the folder."""
            result["max_output_difference"] = frame.differences(chosen.aligned.models, opt, tell)
            record.write(folder, look.write_model_card)

        if tell:
            tell("writing")
        stack.enter_context(ready_to_verify(given, frame.how))
        with together(opt) as placing:
            write_model(
                target,
                tensors,
                merged[layout],
                overwrite=replaces(target),
                dtype=stored,
                check=complete,
                placing=placing,
                **look.told,
            )
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
        checked(Temperature | None, "soft", self.soft)
        if self.soft is not None and self.method in ("ot", "fisher", "regmean"):
            raise ValueError(f"--soft mixes models after they were measured: leave it out with --method {self.method}")
        refuse_out_of_range("heads-from", self.heads_from, len(self.shares))
        refuse_out_of_range("anchor", self.anchor, len(self.shares))


@dataclass(frozen=True)
class Fused:
    """The aligned models and how they become one: by `method`, or as they were `fitted` already.

    report: of the choice of quality. notes: what it says besides.
    """

    aligned: Aligned
    method: str
    fitted: Progressive | None = None
    report: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fuse(plan: Plan, frame: Frame, layout: int, opt: Options) -> Fused:
    """Align the models of a frame, and fit their merge to data where the method or the quality does."""
    models, centre, tell = frame.models, frame.centre, plan.tell
    if plan.quality is not None:
        chosen = choose(plan.quality, models, centre, layout, plan.shares, opt, tell)
        method = "progressive" if chosen.fitted is not None and chosen.fitted.fitted else "average"
        return Fused(chosen.aligned, method, chosen.fitted, chosen.report, chosen.notes)
    looks = plan.method == "progressive" or (plan.match != "none" and opt.measures)
    batches, held = noised(calibration(models, opt, tell), opt) if looks else ([], None)
    aligned = align_all(models, centre, plan.match, opt, tell, batches, held)
    if plan.method != "progressive":
        return Fused(aligned, plan.method)
    fitted = merge_progressively(aligned.models, plan.shares, layout, set(frame.common.roles), batches, held_out=held,
                                 spread=plan.how.spread, dtype=opt.dtype, device=opt.device, tell=tell)  # fmt: skip
    return Fused(aligned, plan.method, fitted)


def of_one_size(plan: Plan, given: Sequence[Model], opt: Options) -> tuple[list[Model], int | None, bool]:
    """The models and the anchor's number; carried to its widths where `ot` merges models of others without matching."""
    if plan.method != "ot" or plan.match != "none" or of_one_width(given):
        return list(given), plan.anchor, False
    anchor = max(range(len(given)), key=lambda i: numel(given[i])) if plan.anchor is None else plan.anchor
    return transported(given, anchor, plan.how, opt, plan.tell), anchor, True


def softly(plan: Plan, frame: Frame, aligned: Aligned, opt: Options) -> list[Model]:
    """The aligned models, relaxed or soft where that was asked."""
    models: list[Model] = list(aligned.models)
    for i, item in zip(frame.others, aligned.found, strict=True):
        if item.couplings:
            models[i] = Rewritten(frame.models[i], Softened(item.alignment, item.couplings), opt.dtype)
        if plan.soft is not None:
            soft = softened(aligned.models[i], frame.models[frame.centre], plan.soft, opt)
            models[i] = Rewritten(frame.models[i], soft, opt.dtype)
    return models


def notes_of(plan: Plan, frame: Frame, way: Fused, layout: int) -> list[str]:
    """What the user should know about the result, each once."""
    notes = [*frame.models[layout].notes, *(note for item in way.aligned.found for note in item.notes)]
    if frame.common.differing:
        notes.append(f"copied from model {layout} ({frame.given[layout].name}), since the models differ there: "
                     + ", ".join(frame.common.differing))  # fmt: skip
    if any(item.couplings for item in way.aligned.found):
        notes.append("relaxed permutations: the averaged models are no longer the same functions as their sources")
    if plan.soft is not None:
        notes.append("soft couplings: the mixed models are no longer the same functions as their sources")
    return list(dict.fromkeys([*notes, *way.notes]))
