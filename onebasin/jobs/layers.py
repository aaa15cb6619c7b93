# SPDX-License-Identifier: Apache-2.0
"""Choosing the layers to match by the score of the merged model on validation data.

The protocol is that of Zhang et al. (2025), section 5.2, for vision transformers: "we match each layer separately
before conducting model fusion. The merged model achieving the highest validation performance is selected." All layers
together are one more candidate here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.data import evaluate, load_task
from onebasin.data.calibration import task_of
from onebasin.data.files import split_off
from onebasin.engine import refuse_device
from onebasin.models.outputs import Output, refuse_outputs
from onebasin.settings import OutputSettings, Reading, refuses_unknown

from .folders import opened
from .merge import known_settings, merge
from .options import ModelSource, Options
from .report import place_of
from .results import MergeResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import LayersKeywords

LESS_IS_BETTER = ("loss", "perplexity")


def candidates(layers: Sequence[int]) -> list[list[int]]:
    """Return the sets of layers to choose from: every layer alone, and all together."""
    return [*([layer] for layer in layers), *([list(layers)] if len(layers) > 1 else [])]


def best_layers(
    layers: Sequence[int], measure: Callable[[list[int]], float], metric: str
) -> tuple[list[int], dict[str, float]]:
    """Return the candidate with the best score, the first of equals, and every score: `0,1,2` -> score."""
    scores = {",".join(map(str, some)): measure(some) for some in candidates(layers)}
    sign = -1 if metric in LESS_IS_BETTER else 1
    best = max(scores, key=lambda name: sign * scores[name])
    return [int(layer) for layer in best.split(",")], scores


@refuses_unknown(Options, OutputSettings, more=lambda: [*known_settings(), *signature(merge).parameters])
def merge_best_layers(
    models: Sequence[ModelSource],
    output: str | Path | None = None,
    *,
    validation: str | Path | None,
    metric: str = "loss",
    **options: Unpack[LayersKeywords],
) -> MergeResult:
    """Merge as `merge` does, matching the set of layers that scores best on validation data.

    Args:
        models: as in `merge`.
        output: as in `merge`.
        validation: labelled data, as `onebasin.data.load_task` reads them (`NAME#SPLIT` for a split), for the task that
            `task` names, or that of the models' class.
        metric: `loss`, `accuracy`, or another metric of the task.
        options: the other arguments of `merge`, except `layers`.

    Returns:
        As `merge`, with `layers` and `tried` (layers -> score).

    Raises:
        ValueError: as `merge`, without validation data, and where `match="none"` or a budget leaves nothing to choose.
    """
    how: dict[str, Any] = {**options}
    if validation is None:
        raise ValueError("layers auto chooses by validation data, which are missing: --validation FILE")
    if how.get("match") == "none" or how.get("quality") or how.get("budget"):
        raise ValueError("layers auto chooses what is matched: it does not go with --match none or --budget")
    device = how.get("device", "cpu")
    refuse_device(device)
    data, split = split_off(str(validation))
    page = place_of(output, how.get("report", False))
    with opened(models, how.get("family")) as given:
        if output is not None:
            beside = [Output("the report", page, "")] if page else []
            refuse_outputs([Output("the output", output), *beside], given, how.get("overwrite", False))
        told = {key: how[key] for key in Reading.names() if how.get(key) is not None}
        task = load_task(how.get("task") or task_of(given[0]), data, given[0].folder, split=split, **told)
        layers = given[0].signature.layers

    quick = {"verify": False, "verdict": False, "require": None, "report": False, "tell": None}

    def measure(some: list[int]) -> float:
        if tell := how.get("tell"):
            tell(f"matching layers {', '.join(map(str, some))}")
        model = merge(models, **{**how, **quick, "layers": some})["model"]
        model.to(device)
        found: float = getattr(evaluate(model, task), metric.replace("-", "_"))
        return found

    chosen, tried = best_layers(layers, measure, metric)
    result = merge(models, output, **{**how, "layers": chosen})
    names = ",".join(map(str, chosen))
    note = f"matched layers {names}: {metric} {tried[names]:.4g} on '{validation}', the best of {len(tried)} sets"
    result.update(layers=chosen, tried=tried, notes=[note, *result.notes])
    return result
