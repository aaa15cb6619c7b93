# SPDX-License-Identifier: Apache-2.0
"""onebasin statistics: what Fisher merging and RegMean need to know of a model, measured once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onebasin.data.calibration import Data
from onebasin.fusion.fisher import Fisher
from onebasin.fusion.regmean import RegMean
from onebasin.fusion.statistics import StatisticsMethod
from onebasin.models import Canonical, Model
from onebasin.models.outputs import Output
from onebasin.models.weight_files import clearly
from onebasin.settings import refuses_unknown

from .folders import opened, refuse_places, together
from .options import ModelSource, Options, Tell

KINDS: dict[str, type[StatisticsMethod]] = {method.kind: method for method in (Fisher, RegMean)}


@refuses_unknown(Options)
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
    fisher = Fisher.of({"labels": labels, "draws": draws})
    method = fisher if kind == Fisher.kind else KINDS[kind]()
    opt = Options.of(options)
    with opened([model], opt.family) as (checkpoint,), together(opt) as placing:
        refuse_places([Output("the output", output, "")], [checkpoint], overwrite, opt)
        form: Model = Canonical(checkpoint, opt.dtype) if canonical else checkpoint
        found = method.measure(form, Data([form], opt, opt, tell, method.given_labels()), opt, tell)
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
