# SPDX-License-Identifier: Apache-2.0
"""The options of every command that measures models: which task, on which examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import common as c

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
Columns = Annotated[
    str | None,
    typer.Option(help="What our columns are called in the data, such as text=sentence1,text_pair=sentence2."),
]
Split = Annotated[
    str | None,
    typer.Option(help="train, validation, test or all [default: digits and datasets test, text validation, rows all]."),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many images, rows or sequences.")]
Batch = Annotated[int, typer.Option(help="Examples in a batch; changes the speed, not the result.")]
Context = Annotated[int | None, typer.Option(help="Tokens in a sequence [default: what the model takes, at most 512].")]
Vocabulary = Annotated[
    str | None,
    typer.Option(help="JSON file character -> id (or a list), for a character-level language model."),
]
MaskId = Annotated[int | None, typer.Option(help="masked-lm: id of the mask token [default: the tokenizer's].")]
MaskShare = Annotated[float, typer.Option(help="masked-lm: share of the tokens that are masked.")]
Maskable = Annotated[str | None, typer.Option(help="masked-lm: only these token ids, such as 5-80,91.")]
Seed = Annotated[int, typer.Option(help="masked-lm: of the masks.")]


# What `measures` adds to a command: option -> its type and default; `...` where it must be given.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "task": (Name, ...),
    "data": (Data, ...),
    "columns": (Columns, None),
    "split": (Split, None),
    "limit": (Limit, None),
    "batch": (Batch, 64),
    "context": (Context, None),
    "vocabulary": (Vocabulary, None),
    "mask_id": (MaskId, None),
    "mask_share": (MaskShare, 0.15),
    "maskable": (Maskable, None),
    "seed": (Seed, 0),
}


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
        told = {name: value for name, value in self.given.items() if name not in ("task", "data")}
        return told | {"columns": c.renamed(told["columns"], "--columns"), "maskable": ids(told["maskable"])}

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

        Args:
            model: a folder or a hub id.
            beside: the other models that will be measured.
            device: where they will be.
            more: further arguments of `onebasin.data.load_task`.
        """
        from onebasin.data import load_task

        self.refuse_unfit([model, *beside], device)
        return load_task(self.task, self.data, model, **self.told, **more)


measures = c.takes(OPTIONS, "examples", Examples)


def ids(text: str | None) -> list[int] | None:
    """`--maskable` as numbers."""
    return c.numbers(text, "--maskable")
