# SPDX-License-Identifier: Apache-2.0
"""The simplex study: loss and accuracy over all averages of three models, measured and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebasin.data import Task
from onebasin.engine import Tell, appearing_json
from onebasin.landscape import simplex
from onebasin.landscape.plots import plot_simplex, require_matplotlib

from .results import refuse_results

FILES = ("simplex.json", "simplex.png")


def study_simplex(
    models: Sequence[str | Path],
    task: Task,
    output: str | Path,
    *,
    points: int = 6,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Measure and draw the loss over all averages of three models; write simplex.json and simplex.png to `output`.

    Args:
        models: Three folders, matched to one another.
        task: The task on which to measure them.
        output: The folder.
        points: Models on an edge, both ends included.
        overwrite: Whether to replace results that exist.
        tell: Called with a line about each step.

    Returns:
        The result of `landscape.simplex`, with `models`.

    Raises:
        ValueError: As in `landscape.simplex`; the output exists; or matplotlib is not installed.
    """
    require_matplotlib()
    folder = Path(output)
    refuse_results(output, FILES, models, overwrite)
    results = {"models": [str(model) for model in models], **simplex(models, task, points, tell=tell)}
    folder.mkdir(parents=True, exist_ok=True)
    appearing_json(folder / "simplex.json", results)
    first, second, third = (Path(model).name for model in results["models"])
    plot_simplex(results, folder / "simplex.png", title=task.name, names=(first, second, third))
    return results
