# SPDX-License-Identifier: Apache-2.0
"""The loss between models under four matchings, and over planes around them (Figures 2, 5 of Zhang et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

from onebasin.landscape import curve
from onebasin.landscape.plane import plane

from .config import Config, Matching
from .fusion import ABLATIONS
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import matched, pairs, test_of

MATCHINGS = {name: how for name, how in ABLATIONS.items() if name != "w/o rescaling"}


def landscape(config: Config, once: Once) -> Results:
    """Measure the loss along the line and its barrier for every matching, over all seeds and pairs; over the plane
    through A, B and matched B of the first pair; and for three models over the plane through them, unmatched and
    matched to the first.

    Planes are for the last matching of the study. There is none of two models if it also rewrites their anchor.
    """
    curves = {
        name: [once(f"{name}, the line", [run[i], run[j]], partial(_line, config, run, (i, j), matching))
               for run in config.runs() for i, j in pairs(config)]
        for name, matching in config.matchings.items()
    }  # fmt: skip
    lambdas = next(iter(curves.values()))[0]["lambdas"]
    means = {name: [mean(at) for at in zip(*(one["losses"] for one in along), strict=True)]
             for name, along in curves.items()}  # fmt: skip
    rows = [[name, spread([one["barrier"] for one in along]), means[name][len(lambdas) // 2]]
            for name, along in curves.items()]  # fmt: skip
    count = len(config.runs()) * len(pairs(config))
    tables = [Table(f"Loss barrier, mean ± standard deviation over {count} pairs",
                    ["matching", "barrier", "mean loss at the middle"], rows)]  # fmt: skip
    ends, planes = "λ (0: anchor, 1: the other model)", _planes(config, once)
    charts = [Chart("line", "Mean loss along the line", "lines", lambdas, means, ends, "loss")]
    if planes:
        title = "Loss over the plane through three models"
        charts.append(Chart("planes", title, "contours", [], planes, "distance", "loss"))
    text = "The barrier is the largest excess of the loss over the straight line between the two end losses."
    return Results("landscape", "The loss between the models", text, config.model_dump(), tables, charts)


def _line(config: Config, run: Sequence[str], pair: tuple[int, int], matching: Matching) -> dict[str, Any]:
    i, j = pair
    with matched([run[i], run[j]], matching) as found:
        task = test_of(config.corpus(i), run[i], config)
        return curve(found.folders[0], found.folders[1], task, config.points)


def _planes(config: Config, once: Once) -> dict[str, Any]:
    run = config.runs()[0]
    task = test_of(config.corpus(0), run[0], config)
    named = [name for name, matching in config.matchings.items() if matching is not None]
    panels: dict[str, Any] = {}

    def panel(title: str, models: Sequence[str], third: str = "C") -> None:
        a, b, c = models
        found = once(f"the plane: {title}", run[:3], lambda: plane(a, b, c, task, config.points))
        panels[title] = {**found, "marks": dict(zip(("A", "B", third), found["marks"].values(), strict=True))}

    if len(run) > 2:
        panel("three models, as they are", run[:3])
    for name in named[-1:]:
        with matched(run[:3], config.matchings[name]) as found:
            if found.folders[0] == run[0]:
                panel(f"A, B and matched B ({name})", [run[0], run[1], found.folders[1]], "matched B")
            if len(run) > 2:
                panel(f"three models, matched to A ({name})", found.folders)
    return panels
