# SPDX-License-Identifier: Apache-2.0
"""onebasin check: whether two models can be matched, from configs and headers alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onebasin.engine import KEPT
from onebasin.matching.cost import expected, numbers_held, numbers_run
from onebasin.models.preflight import ancestors, preflight, vocabulary
from onebasin.models.preflight import peek as peeked
from onebasin.settings import refuses_unknown
from onebasin.symmetry import LEVELS, acting_groups

from .folders import opened
from .options import LEVEL_NAMES, STREAM_LEVELS, ModelSource, Options, take_level

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import LevelKeywords


@refuses_unknown(more=lambda: LEVEL_NAMES)
def check(
    a: ModelSource,
    b: ModelSource,
    *,
    peek: bool = False,
    precision: str = "float32",
    family: str | None = None,
    workers: int | None = None,
    **level: Unpack[LevelKeywords],
) -> dict[str, Any]:
    """Tell whether `a` can be matched to `b`, and what to expect. Reads configs and headers, but no weights.

    Args:
        a: the model to rewrite.
        b: the anchor.
        peek: whether to read one small matrix of each model as well, for their cosine.
        precision: type of the computation, float32 or float64.
        family: the table of both, for a model type that has none.
        workers: threads of matching (default: one per core).
        level: `match`, the level of symmetry (default: paper); `symmetry` and `level` are other names for it.

    Returns:
        `can_match`, `reason`, `symmetry`, `moves`, `fixed`, `rows`, `heads`, `only_a`, `only_b`, `widened`, `untied`,
        `vocabulary`, `ancestors`, `common_ancestors`, `peek`, `memory`, `verify_memory` and `seconds`. `memory`: level
        -> approximate bytes that matching takes besides the program itself, and `seconds`: level -> estimated times on
        this machine, both [for models that are close, for others]; a config does not tell which they are.

    Raises:
        ValueError: for folders that cannot be read, and an unknown level.
    """
    named = take_level({**level}, "paper")
    item = Options.of({"symmetry": named, "precision": precision, "workers": workers}).dtype.itemsize
    with opened([a, b], family) as (first, second):
        found = preflight(first, second, named, named in STREAM_LEVELS)
        words = vocabulary(first, second)
        origins = [ancestors(model) for model in (first, second)]
        both = [{model.name.rstrip("/"), *names} for model, names in zip((first, second), origins, strict=True)]
        small = peeked(first, second, found) if peek and found.reason is None else None
        memory, times = {}, {}
        if found.signature is not None:
            for other in LEVELS:
                seen = preflight(first, second, other, other in STREAM_LEVELS)
                if seen.signature is not None:
                    groups = acting_groups(seen.signature, other, rescale="joint")
                    sizes = [numbers_held(seen.signature, seen.roles, groups, workers, near) for near in (True, False)]
                    memory[other] = [KEPT + item * size for size in sizes]
                    ends = expected(seen.signature, seen.roles, groups, item, workers)
                    times[other] = [round(end, 2) for end in ends]
        verifying = item * numbers_run(found.signature) if found.signature is not None else None
    facts = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(found).items()}
    return {
        "can_match": found.reason is None,
        "symmetry": named,
        **{name: value for name, value in facts.items() if name not in ("signature", "roles")},
        "vocabulary": None if words is None else asdict(words),
        "ancestors": origins,
        "common_ancestors": sorted(both[0] & both[1]),
        "peek": None if small is None else {"tensor": small[0], "cosine": small[1]},
        "memory": memory,
        "verify_memory": verifying,
        "seconds": times,
    }
