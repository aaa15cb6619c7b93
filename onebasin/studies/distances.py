# SPDX-License-Identifier: Apache-2.0
"""How near each way of matching brings two models (Figure 4 of Zhang et al., 2025)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .config import Config, Matching
from .measurement_cache import Once
from .results import Chart, Results, Table, spread
from .settings import matched, paired, pairs

# The two baselines as presets of the same machinery: Git Re-Basin's weight matching permutes every space, OT-Fusion's
# hard matching, as that figure applies it, the neurons of the FFNs alone.
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
    """Euclidean distance over the shared parameters after each matching, and as a share of the distance before it.

    Levels that rotate the residual stream measure both distances between canonical forms, so their distance before is
    another; the share is what compares them with the rest.
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
    text = "Euclidean distance over all shared parameters. Smaller is nearer; the function is the same in every row."
    return Results("distance", "How near matching brings two models", text, config.model_dump(), [table], [chart])


def _gaps(pair: list[str], matching: Matching) -> tuple[float, float]:
    """Distance before and after."""
    with matched(pair, matching) as found:
        return found.before[0], found.after[0]
