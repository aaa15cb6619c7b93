# SPDX-License-Identifier: Apache-2.0
"""The distance between two models after each way of matching (Figure 4 of Zhang et al., 2025)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .config import Config, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import matched, paired, pairs

# The two baselines as presets: Git Re-Basin's weight matching permutes every space, OT-Fusion's hard matching, as that
# figure applies it, only the neurons of FFNs.
MATCHINGS: dict[str, Any] = {
    "no match": None,
    "Git Re-Basin": {"symmetry": "permutation", "rescale": "none"},
    "OT, hard": {"symmetry": "paper", "rescale": "none", "parts": ["ffn"]},
    "paper": {"symmetry": "paper", "rescale": "none"},
    "paper, rescaled after": {"symmetry": "paper", "rescale": "after"},
    "paper, joint": {"symmetry": "paper", "rescale": "joint"},
    "full": {"symmetry": "full", "rescale": "joint"},
    "invertible": {"symmetry": "invertible", "rescale": "joint"},
}


def distances(config: Config, once: Once) -> Results:
    """Measure the Euclidean distance over the shared parameters after each matching, also relative to that before it.

    Levels that rotate the residual stream measure both distances between canonical forms, so their distance before is
    different; compare them with the others by the ratio.
    """
    rows, shares = [], {}
    for name, matching in config.matchings.items():
        gaps = [once(name, pair, partial(_gaps, pair, matching)) for pair in paired(config)]
        before, after = zip(*gaps, strict=True)
        shares[name] = spread([b / a for a, b in zip(before, after, strict=True)])
        rows.append([name, spread(before), spread(after), shares[name]])
    count = len(config.runs()) * len(pairs(config))
    table = Table(f"Distance between the models, mean ± standard deviation over {count} pairs",
                  ["matching", "before", "after", "after / before"], rows)  # fmt: skip
    chart = Chart("share", "Distance after matching, as a share of the distance before", "bars", list(shares),
                  {"after / before": list(shares.values())}, ylabel="share")  # fmt: skip
    text = "Euclidean distance over all shared parameters. The functions of the models are the same in every row."
    return Results("distance", "Distance after matching", text, config.model_dump(), [table], [chart])


def _gaps(pair: list[str], matching: Matching) -> tuple[float, float]:
    """Return the distance before and after."""
    with matched(pair, matching) as found:
        return found.before[0], found.after[0]
