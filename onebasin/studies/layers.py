# SPDX-License-Identifier: Apache-2.0
"""The influence of layers: matching a single one, the last, or the first ones (Figure 6 of Zhang et al., 2025)."""

from __future__ import annotations

from functools import partial
from statistics import mean

from .config import Config, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import fused, layers_of, pairs

MATCHINGS = {"attention": {"symmetry": "paper", "rescale": "after", "parts": ["attention"]}}


def layers(config: Config, once: Once) -> Results:
    """Score merged models of which only some layers were matched, for every matching of the study.

    Single: layer l alone. Tail: the last n. Head: the first n. Zero layers is no match.
    """
    tables, charts = [], []
    numbers = layers_of(config.runs()[0][0])
    subsets: dict[str, list[list[int]]] = {
        "single": [[layer] for layer in numbers],
        "tail": [numbers[len(numbers) - n :] for n in range(len(numbers) + 1)],
        "head": [numbers[:n] for n in range(len(numbers) + 1)],
    }
    for name, matching in config.matchings.items():
        found: dict[tuple[int, ...], dict[str, tuple[float, float]]] = {}
        for chosen in (chosen for each in subsets.values() for chosen in each):
            if tuple(chosen) not in found:  # one layer alone is also the first, or the last
                what = f"{name}: layers {', '.join(map(str, chosen)) or 'none'}"
                asked = {**(matching or {}), "layers": chosen} if chosen else None
                found[tuple(chosen)] = _scores(config, what, asked, once)
        for kind, each in subsets.items():
            at = numbers if kind == "single" else list(range(len(numbers) + 1))
            values = [found[tuple(chosen)] for chosen in each]
            first = "layer" if kind == "single" else "layers matched"
            rows = [[x, *(scores[method] for method in config.methods)] for x, scores in zip(at, values, strict=True)]
            tables.append(Table(f"{name}, {kind}: {config.metric}", [first, *config.methods], rows))
            series = {method: [scores[method][0] for scores in values] for method in config.methods}
            title = f"{name}: {kind} layers matched"
            charts.append(Chart(f"{name}-{kind}".replace(" ", "-"), title, "lines", at, series, first, config.metric))
    text = f"{len(config.runs())} seeds, {len(pairs(config))} pairs each, merged with equal weights."
    return Results("layers", "Which layers to match", text, config.model_dump(), tables, charts)


def _scores(config: Config, what: str, matching: Matching, once: Once) -> dict[str, tuple[float, float]]:
    """Return method -> mean over pairs, with the spread over seeds."""
    found = [[once(what, [run[i] for i in pair], partial(fused, config, run, pair, matching))
              for pair in pairs(config)] for run in config.runs()]  # fmt: skip
    return {method: spread([mean(mean(pair[method]) for pair in run) for run in found]) for method in config.methods}
