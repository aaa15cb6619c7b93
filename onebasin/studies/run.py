# SPDX-License-Identifier: Apache-2.0
"""Running a study by name: read its file, measure, write its part of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from onebasin.data.models import TASKS, refuse_unfit
from onebasin.engine import Tell
from onebasin.landscape.plots import require_matplotlib

from . import distances, fusion, landscapes, layers, runtime
from .config import Config, read_config
from .measurement_cache import Once, measuring
from .report import write
from .results import Results, refuse_results

Study = Callable[[Config, Once], Results]

# name -> the study, and what its file need not say
STUDIES: dict[str, tuple[Study, dict[str, Any]]] = {
    "fusion-table": (fusion.fusion_table, {"matchings": fusion.MATCHINGS, "methods": fusion.METHODS}),
    "ablation": (fusion.ablation, {"matchings": fusion.ABLATIONS, "methods": fusion.METHODS}),
    "distance": (distances.distances, {"matchings": distances.MATCHINGS}),
    "landscape": (landscapes.landscape, {"matchings": landscapes.MATCHINGS}),
    "runtime": (runtime.runtime, {"matchings": runtime.MATCHINGS, "methods": fusion.METHODS}),
    "layers": (layers.layers, {"matchings": layers.MATCHINGS}),
}


def run_study(
    name: str,
    config: str | Path,
    output: str | Path,
    *,
    methods: Collection[str] | None = None,
    metric: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    tell: Tell | None = None,
    command: str = "",
) -> Results:
    """Run the study `name` on the file `config`; writes NAME.json, its pictures and report.html under `output`.

    A folder may hold several studies: the report shows all of them. Nothing is written before all is measured, but for
    single measurements, which are kept in a hidden folder until then. resume: go on where a run was stopped, or
    failed. methods, metric: only these methods of the file, and another metric than its own.
    Raises ValueError for a name, key, model or dataset that cannot be used, for a NAME.json that exists (unless
    `overwrite`), and where matplotlib is not installed.
    """
    if name not in STUDIES:
        raise ValueError(f"unknown study '{name}'; choose from {', '.join(STUDIES)}")
    require_matplotlib()
    study, defaults = STUDIES[name]
    asked, folder = read_config(config, **defaults).only(methods, metric), Path(output)
    inputs = [config, *(model for models in asked.runs() for model in models)]
    refuse_results(output, [f"{name}.json"], inputs, overwrite)
    if asked.task in TASKS:
        refuse_unfit(list(dict.fromkeys(model for models in asked.runs() for model in models)), asked.task)
    with measuring(name, asked, folder, resume, tell or (lambda text: None)) as once:
        results = study(asked, once)
    results = replace(results, seconds=round(once.seconds, 1), command=command)
    write(results, folder)
    return results
