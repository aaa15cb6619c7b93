# SPDX-License-Identifier: Apache-2.0
"""The options of every command that measures models: which task, on which examples."""

from __future__ import annotations

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


def load(task: str, data: str, model: str, *, maskable: str | None, **options: Any) -> Task:
    """`onebasin.data.load_task` on the options as they were typed."""
    from onebasin.data import load_task

    return load_task(task, data, model, maskable=ids(maskable), **options)


def ids(text: str | None) -> set[int] | None:
    """`5-7,91` -> {5, 6, 7, 91}. Raises ValueError quoting the piece that is no range."""
    if text is None:
        return None
    found: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--maskable: '{piece.strip()}' is neither a token id nor a range such as 5-80")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def renamed(text: str | None) -> dict[str, str]:
    """`text=sentence,label=class` -> both. Raises ValueError quoting what is not of that form."""
    found = {}
    for piece in c.words(text) or []:
        ours, equals, theirs = piece.partition("=")
        if not (ours and equals and theirs):
            raise ValueError(f"--columns '{piece}': write OURS=THEIRS, such as text=sentence")
        found[ours] = theirs
    return found
