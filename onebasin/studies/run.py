# SPDX-License-Identifier: Apache-2.0
"""Running a study by name: read its file, measure, and write its part of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebasin.data.models import TASKS, refuse_unfit
from onebasin.engine import Tell
from onebasin.landscape.plots import require_matplotlib
from onebasin.settings import refuse_choice

from . import figures
from .config import Config, read_config
from .measurement_cache import Once, measuring
from .report import write
from .results import Results, refuse_results

# name -> its function, and defaults for its file
STUDIES: dict[str, tuple[Callable[[Config, Once], Results], dict[str, Any]]] = {
    "fusion-table": (figures.fusion_table, {"matchings": figures.FUSION, "methods": figures.METHODS}),
    "ablation": (figures.ablation, {"matchings": figures.ABLATIONS, "methods": figures.METHODS}),
    "distance": (figures.distances, {"matchings": figures.DISTANCES}),
    "landscape": (figures.landscape, {"matchings": figures.LANDSCAPE}),
    "runtime": (figures.runtime, {"matchings": figures.RUNTIME, "methods": figures.METHODS}),
    "layers": (figures.layers, {"matchings": figures.LAYERS}),
}


@dataclass(frozen=True)
class Study:
    """A study by its name, and the contents of its file."""

    name: str
    file: Path
    config: Config

    @classmethod
    def read(
        cls, name: str, file: str | Path, methods: Collection[str] | None = None, metric: str | None = None
    ) -> Study:
        """Read the file. methods: only these of its methods. metric: instead of its own.

        Raises ValueError for a name, key or method that is unknown.
        """
        refuse_choice("study", name, STUDIES)
        return cls(name, Path(file), read_config(file, **STUDIES[name][1]).only(methods, metric))


def run_study(
    study: Study,
    output: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    tell: Tell | None = None,
    command: str = "",
) -> Results:
    """Run a study; write NAME.json, its pictures and report.html to `output`.

    A folder may have several studies, and the report shows all of them. Nothing is written before all measurements are
    complete, except for the measurements themselves, which are kept in a hidden folder until then.

    Args:
        study: The study.
        output: The folder.
        overwrite: Whether to replace a NAME.json that exists.
        resume: Whether to continue a run that was stopped, or failed.
        tell: Called with a line about each measurement.
        command: The command line, for the report.

    Raises:
        ValueError: A model or dataset cannot be used, NAME.json exists, or matplotlib is not installed.
    """
    require_matplotlib()
    name, config, folder = study.name, study.config, Path(output)
    models = list(dict.fromkeys(model for run in config.runs() for model in run))
    refuse_results(output, [f"{name}.json"], [study.file, *models], overwrite)
    if config.task in TASKS:
        refuse_unfit(models, config.task)
    with measuring(name, config, folder, resume, tell or (lambda text: None)) as once:
        results = STUDIES[name][0](config, once)
    results = replace(results, seconds=round(once.seconds, 1), command=command)
    write(results, folder)
    return results
