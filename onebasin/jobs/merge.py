# SPDX-License-Identifier: Apache-2.0
"""onebasin merge: match every model to an anchor, then merge them into one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.checkpoint import Widened, load_model, write_model
from onebasin.engine import peak_memory
from onebasin.fusion import MERGE_METHODS, merged_tensors, nearest_to_mean
from onebasin.fusion.progressive import Progressive, merge_progressively
from onebasin.fusion.regmean import Regression
from onebasin.symmetry import LEVELS, Alignment
from onebasin.symmetry.coupling import Softened

from .aligning import align_all, calibration, softened
from .folders import (
    common_roles,
    gauge,
    numel,
    one_vocabulary,
    opened,
    refuse_existing,
    unit_folder,
    widened,
    workplace,
)
from .options import (
    Fusion,
    Model,
    Options,
    Tell,
    Written,
    refuse_out_of_range,
    shares_of,
    stored_dtype,
    taken,
    verification,
)
from .quality import LEVEL, choose, refuse_settled
from .statistics import combination
from .transporting import of_one_width, transported
from .writing import Record, moved, refuse_unverifiable, verified

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
    if match != "none" and match not in LEVELS:
        raise ValueError(f"unknown --match '{match}'; choose from none, {', '.join(LEVELS)}")
    if method not in MERGE_METHODS:
        raise ValueError(f"unknown method '{method}'; choose from {', '.join(MERGE_METHODS)}")
    if len(models) < 2:
        raise ValueError("merging needs at least two models")
    shares, stored = shares_of(weights, len(models)), stored_dtype(dtype)
    how, look = taken(Fusion, options), taken(Written, options)
    if quality is not None:
        refuse_settled(quality, method=method, match=match, match_with=options.get("match_with", "weights"), soft=soft)
        match = LEVEL
    opt = Options(**options, symmetry=match if match != "none" else "paper")
    if soft is not None and method in ("ot", "fisher", "regmean"):
        raise ValueError(f"--soft mixes models after they were measured: leave it out with --method {method}")
    if opt.permutations == "sinkhorn" and (soft is not None or method in FITTED):
        raise ValueError("permutations 'sinkhorn' make models for averaging: leave out --soft and --method " + method)
    if tokenizer_source is not None and (quality is not None or method in FITTED):
        raise ValueError("--tokenizer-source: models of different vocabularies can be averaged, not fitted")
    with ExitStack() as stack:
        sources = stack.enter_context(opened(models, opt.family))
        target = stack.enter_context(workplace(output))
        refuse_existing(target, sources, overwrite)
        opt = stack.enter_context(unit_folder(output, opt))
        base = 0 if anchor == "auto" else min(int(anchor), len(models) - 1)
        given, unified = stack.enter_context(one_vocabulary(sources, tokenizer_source, base))
        for checkpoint in given if verification(verify) == "outputs" and match != "none" else []:
            refuse_unverifiable(checkpoint)
        refuse_out_of_range("heads-from", heads_from, len(models))
        if anchor != "auto":
            refuse_out_of_range("anchor", int(anchor), len(models))
        gauged = [gauge(checkpoint, opt, tell) if match != "none" else checkpoint for checkpoint in given]
        widest = max(range(len(gauged)), key=lambda i: numel(gauged[i]))
        gauged = [widened(model, gauged[widest if anchor == "auto" else int(anchor)]) for model in gauged]
        transport = method == "ot"
        if transport and match == "none" and not of_one_width(gauged):
            anchor = widest if anchor == "auto" else int(anchor)
            gauged, transport = transported(gauged, anchor, [Alignment()] * len(gauged), how, opt, tell), False
        shared = common_roles(gauged)
        if anchor != "auto":
            centre = int(anchor)
        elif any(isinstance(model, Widened) for model in gauged):
            centre = widest
        else:
            centre = nearest_to_mean(gauged, shared.roles, shares)
        layout = centre if heads_from is None else heads_from
        fitted: Progressive | None = None
        if quality is None:
            batches = (
                calibration(gauged, opt, tell) if method == "progressive" or (match != "none" and opt.measures) else []
            )
            found, alignments = align_all(gauged, centre, match, opt, tell, batches)
            if method == "progressive":
                fitted = merge_progressively(gauged, alignments, shares, layout, set(shared.roles), batches,
                                             dtype=opt.dtype, device=opt.device, tell=tell)  # fmt: skip
        else:
            chosen = choose(quality, gauged, centre, layout, shares, opt, tell)
            found, alignments, fitted = chosen.found, chosen.alignments, chosen.fitted
            method = "progressive" if fitted is not None and fitted.fitted else "average"
        notes = [*gauged[layout].notes, *(note for item in found for note in item.notes)]
        if shared.differing:
            notes.append(f"copied from model {layout} ({given[layout].given}), since the models differ there: "
                         + ", ".join(shared.differing))  # fmt: skip
        differences = [
            verified(given[i], gauged[i], alignments[i], opt, tell, verify) if match != "none" else None
            for i in range(len(gauged))
            if i != centre
        ]
        rewrites: list[Alignment | Softened] = list(alignments)
        for i, item in zip((i for i in range(len(gauged)) if i != centre), found, strict=True):
            if item.couplings:
                rewrites[i] = Softened(alignments[i], item.couplings)
                notes.append(
                    "relaxed permutations: the averaged models are no longer the same functions as their sources"
                )
        if transport:
            gauged = transported(gauged, centre, alignments, how, opt, tell)
            rewrites = [Alignment() for _ in gauged]
        if soft is not None:
            rewrites = [
                alignment if i == centre else softened(gauged[i], gauged[centre], alignment, soft, opt)
                for i, alignment in enumerate(alignments)
            ]
            notes.append("soft couplings: the mixed models are no longer the same functions as their sources")
        result: dict[str, Any] = {
            "output": None if output is None else str(output),
            "anchor": centre,
            "method": method,
            "match": match,
            "weights": shares,
            "distance_before": [item.before.distance for item in found],
            "distance_after": [item.after.distance for item in found],
            "objective": found[0].objective,
            "max_output_difference": differences,
        }
        if how.of(method):
            result["settings"] = how.of(method)
        if quality is not None:
            result["quality"] = chosen.report
            notes += chosen.notes
        result["notes"] = list(dict.fromkeys(notes))
        record = Record("merge", command, sources, opt, result, found)
        tensors: Iterator[tuple[str, Tensor]]
        if fitted is not None:
            result["ridges"], result["held_back_losses"] = fitted.ridges, fitted.losses
            whole = fitted.tensors
            entries = gauged[layout].signature.tensors
            tensors = (pair for role, entry in entries.items() if entry.stored for pair in entry.split(whole[role]))
        else:
            measured = method in ("fisher", "regmean")
            combine = combination(method, gauged, alignments, how, opt, tell) if measured else None
            if unified is not None:
                gauged = unified.filled([moved(*pair, opt) for pair in zip(gauged, rewrites, strict=True)], opt.dtype)
                rewrites = [Alignment() for _ in gauged]
            tensors = merged_tensors(gauged, rewrites, shares, layout, set(shared.roles), method=method,
                                     combine=combine, dtype=opt.dtype, device=opt.device)  # fmt: skip
            if isinstance(combine, Regression):
                result["jitter"] = combine.jitter  # layer -> number, as they are solved
        if tell:
            tell("writing")
        write_model(
            target,
            tensors,
            gauged[layout],
            overwrite=overwrite,
            dtype=stored,
            config_updates=gauged[layout].config_updates,
            check=lambda folder: record.write(folder, look.write_model_card),
            **look.told,
        )  # fmt: skip
        if output is None:
            result["model"] = load_model(target)
    result["seconds"], result["peak_memory"] = round(time.perf_counter() - started, 3), peak_memory()
    return result
