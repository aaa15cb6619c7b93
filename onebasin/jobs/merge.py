# SPDX-License-Identifier: Apache-2.0
"""onebasin merge: match every model to an anchor, then merge them into one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from onebasin.checkpoint import Widened, load_model, write_model
from onebasin.fusion import METHODS, merged_tensors, nearest_to_mean
from onebasin.fusion.progressive import merge_progressively
from onebasin.symmetry import LEVELS, Alignment
from onebasin.symmetry.coupling import Softened

from .aligning import align_all, calibration, softened
from .folders import common_roles, gauge, numel, opened, refuse_existing, widened, workplace
from .options import Model, Options, Tell, refuse_out_of_range, shares_of, stored_dtype
from .writing import Record, refuse_unverifiable, verified


def merge(
    models: Sequence[Model],
    output: str | Path | None = None,
    *,
    method: str = "average",
    weights: Sequence[float] | None = None,
    match: str = "paper",
    anchor: int | str = "auto",
    heads_from: int | None = None,
    soft: float | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    tell: Tell | None = None,
    command: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Match every model to an anchor, then merge them into one.

    method: one of `METHODS`, or "progressive": layer by layer on calibration data. weights: one per model (default:
    equal); they are used as given. match: "none" or a level of symmetry. anchor: the model that stays as it is, counted
    from 0, or "auto": the one nearest to the mean of all. heads_from: the model whose task head, labels and
    configuration the result takes (default: the anchor). soft: temperature of a coupling that mixes FFN neurons after
    matching (semi-permutations; the mixed models are then no longer the same functions). verify: check that every
    matched model still computes its source's function.

    Returns as `match`, with lists over the matched models. Raises ValueError as `match` does.
    """
    started = time.perf_counter()
    if match != "none" and match not in LEVELS:
        raise ValueError(f"unknown --match '{match}'; choose from none, {', '.join(LEVELS)}")
    if method not in (*METHODS, "progressive"):
        raise ValueError(f"unknown method '{method}'; choose from {', '.join((*METHODS, 'progressive'))}")
    if len(models) < 2:
        raise ValueError("merging needs at least two models")
    shares, stored = shares_of(weights, len(models)), stored_dtype(dtype)
    opt = Options(**options, symmetry=match if match != "none" else "paper")
    with opened(models, opt.family) as given, workplace(output) as target:
        refuse_existing(target, given, overwrite)
        for checkpoint in given if verify and match != "none" else []:
            refuse_unverifiable(checkpoint)
        refuse_out_of_range("heads-from", heads_from, len(models))
        if anchor != "auto":
            refuse_out_of_range("anchor", int(anchor), len(models))
        gauged = [gauge(checkpoint, opt, tell) if match != "none" else checkpoint for checkpoint in given]
        widest = max(range(len(gauged)), key=lambda i: numel(gauged[i]))
        gauged = [widened(model, gauged[widest if anchor == "auto" else int(anchor)]) for model in gauged]
        shared = common_roles(gauged)
        if anchor != "auto":
            centre = int(anchor)
        elif any(isinstance(model, Widened) for model in gauged):
            centre = widest
        else:
            centre = nearest_to_mean(gauged, shared.roles, shares)
        found, alignments = align_all(gauged, centre, match, opt, tell)
        layout = centre if heads_from is None else heads_from
        notes = [*gauged[layout].notes, *(note for item in found for note in item.notes)]
        if shared.differing:
            notes.append(f"copied from model {layout} ({given[layout].given}), since the models differ there: "
                         + ", ".join(shared.differing))  # fmt: skip
        differences = [
            verified(given[i], gauged[i], alignments[i], opt, tell) if verify and match != "none" else None
            for i in range(len(gauged))
            if i != centre
        ]
        rewrites: list[Alignment | Softened] = list(alignments)
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
        result["notes"] = list(dict.fromkeys(notes))
        record = Record("merge", command, given, opt, result, found)
        tensors: Iterator[tuple[str, Tensor]]
        if method == "progressive":
            batches = calibration(gauged, opt, tell)
            fitted = merge_progressively(gauged, alignments, shares, layout, set(shared.roles), batches,
                                         dtype=opt.dtype, device=opt.device, tell=tell)  # fmt: skip
            result["ridge"], result["held_back_losses"] = fitted.ridge, {str(r): x for r, x in fitted.losses.items()}
            entries = gauged[layout].signature.tensors
            tensors = (
                pair for role, entry in entries.items() if entry.stored for pair in entry.split(fitted.tensors[role])
            )
        else:
            tensors = merged_tensors(gauged, rewrites, shares, layout, set(shared.roles), method=method,
                                     dtype=opt.dtype, device=opt.device)  # fmt: skip
        if tell:
            tell("writing")
        write_model(
            target,
            tensors,
            gauged[layout],
            overwrite=overwrite,
            dtype=stored,
            config_updates=gauged[layout].config_updates,
            check=record.write,
        )  # fmt: skip
        if output is None:
            result["model"] = load_model(target)
    result["seconds"] = round(time.perf_counter() - started, 3)
    return result
