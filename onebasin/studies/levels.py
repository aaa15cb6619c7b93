# SPDX-License-Identifier: Apache-2.0
"""The levels study: the barrier between two models, at every level of symmetry and with every average."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.data import Task, load_model
from onebasin.data.calibration import Calibration, Data
from onebasin.engine import Means, Tell, appearing_json, appearing_text
from onebasin.fusion import AVERAGES, method_of
from onebasin.fusion.method import Sources
from onebasin.landscape.line import even, measured
from onebasin.landscape.plots import plot_curves, require_matplotlib
from onebasin.models import Folder, shared_roles
from onebasin.running.classes import quietly
from onebasin.settings import Points, check_fields, refuse_unknown
from onebasin.symmetry import LEVELS

from .results import refuse_results
from .settings import matched

FILES = ("levels.json", "levels.md", "levels.png")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTINGS = ("none", "permutation", "paper", "full", "invertible")


@dataclass(frozen=True)
class Compared:
    """The levels and methods to compare.

    levels: "none" or levels of symmetry. methods: see `onebasin.METHODS`. points: models on a line, both ends included;
    the one at lambda is merged with the weights (1 - lambda, lambda). rescale, device: as in `onebasin.match`. title:
    of the picture. Raises ValueError for an unknown level or method, and fewer than 2 points.
    """

    levels: Sequence[str] = SETTINGS
    methods: Sequence[str] = tuple(AVERAGES)
    points: Points = 11
    rescale: str = "joint"
    device: str = "cpu"
    title: str | None = None

    def __post_init__(self) -> None:
        for what, given, known in (("level", self.levels, ["none", *LEVELS]), ("method", self.methods, [*AVERAGES])):
            if not given:
                raise ValueError(f"the study needs at least one {what}; choose from {', '.join(known)}")
            refuse_unknown(given, known, what)
        check_fields(self)


def study_levels(
    a: str | Path,
    b: str | Path,
    task: Task,
    output: str | Path,
    how: Compared | None = None,
    *,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Match `b` to `a` once per level, then measure the merged models between them with every method.

    Writes levels.json, levels.md and levels.png to `output`.

    Args:
        a: A model folder: the anchor, at lambda 0.
        b: Another, at lambda 1.
        task: The task on which to measure them.
        output: The folder.
        how: The levels and methods (default: those of `Compared()`).
        overwrite: Whether to replace results that exist.
        tell: Called with a line about each step.

    Returns:
        The object in levels.json: `models`, `task`, `points`, `rescale` and `levels`: level -> `distance_before`,
        `distance_after`, `seconds` (to match and verify) and `methods`: method -> a curve as in `landscape.curve`, with
        `seconds` (to merge and evaluate). Levels that rotate the residual stream measure both distances between
        canonical forms.

    Raises:
        ValueError: The output exists, the models cannot be matched or completely merged, or matplotlib is not
            installed.
    """
    how, folder = how or Compared(), Path(output)
    refuse_results(output, FILES, [a, b], overwrite)
    require_matplotlib()
    found: dict[str, Any] = {}
    for level in how.levels:
        matching = None if level == "none" else {"symmetry": level, "rescale": how.rescale, "device": how.device}
        with matched([str(a), str(b)], matching, verify=True, tell=tell) as at:
            found[level] = {
                "distance_before": at.before[0], "distance_after": at.after[0], "seconds": at.seconds, "methods": {},
            }  # fmt: skip
            ends = at.folders[0], at.folders[1]
            for method in how.methods:
                say = None if tell is None else _prefixed(tell, f"{level}, {method}")
                curve = _curve(*ends, task, method, even(how.points), how.device, say)
                found[level]["methods"][method] = curve
    results = {
        "models": [Path(a).name, Path(b).name],
        "task": task.name,
        "points": how.points,
        "rescale": how.rescale,
        "levels": found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    appearing_json(folder / "levels.json", results)
    appearing_text(folder / "levels.md", table(results))
    shown = "average" if "average" in how.methods else how.methods[0]
    plot_curves(
        {level: entry["methods"][shown] for level, entry in found.items()},
        folder / "levels.png",
        title=how.title or f"{task.name}: {shown}",
        ends=(Path(a).name, f"{Path(b).name}, matched"),
    )
    return results


def table(results: Mapping[str, Any]) -> str:
    """Return the study as a Markdown table: a row per level with the barrier of every method, distances and seconds."""
    entries = results["levels"]
    methods = list(next(iter(entries.values()))["methods"])
    lines = [
        "| level | " + " | ".join([*methods, "distance before", "distance after", "seconds"]) + " |",
        "|---" + "|---:" * (len(methods) + 3) + "|",
    ]
    for level, entry in entries.items():
        barriers = [f"{entry['methods'][method]['barrier']:.3f}" for method in methods]
        distances = [f"{entry[key]:.2f}" for key in ("distance_before", "distance_after")]
        lines.append("| " + " | ".join([level, *barriers, *distances, f"{entry['seconds']:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def _curve(
    a: str, b: str, task: Task, method: str, lambdas: Sequence[float], device: str, tell: Tell | None
) -> dict[str, Any]:
    started = time.perf_counter()
    frame = load_model(a, task.name)
    merged = (_filled(frame, tensors).to(device) for tensors in _merged(a, b, method, lambdas, device))  # type: ignore[arg-type]
    found = measured(lambdas, merged, task, tell)
    return {**found, "seconds": round(time.perf_counter() - started, 3)}


def _merged(a: str, b: str, method: str, lambdas: Sequence[float], device: str) -> Iterator[dict[str, Tensor]]:
    """Yield name -> tensor of the merged model at every lambda; the ends are the models themselves."""
    with closing(Folder(a)) as first, closing(Folder(b)) as second:
        models = [first, second]
        shared = shared_roles(*models)
        if alone := [*shared.only_a, *shared.only_b, *shared.differing]:
            raise ValueError(f"the models do not lie on one line: they do not share the tensor '{alone[0]}'")
        ignored = models[0].ignored()
        means = Means(device=device, workers=1)
        for lam in lambdas:
            sources = Sources(models, [1 - lam, lam])
            merged = method_of(method)().merge(sources, Data(models, Calibration(), means), means, None)
            yield {**ignored, **dict(merged.tensors)}


def _filled(frame: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """Return a model like `frame` with tensors by their names on disk."""
    load: Any = type(frame).from_pretrained
    with quietly():
        model, info = load(None, config=frame.config, state_dict=tensors, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"the merged model has no tensor '{min(info['missing_keys'])}', which the task needs")
    filled: PreTrainedModel = model
    return filled


def _prefixed(tell: Tell, text: str) -> Tell:
    return lambda line: tell(f"{text}: {line}")
