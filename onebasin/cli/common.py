# SPDX-License-Identifier: Apache-2.0
"""What every command shares: option types, the console on stderr, JSON on stdout, one line for bad input."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

console = Console(stderr=True, highlight=False)

P = ParamSpec("P")
R = TypeVar("R")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")]
Verify = Annotated[bool, typer.Option(help="Compare outputs on random inputs before anything is put in place.")]
Family = Annotated[
    str | None,
    typer.Option("--family", "--table", help="A family's name or a table file, where the model type has none."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of the written weights: float32, float16, bfloat16, float64 [default: as the source]."),
]
Device = Annotated[str, typer.Option(help="Where the mathematics runs: cpu, cuda, mps.")]
Precision = Annotated[str, typer.Option(help="Of the mathematics: float32 or float64.")]
Rescale = Annotated[str, typer.Option(help="Scale of each head: none, after the rotation, or joint with it.")]
Parts = Annotated[str | None, typer.Option(help="Only these parts: attention,ffn,stream,head.")]
Layers = Annotated[str | None, typer.Option(help="Only these layers, such as 0-4,11.")]
Starts = Annotated[int, typer.Option(help="Starts of the descent where spaces are coupled; the best is kept.")]
Seed = Annotated[int, typer.Option(help="Of the noise in further starts.")]
Weight = Annotated[
    list[str] | None,
    typer.Option("--tensor-weight", help="NAME=W: weight of the tensors whose name contains NAME. Repeatable."),
]


def exits_with_2(command: Callable[P, R]) -> Callable[P, R]:
    """Turn bad input (ValueError, OSError) into one line on stderr and exit code 2."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError) as error:
            console.print(f"[bold red]error:[/] {_escape(' '.join(str(error).split()))}", soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            console.print("interrupted; nothing was written")
            raise typer.Exit(130) from None

    return wrapped


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """A status line on stderr that shows what is going on; None when quiet."""
    if quiet:
        yield None
        return
    with console.status("") as status:
        yield lambda text: status.update(_escape(text))


def command_line() -> str:
    """The command as the user typed it, for the model card."""
    return shlex.join(["onebasin", *sys.argv[1:]])


def print_json(value: Any) -> None:
    print(json.dumps(value))


def print_notes(result: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        for note in result.get("notes", []):
            console.print(f"[dim]{_escape(note)}[/]", soft_wrap=True)


def words(text: str | None) -> list[str] | None:
    """`attention,ffn` -> ["attention", "ffn"]."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str | None) -> list[int] | None:
    """`0-4,11` -> [0, 1, 2, 3, 4, 11]. Raises ValueError quoting the piece that is no range."""
    if text is None:
        return None
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"--layers: '{piece.strip()}' is neither a number nor a range such as 0-4")
        found += range(int(first), int(last or first) + 1)
    return found


def pairs(items: list[str] | None) -> dict[str, float]:
    """`["NAME=2"]` -> {"NAME": 2.0}. Raises ValueError quoting what is not of that form."""
    found = {}
    for item in items or []:
        name, _, value = item.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"--tensor-weight '{item}': write NAME=NUMBER") from None
    return found
