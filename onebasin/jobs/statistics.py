# SPDX-License-Identifier: Apache-2.0
"""onebasin statistics: what Fisher merging and RegMean need to know of a model, measured once and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onebasin.fusion.average import Combine
from onebasin.fusion.fisher import LABELS, fisher_diagonal, fisher_mean
from onebasin.fusion.regmean import Regression, input_grams
from onebasin.fusion.statistics import KINDS, Statistics, measured
from onebasin.models import Canonical, Model, Rewritten
from onebasin.models.outputs import Output
from onebasin.models.weight_files import clearly
from onebasin.running import loaded_model
from onebasin.settings import Few, checked
from onebasin.symmetry import Alignment

from .aligning import calibration, task_of
from .folders import opened, refuse_places, together
from .options import Fusion, ModelSource, Options, Tell


def statistics(
    model: ModelSource,
    output: str | Path,
    kind: str = "fisher",
    *,
    labels: str = "sampled",
    draws: int = 1,
    canonical: bool = False,
    overwrite: bool = False,
    tell: Tell | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure `model` on data and write what was measured to the file `output`.

    kind: `fisher`, the diagonal of the Fisher information of every tensor, or `gram`, the inputs' second moments of
    every linear layer. labels, draws: `sampled` from the model, so many per example, or `given` by the data (fisher).
    canonical: measure the model's canonical form, which is what levels that move the residual stream merge.
    options: of `Options`: data, samples, task, context, vocabulary, device, seed, precision, family.

    Returns {"output", "kind", "samples", "tensors", "notes"}. Raises ValueError in one sentence for bad input.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of statistics '{kind}'; choose from {', '.join(KINDS)}")
    refuse_labels(labels)
    draws = checked(Few, "draws", draws)
    opt = Options(**options)
    with opened([model], opt.family) as (checkpoint,), together(opt) as placing:
        refuse_places([Output("the output", output, "")], [checkpoint], overwrite, opt)
        form: Model = Canonical(checkpoint, opt.dtype) if canonical else checkpoint
        found = measure(kind, form, opt, labels=labels, draws=draws, tell=tell)
        with clearly(Path(output), "the statistics"):
            found.save(placing.file(Path(output), overwrite))
        notes = list(form.notes)
    return {
        "output": str(output),
        "kind": kind,
        "samples": found.samples,
        "tensors": len(found.tensors),
        "notes": notes,
    }


def measure(
    kind: str,
    model: Model,
    opt: Options,
    *,
    labels: str = "sampled",
    draws: int = 1,
    tell: Tell | None = None,
) -> Statistics:
    """Statistics of a model, measured on calibration data."""
    given = labels == "given" and kind == "fisher"
    if given and opt.data == "self":
        raise ValueError("given labels need data with labels: --data FILE; or let the model draw them (sampled)")
    batches = calibration([model], opt, tell, labels=given)
    how: dict[str, Any] = {"dtype": opt.dtype, "device": opt.device}
    if kind == "gram":
        grams, columns, count = input_grams(loaded_model(model, **how, experts=True), batches, tell=tell)
        return measured(kind, grams, count, columns, model)
    stock = loaded_model(model, **how, attention="eager", experts=True)
    causal = given and (opt.task or task_of(model)) == "causal-lm"
    diagonal, count = fisher_diagonal(
        stock, batches, labels=labels, causal=causal, draws=draws, seed=opt.seed, tell=tell
    )
    return measured(kind, diagonal, count, (), model)


def refuse_statistics(how: Fusion, models: int) -> None:
    """Raise ValueError, before any work, where statistics are not those of so many models, or not there."""
    files = how.statistics
    if files is not None and len(files) != models:
        raise ValueError(f"{models} models need {models} statistics files, not {len(files)}")
    for file in files or ():
        if not Path(file).is_file():
            raise ValueError(f"there are no statistics '{file}'")


def combination(
    method: str, models: Sequence[Rewritten[Alignment]], how: Fusion, opt: Options, tell: Tell | None
) -> Combine:
    """How `fisher` or `regmean` combines the aligned models: from saved statistics, or measured on the aligned models.

    Raises ValueError for too few or other statistics, and as `Statistics.of` and `Statistics.moved`.
    """
    kind = {"fisher": "fisher", "regmean": "gram"}[method]
    refuse_labels(how.labels)
    if how.statistics is not None:
        found = [Statistics.load(file) for file in how.statistics]
        for file, one in zip(how.statistics, found, strict=True):
            if one.kind != kind:
                raise ValueError(f"'{file}' holds statistics of kind {one.kind}; {method} needs {kind}")
        pairs = zip(found, models, strict=True)
        moved = [one.of(model.base).moved(model.signature, model.alignment) for one, model in pairs]
    else:
        own = [replace(opt, data=data) for data in own_data(opt.data, len(models))]
        moved = [
            measure(kind, model, mine, labels=how.labels, draws=how.draws, tell=tell)
            for model, mine in zip(models, own, strict=True)
        ]
    tensors: list[Mapping[str, Any]] = [one.tensors for one in moved]
    if kind == "fisher":
        return fisher_mean(tensors, how.eps, how.normalize)
    return Regression(tensors, frozenset().union(*(one.columns for one in moved)), how.shrink)


def own_data(data: str | Sequence[str] | None, count: int) -> list[str | None]:
    """What each model is measured on: its own data, or the same for all. ValueError for another number of datasets."""
    if data is None or isinstance(data, str):
        return [data] * count
    if len(data) not in (1, count):
        raise ValueError(f"{count} models are measured on one dataset, or on one of their own each, not on {len(data)}")
    return [*data] if len(data) == count else [data[0]] * count


def refuse_labels(labels: str) -> None:
    if labels not in LABELS:
        raise ValueError(f"unknown labels '{labels}'; choose from {', '.join(LABELS)}")
