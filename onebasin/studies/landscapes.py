# SPDX-License-Identifier: Apache-2.0
"""The loss between models under four matchings, and over planes around them (Figures 2, 5 of Zhang et al., 2025)."""

from __future__ import annotations

from typing import Any

from onebasin.landscape import curve
from onebasin.landscape.plane import plane

from .config import Config
from .results import Chart, Results, Table, spread
from .settings import Tell, matched, pairs, test_of

MATCHINGS: dict[str, Any] = {
    "no match": None,
    "w/o attention": {"symmetry": "paper", "rescale": "after", "parts": ["ffn"]},
    "w/o FFN": {"symmetry": "paper", "rescale": "after", "parts": ["attention"]},
    "match": {"symmetry": "paper", "rescale": "after"},
}


def landscape(config: Config, tell: Tell) -> Results:
    """Loss along the line and its barrier for every matching, over all seeds and pairs; the plane through A, B and
    matched B of the first pair; and with three models the plane through them, as they are and matched to the first.

    A plane shows the last matching of the study whose anchor stays as it is.
    """
    barriers: dict[str, list[float]] = {}
    lines: dict[str, list[list[float]]] = {}
    lambdas: list[float] = []
    for name, matching in config.matchings.items():
        barriers[name], lines[name] = [], []
        for run in config.runs():
            for i, j in pairs(config):
                tell(f"{name}: the line between {run[i]} and {run[j]}")
                with matched([run[i], run[j]], matching) as found:
                    task = test_of(config.corpus(i), run[i], config)
                    along = curve(found.folders[0], found.folders[1], task, config.points)
                lambdas = along["lambdas"]
                barriers[name].append(along["barrier"])
                lines[name].append(along["losses"])
    means = {name: [sum(at) / len(at) for at in zip(*losses, strict=True)] for name, losses in lines.items()}
    rows = [[name, spread(values), means[name][len(lambdas) // 2]] for name, values in barriers.items()]
    count = len(config.runs()) * len(pairs(config))
    tables = [Table(f"Loss barrier, mean ± standard deviation over {count} pairs",
                    ["matching", "barrier", "mean loss at the middle"], rows)]  # fmt: skip
    ends, planes = "λ (0: anchor, 1: the other model)", _planes(config, tell)
    charts = [
        Chart("line", "Mean loss along the line", "lines", lambdas, means, ends, "loss"),
        Chart("planes", "Loss over the plane through three models", "contours", [], planes, "distance", "loss"),
    ]
    text = "The barrier is the largest rise of the loss over the straight line between the two end losses."
    return Results("landscape", "The loss between the models", text, config.model_dump(), tables, charts)


def _planes(config: Config, tell: Tell) -> dict[str, Any]:
    run = config.runs()[0]
    task = test_of(config.corpus(0), run[0], config)
    name, matching = next((name, m) for name, m in reversed(config.matchings.items()) if m is not None)

    def panel(a: str, b: str, c: str, third: str = "C") -> dict[str, Any]:
        found = plane(a, b, c, task, config.points, tell=tell)
        return {**found, "marks": dict(zip(("A", "B", third), found["marks"].values(), strict=True))}

    panels = {}
    with matched(run[:3], matching) as found:
        if found.folders[0] == run[0]:
            panels[f"A, B and matched B ({name})"] = panel(run[0], run[1], found.folders[1], "matched B")
        if len(run) > 2:
            panels["three models, as they are"] = panel(run[0], run[1], run[2])
            panels[f"three models, matched to A ({name})"] = panel(found.folders[0], found.folders[1], found.folders[2])
    return panels
