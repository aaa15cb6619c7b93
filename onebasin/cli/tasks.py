# SPDX-License-Identifier: Apache-2.0
"""The options of the commands that measure models: which task, on which examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebasin import settings

from . import common as c
from .fields import Option, options_of, typed

if TYPE_CHECKING:
    from onebasin.data import Task

Name = Annotated[str, typer.Option("--task", **c.choice(*c.TASKS.split(", ")), help=f"What to measure: {c.TASKS}.")]
Data = Annotated[
    str,
    typer.Option(
        help="A file (.txt, .jsonl, .csv, also .gz, .parquet), a folder of images by class or of the datasets library, "
        "a dataset of the hub, builtin:digits or builtin:stdlib."
    ),
]
# The options that `measures` adds to a command: option -> its type and default; `...` if it is required.
OPTIONS: dict[str, Option] = {"task": (Name, ...), "data": (Data, ...), **options_of(settings.Examples)}


@dataclass(frozen=True)
class Examples:
    """The examples that the options of a command describe. given: option -> what was typed."""

    given: Mapping[str, Any]

    @property
    def task(self) -> str:
        return str(self.given["task"])

    @property
    def data(self) -> str:
        return str(self.given["data"])

    @property
    def title(self) -> str:
        return f"{self.task} on {Path(self.data).name}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the further arguments for `onebasin.evaluate`."""
        return typed(settings.Examples, {name: self.given[name] for name in settings.Examples.names()})

    def refuse_unfit(self, models: Sequence[str], device: str) -> None:
        """Refuse a device or model that does not exist or does not fit the task, before anything is measured."""
        from onebasin.data.models import TASKS, refuse_unfit
        from onebasin.engine import refuse_device

        refuse_device(device)
        if self.task in TASKS:
            bases = (model if Path(model).exists() else model.partition("+")[0] for model in models)
            refuse_unfit(list(bases), self.task)

    def of(self, model: str, beside: Sequence[str] = (), device: str = "cpu", **more: Any) -> Task:
        """Return the task for `model`, after checking that all models and the device exist.

        beside: the other models that will be measured. more: further arguments of `onebasin.data.load_task`.
        """
        from onebasin.data import load_task

        self.refuse_unfit([model, *beside], device)
        return load_task(self.task, self.data, model, **self.settings, **more)


measures = c.takes(OPTIONS, "examples", Examples)
