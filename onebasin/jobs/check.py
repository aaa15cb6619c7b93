# SPDX-License-Identifier: Apache-2.0
"""onebasin check: whether two models can be matched, from configs and headers alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from onebasin.matching.cost import expected, numbers_held, numbers_run
from onebasin.models.preflight import ancestors, preflight, vocabulary
from onebasin.models.preflight import peek as peeked
from onebasin.settings import refuses_unknown
from onebasin.symmetry import LEVELS, acting_groups

from .folders import opened
from .options import STREAM_LEVELS, ModelSource, Options


@refuses_unknown()
def check(
    a: ModelSource,
    b: ModelSource,
    *,
    symmetry: str = "paper",
    peek: bool = False,
    precision: str = "float32",
    family: str | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Whether `a` can be matched to `b`, and what to expect, from configs and headers; no weights are read.

    peek: read one small matrix of each as well, and give their cosine.

    Returns {"can_match", "reason", "symmetry", "moves", "fixed", "rows", "heads", "only_a", "only_b", "widened",
    "untied", "vocabulary", "ancestors", "common_ancestors", "peek", "memory", "verify_memory", "seconds"}; memory is
    level -> bytes, about what matching with this many `workers` takes beside the program itself; seconds is level ->
    about how long they take on this machine: [where the models are near, where not], which a config does not tell.
    Raises ValueError for folders that cannot be read and an unknown level.
    """
    item = Options.of({"symmetry": symmetry, "precision": precision, "workers": workers}).dtype.itemsize
    with opened([a, b], family) as (first, second):
        found = preflight(first, second, symmetry, symmetry in STREAM_LEVELS)
        words = vocabulary(first, second)
        named = [ancestors(model) for model in (first, second)]
        both = [{model.name.rstrip("/"), *names} for model, names in zip((first, second), named, strict=True)]
        small = peeked(first, second, found) if peek and found.reason is None else None
        memory, times = {}, {}
        if found.signature is not None:
            for level in LEVELS:
                seen = preflight(first, second, level, level in STREAM_LEVELS)
                if seen.signature is not None:
                    groups = acting_groups(seen.signature, level, rescale="joint")
                    memory[level] = item * numbers_held(seen.signature, seen.roles, groups, workers)
                    ends = expected(seen.signature, seen.roles, groups, item, workers)
                    times[level] = [round(end, 2) for end in ends]
        verifying = item * numbers_run(found.signature) if found.signature is not None else None
    return {
        "can_match": found.reason is None,
        "reason": found.reason,
        "symmetry": symmetry,
        "moves": found.moves,
        "fixed": found.fixed,
        "rows": found.rows,
        "heads": list(found.heads),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "widened": found.widened,
        "untied": found.untied,
        "vocabulary": None if words is None else asdict(words),
        "ancestors": named,
        "common_ancestors": sorted(both[0] & both[1]),
        "peek": None if small is None else {"tensor": small[0], "cosine": small[1]},
        "memory": memory,
        "verify_memory": verifying,
        "seconds": times,
    }
