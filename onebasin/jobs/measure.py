# SPDX-License-Identifier: Apache-2.0
"""onebasin evaluate and onebasin barrier: the scores of a model, and of the models on the line between two."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.data import Scores, Task, load_model, load_task
from onebasin.data import evaluate as scores_of
from onebasin.data.calibration import task_of
from onebasin.data.models import TASKS, refuse_unfit
from onebasin.engine import refuse_device
from onebasin.landscape import curve
from onebasin.models import Folder
from onebasin.settings import ExampleKeywords, Examples, refuses_unknown

from .apply import ModelAlignment
from .folders import opened
from .match import match as match_models
from .options import LEVEL_NAMES, ModelSource, Tell, take_level

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import BarrierKeywords


@dataclass(frozen=True)
class Barrier:
    """The loss of the models on the line between two.

    Attributes:
        barrier: The largest excess of the loss over the straight line between the losses of the two ends.
        lambdas: The position of every model on the line, from 0 to 1.
        losses: The loss of every model on the line.
        accuracies: The accuracy of every model on the line.
        end_losses: The losses of the two ends.
        alignment: How the second model was moved, if it was matched first.
        notes: Remarks for the reader of the result.
    """

    barrier: float
    lambdas: list[float]
    losses: list[float]
    accuracies: list[float]
    end_losses: list[float]
    alignment: ModelAlignment | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, as values for JSON."""
        names = ("lambdas", "losses", "accuracies", "barrier", "end_losses")
        return {name: getattr(self, name) for name in names}


@refuses_unknown(Examples)
def evaluate(
    model: ModelSource,
    data: str | Path,
    *,
    task: str | None = None,
    device: str = "cpu",
    family: str | None = None,
    tell: Tell | None = None,
    **examples: Unpack[ExampleKeywords],
) -> Scores:
    """Measure a model on labelled data.

    Args:
        model: the model.
        data: as `onebasin evaluate` takes them, such as a .jsonl file or `builtin:digits`.
        task: what is measured, such as `text-classification` (default: by the model's class).
        device: where the model runs.
        family: its table, for a model type that has none.
        tell: called with a sentence at every step.
        examples: the fields of `Examples`: `split`, `limit`, `batch`, `context`, ...

    Returns:
        Its `loss`, `accuracy`, and the task's own `metrics`.

    Raises:
        ValueError: for data or a task that does not fit the model.
    """
    refuse_device(device)
    examples["by_length"] = True
    with opened([model], family) as given:
        read = _task_on(given, data, task, examples)
        moved = load_model(given[0].folder, read.name).to(device)  # type: ignore[arg-type]
        return scores_of(moved, read, tell)


def _task_on(given: Sequence[Folder], data: str | Path, task: str | None, examples: Mapping[str, Any]) -> Task:
    """Return the task named, or that of the first model's class, with examples as that model reads them."""
    wanted = task or task_of(given[0])
    if wanted in TASKS:
        refuse_unfit([model.folder for model in given], wanted)
    return load_task(wanted, data, given[0].folder, **examples)


@refuses_unknown(Examples, more=lambda: LEVEL_NAMES)
def barrier(
    a: ModelSource,
    b: ModelSource,
    data: str | Path,
    *,
    task: str | None = None,
    points: int = 11,
    rescale: str = "joint",
    device: str = "cpu",
    family: str | None = None,
    tell: Tell | None = None,
    **examples: Unpack[BarrierKeywords],
) -> Barrier:
    """Measure the loss on the line between two models.

    Args:
        a: the model at lambda 0, and the anchor.
        b: the model at lambda 1.
        data: as in `evaluate`.
        task: as in `evaluate`.
        points: models on the line, both ends among them.
        rescale: as in `Options`.
        device: where the models run.
        family: their table, for a model type that has none.
        tell: called with a sentence at every step.
        examples: as in `evaluate`, and `match`: "none" (the default) or the level at which `b` is matched to `a` first;
            `symmetry` and `level` are other names for it.

    Returns:
        The `barrier`, and the `losses` and `accuracies` at `lambdas`.

    Raises:
        ValueError: for data or a task that does not fit the models, and for models that cannot be matched.
    """
    rest: dict[str, Any] = {**examples}
    named = take_level(rest, "none")
    refuse_device(device)
    with opened([a, b], family) as given, tempfile.TemporaryDirectory() as temporary:
        read = _task_on(given, data, task, rest)
        first, second = (model.folder for model in given)
        found = None
        if named != "none":
            found = match_models(
                given[1], given[0], Path(temporary) / "matched", match=named, rescale=rescale, device=device,
                family=family, tell=tell,
            )  # fmt: skip
            # A level that moves the residual stream gives the first model a normal form too: the line starts there.
            first, second = Path(found.get("anchor_output", first)), Path(found["output"])
        line = curve(first, second, read, points, device=device, tell=tell)
        if found is None:
            return Barrier(**line)
        return Barrier(**line, alignment=found.alignment, notes=tuple(found.notes))
