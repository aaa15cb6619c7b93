# SPDX-License-Identifier: Apache-2.0
"""The options of every command that measures models: which task, on which examples."""

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

Name = Annotated[str, typer.Option("--task", help=f"What is measured: {c.TASKS}.")]
Data = Annotated[
    str,
    typer.Option(
        help="A file (.txt, .jsonl, .csv, also .gz, .parquet), a folder of images by class or of the datasets library, "
        "a dataset of the hub, builtin:digits or builtin:stdlib."
    ),
]
# What `measures` adds to a command: option -> its type and default; `...` where it must be given.
OPTIONS: dict[str, Option] = {"task": (Name, ...), "data": (Data, ...), **options_of(settings.Examples)}


@dataclass(frozen=True)
class Examples:
    """The examples that a command's options name. given: option -> what was typed."""

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
    def told(self) -> dict[str, Any]:
        """Return what `onebasin.evaluate` takes of them."""
        return typed(settings.Examples, {name: self.given[name] for name in settings.Examples.names()})

    def refuse_unfit(self, models: Sequence[str], device: str) -> None:
        """Refuse a device or model that is not there or fits no task, before any is measured."""
        from onebasin.data.models import TASKS, refuse_unfit
        from onebasin.engine import refuse_device

        refuse_device(device)
        if self.task in TASKS:
            bases = (model if Path(model).exists() else model.partition("+")[0] for model in models)
            refuse_unfit(list(bases), self.task)

    def of(self, model: str, beside: Sequence[str] = (), device: str = "cpu", **more: Any) -> Task:
        """Return them as `model` reads them, once all models and the device are known to be there.

        beside: the other models that will be measured. more: further arguments of `onebasin.data.load_task`.
        """
        from onebasin.data import load_task

        self.refuse_unfit([model, *beside], device)
        return load_task(self.task, self.data, model, **self.told, **more)


measures = c.takes(OPTIONS, "examples", Examples)
