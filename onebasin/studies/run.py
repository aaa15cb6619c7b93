# SPDX-License-Identifier: Apache-2.0
"""Running a study by name: read its file, measure, write its part of the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from onebasin.landscape.plots import require_matplotlib

from . import distances, fusion, landscapes, layers, runtime
from .config import Config, read_config
from .results import Results, write
from .settings import Tell

Study = Callable[[Config, Tell], Results]

# name -> the study, and what its file need not say
STUDIES: dict[str, tuple[Study, dict[str, Any]]] = {
    "fusion-table": (fusion.fusion_table, {"matchings": fusion.MATCHINGS, "methods": ["average", "fisher", "regmean"]}),
    "ablation": (fusion.ablation, {"matchings": fusion.ABLATIONS, "methods": ["average", "fisher", "regmean"]}),
    "distance": (distances.distances, {"matchings": distances.MATCHINGS}),
    "landscape": (landscapes.landscape, {"matchings": landscapes.MATCHINGS}),
    "runtime": (runtime.runtime, {"matchings": runtime.MATCHINGS, "methods": runtime.METHODS}),
    "layers": (layers.layers, {"matchings": layers.MATCHINGS}),
}


def run_study(
    name: str, config: str | Path, output: str | Path, *, tell: Tell | None = None, command: str = ""
) -> Results:
    """Run the study `name` on the file `config`; writes NAME.json, its pictures and report.html under `output`.

    A folder may hold several studies: the report shows all of them. Nothing is written before all is measured.
    Raises ValueError for a name, key, model or dataset that cannot be used, and where matplotlib is not installed.
    """
    if name not in STUDIES:
        raise ValueError(f"unknown study '{name}'; choose from {', '.join(STUDIES)}")
    require_matplotlib()
    study, defaults = STUDIES[name]
    asked = read_config(config, **defaults)
    started = time.perf_counter()
    results = study(asked, tell or (lambda text: None))
    results = replace(results, seconds=round(time.perf_counter() - started, 1), command=command)
    write(results, Path(output))
    return results
