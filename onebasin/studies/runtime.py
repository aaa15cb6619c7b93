# SPDX-License-Identifier: Apache-2.0
"""The cost of fine-tuning, matching and merging (Table 3 of Zhang et al., 2025)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from .config import Config, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import matched, merged, pairs

MATCHINGS = {"paper": {"symmetry": "paper", "rescale": "after"}, "full": {"symmetry": "full", "rescale": "joint"}}


def runtime(config: Config, once: Once) -> Results:
    """Measure seconds per model for fine-tuning (from `training.json` beside the weights), per pair for matching and
    merging.

    The overhead is the ratio of the seconds of a matching to those of a merge, per method, without fine-tuning: the
    paper's claim is under 5 % of Fisher and RegMean. Merges are timed after the first of the matchings.
    """
    tuned = [float(json.loads(file.read_text("utf-8"))["seconds"]) for run in config.runs() for model in run
             if (file := Path(model) / "training.json").is_file()]  # fmt: skip
    found = {
        name: [once(name, [run[i], run[j]], partial(_seconds, config, run, (i, j), options, number == 0))
               for run in config.runs() for i, j in pairs(config)]
        for number, (name, options) in enumerate(config.matchings.items())
    }  # fmt: skip
    matching = {name: [one["matching"] for one in each] for name, each in found.items()}
    merging = {method: [one[method] for one in next(iter(found.values()))] for method in config.methods}
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
    return Results("runtime", "The cost of matching", text, config.model_dump(), tables, [chart])


def _seconds(
    config: Config, run: Sequence[str], pair: tuple[int, int], matching: Matching, merging: bool
) -> dict[str, float]:
    """Return the seconds of matching, and, if `merging`, those of every way to merge."""
    with matched([run[i] for i in pair], matching) as found:
        seconds = {"matching": found.seconds}
        for name, how in config.methods.items() if merging else ():
            started = time.perf_counter()
            merged(found.folders, how, config, [config.corpus(i) for i in pair])
            seconds[name] = time.perf_counter() - started
    return seconds
