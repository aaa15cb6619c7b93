# SPDX-License-Identifier: Apache-2.0
"""What fine-tuning, matching and merging cost (Table 3 of Zhang et al., 2025)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

from .config import Config
from .results import Chart, Results, Table, spread
from .settings import Tell, matched, merged, pairs

MATCHINGS = {"paper": {"symmetry": "paper", "rescale": "after"}, "full": {"symmetry": "full", "rescale": "joint"}}
METHODS = ["average", "fisher", "regmean"]


def runtime(config: Config, tell: Tell) -> Results:
    """Seconds per model of fine-tuning (from `training.json` beside the weights), per pair of matching and merging.

    The overhead is the seconds of a matching over those of a merge, per method: the paper's claim is under 5 % of
    Fisher and RegMean.
    """
    tuned = [float(json.loads(file.read_text("utf-8"))["seconds"]) for run in config.runs() for model in run
             if (file := Path(model) / "training.json").is_file()]  # fmt: skip
    matching: dict[str, list[float]] = {}
    merging: dict[str, list[float]] = {method: [] for method in config.methods}
    for name, options in config.matchings.items():
        matching[name] = []
        for run in config.runs():
            for i, j in pairs(config):
                tell(f"{name}: {run[i]} and {run[j]}")
                with matched([run[i], run[j]], options) as found:
                    matching[name].append(found.seconds)
                    for method in config.methods:
                        started = time.perf_counter()
                        merged(found.folders, method, config, [config.corpus(i), config.corpus(j)])
                        merging[method].append(time.perf_counter() - started)
    seconds = {"fine-tuning, per model": spread(tuned) if tuned else None,
               **{f"matching: {name}": spread(values) for name, values in matching.items()},
               **{f"merging: {method}": spread(values) for method, values in merging.items()}}  # fmt: skip
    rows = [[name, *(mean(values) / mean(of) for of in merging.values())] for name, values in matching.items()]
    tables = [
        Table(
            "Seconds, mean ± standard deviation over pairs", ["stage", "seconds"], [[*row] for row in seconds.items()]
        ),
        Table("Matching as a share of merging", ["matching", *merging], rows),
    ]
    measured = {stage: value for stage, value in seconds.items() if value is not None}
    chart = Chart("seconds", "Seconds per stage", "bars", list(measured), {"seconds": list(measured.values())},
                  ylabel="seconds")  # fmt: skip
    text = "Matching and merging read and write model folders; merging includes measuring on calibration data."
    return Results("runtime", "What matching costs", text, config.model_dump(), tables, [chart])
