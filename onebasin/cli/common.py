# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands: option types, the console on stderr, JSON on stdout, one line for bad input."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
import yaml
from rich.console import Console
from rich.text import Text

from onebasin import fusion

if TYPE_CHECKING:
    from rich.progress import ProgressColumn
    from rich.progress import Task as Step

LONGEST = 1200  # characters of a message
console = Console(stderr=True, highlight=False, markup=False, emoji=False)  # names are printed as they are

P = ParamSpec("P")
R = TypeVar("R")

AVERAGES = ", ".join(fusion.AVERAGES)
# Written out here and below, because the modules that define levels, tasks and settings take seconds to import; tests
# compare.
LEVELS = "paper, permutation, orthogonal, full, invertible"
TASKS = (
    "image-classification, causal-lm, masked-lm, text-classification, text-regression, token-classification, "
    "speech-recognition"
)


def choice(*words: str, several: bool = False) -> dict[str, Any]:
    """Return what makes an option show the words that it takes, and the shell complete them. several: whether it takes
    a list, with commas."""

    def completed(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",") if several else ("", "", "")
        return [f"{before}{comma}{word}" for word in words]

    return {"metavar": ("," if several else "|").join(words), "autocompletion": completed}


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, notes or summary, only errors.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Verify = Annotated[
    str,
    typer.Option(
        "--verify",
        **choice("outputs", "tensors", "none"),
        help="The check before anything is written: outputs compares the rewritten model with its source on random "
        "inputs, layer by layer; tensors proves that the table allows every map found, and tests the table on a tiny "
        "model of the same configuration (if transformers has a class for it), without running the model itself; none.",
    ),
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="The same as --verify none.")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Threads of weight matching [default: one per core, one for small models]; do not change the result."
    ),
]
Family = Annotated[
    str | None,
    typer.Option(
        "--family", "--table", help="Family or table file, for a model type that has none [default: by type]."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        **choice("float32", "float16", "bfloat16", "float64"),
        help="Type of the weights written: float32, float16, bfloat16, float64 [default: as stored].",
    ),
]
Device = Annotated[str, typer.Option(help="Device of the computation: cpu, cuda, mps.")]
Precision = Annotated[
    str, typer.Option(**choice("float32", "float64"), help="Type of the computation: float32 or float64.")
]
Rescale = Annotated[
    str,
    typer.Option(
        **choice("none", "after", "joint"),
        help="Scale every head too: none, after its rotation, or joint with it (best).",
    ),
]
Push = Annotated[
    str | None, typer.Option("--push-to-hub", metavar="REPO", help="Also upload the output to owner/name on the hub.")
]
Verbose = Annotated[int, typer.Option("-v", count=True, help="Print every step as a line.", show_default=False)]


def takes(
    options: Mapping[str, tuple[Any, Any]], name: str, made: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's argument `name` by shared options; `made` turns what was typed for them into that argument.

    options: option -> its type and default; `...` if it is required.
    """

    def given(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**typed: Any) -> None:
            shared = made({option: typed.pop(option) for option in options})
            command(**typed, **{name: shared})

        whole: list[Parameter] = []
        for one in signature(command, eval_str=True).parameters.values():
            if one.name == name:
                whole += [_option(*option) for option in options.items()]
            else:
                whole.append(one.replace(kind=Parameter.KEYWORD_ONLY))
        wrapped.__signature__ = signature(command).replace(parameters=whole)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in whole}
        return wrapped

    return given


def _option(name: str, declared: tuple[Any, Any]) -> Parameter:
    kind, default = declared
    default = Parameter.empty if default is ... else default
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def exits_with_2(command: Callable[P, R]) -> Callable[P, R]:
    """Turn bad input (ValueError, OSError) into one line on stderr and exit code 2. Hide the warnings of libraries,
    which address programmers, unless they are asked for (`python -W`, PYTHONWARNINGS)."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            return answered(*args, **kwargs)

    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        import onebasin.models  # noqa: F401  # slow; torch swallows a KeyboardInterrupt while it is imported

        try:
            with _interruptible():
                return command(*args, **kwargs)
        except (ValueError, OSError) as error:
            from onebasin.engine.placing import said

            console.print(Text.assemble(("error:", "bold red"), " ", line(said(error))), soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as interrupt:
            console.print("; ".join(["interrupted", "no output was written", *map(str, interrupt.args)]))
            raise typer.Exit(130) from None

    return wrapped


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C into KeyboardInterrupt while the block runs, and restore the handler that was there before."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def level(help: str, *none: str) -> Any:
    """Return the option for a level of symmetry, which has the same three names in every command. none: the word for
    not matching, where it is allowed."""
    return typer.Option("--match", "--symmetry", "--level", **choice(*none, *LEVELS.split(", ")), help=help)


def line(text: object) -> str:
    """Return a text on one line, without control characters, and without its middle if it is too long: names in it may
    come from files."""
    whole = "".join(one if one.isprintable() else " " for one in " ".join(str(text).split()))
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST // 2]} ... {whole[-LONGEST // 2 :]}"


def stdout() -> Console:
    """Return the console for tables, which prints names as they are."""
    return Console(highlight=False, markup=False, emoji=False)


@contextmanager
def progress(
    quiet: bool, verbose: int = 0, seconds: float | None = None, first: str = ""
) -> Iterator[Callable[[str], None] | None]:
    """Show on stderr what is going on: in one line with a clock, or in a line per step (verbose). Yield None if quiet.

    seconds: the longest that it takes, if known, for a bar and the time left. first: what is shown until it is told.
    """
    if quiet:
        yield None
        return
    if verbose:
        yield lambda text: console.print(line(text), soft_wrap=True)
        return
    if not console.is_interactive:  # where rich would leave an empty line behind
        yield lambda text: None
        return
    from rich.progress import Progress

    with Progress(*_columns(seconds), console=console, transient=True) as shown:
        task = shown.add_task(line(first), total=seconds)
        yield lambda text: shown.update(task, description=line(text))


def _columns(seconds: float | None) -> list[ProgressColumn]:
    """Return the columns of the line. Its clock runs by itself, since a step may take minutes."""
    from rich.progress import ProgressColumn, SpinnerColumn, TimeElapsedColumn
    from rich.progress_bar import ProgressBar

    class Words(ProgressColumn):
        def render(self, task: Step) -> Text:
            return Text(task.description, overflow="ellipsis", no_wrap=True)

    class Bar(ProgressColumn):
        def render(self, task: Step) -> ProgressBar:
            return ProgressBar(total=seconds or 1, completed=min(task.elapsed or 0, seconds or 0), width=20)

    class Left(ProgressColumn):
        def render(self, task: Step) -> Text:
            left = max(0, round((seconds or 0) - (task.elapsed or 0)))
            return Text(f"at most {left // 60}:{left % 60:02d} left")

    shown: list[ProgressColumn] = [SpinnerColumn(), Words(), TimeElapsedColumn()]
    return shown if seconds is None else [*shown, Bar(), Left()]


def given_options(context: typer.Context) -> dict[str, str]:
    """Return parameter -> option for all options that were given on the command line."""
    names = {str(param.name): param.opts[0] for param in context.command.params}
    return {
        name: option
        for name, option in names.items()
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def push(output: str, repository: str | None, result: dict[str, Any], tell: Callable[[str], None] | None) -> None:
    """Upload the output if a repository is given, and add its address to the result."""
    if repository is not None:
        from onebasin.models.fetching import upload

        if tell:
            tell(f"uploading to {repository}")
        result["hub"] = upload(output, repository)


def command_line() -> str:
    """Return the command as typed, but with names instead of paths, since it may be published."""
    from onebasin.models.published import words

    return shlex.join(["onebasin", *map(words, sys.argv[1:])])


def print_json(value: Any) -> None:
    print(json.dumps(value))


def print_notes(result: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        for note in result.get("notes", []):
            console.print(line(note), style="dim", soft_wrap=True)


def wants_words(result: dict[str, Any], json: bool, quiet: bool) -> bool:
    """Print the notes of a result, and the result itself as JSON if wanted; return whether to summarise it in words."""
    print_notes(result, quiet)
    if json:
        print_json(result)
    return not (json or quiet)


def words(text: str | None) -> list[str] | None:
    """`attention,ffn` -> ["attention", "ffn"]."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def datasets(text: str | None) -> str | list[str] | None:
    """`a.jsonl,b.jsonl` -> both; a single dataset stays a string."""
    named = words(text) or []
    return text if len(named) < 2 or Path(str(text)).exists() else named


def numbers(text: str | None, option: str) -> list[int] | None:
    """`0-4,11` -> [0, 1, 2, 3, 4, 11]. option: named in errors. Raises ValueError for a piece that is neither a number
    nor a range, runs backwards, or goes beyond 999999."""
    if text is None:
        return None
    found: dict[int, None] = {}
    for piece in text.split(","):
        matched = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece.strip())
        if matched is None:
            raise ValueError(f"{option}: '{piece.strip()}' is neither a number nor a range such as 0-4")
        if max(map(len, matched.groups(""))) > 6:
            raise ValueError(f"{option}: '{piece.strip()}' goes beyond 999999")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if last < first:
            raise ValueError(f"{option}: '{piece.strip()}' is neither a number nor a range such as 0-4")
        found.update(dict.fromkeys(range(first, last + 1)))
    return list(found)


def weights(text: str | None, option: str = "--weights") -> list[float] | None:
    """`0.5,0.5` -> [0.5, 0.5]. Raises ValueError for anything but a list of numbers."""
    try:
        return None if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} '{text}': write numbers separated by commas") from None


def renamed(text: str | None, option: str) -> dict[str, str]:
    """`text=sentence,label=class` -> both, as a dictionary. Raises ValueError for another form."""
    found = {}
    for piece in words(text) or []:
        ours, equals, theirs = piece.partition("=")
        if not (ours and equals and theirs):
            raise ValueError(f"{option} '{piece}': write OURS=THEIRS, such as text=sentence")
        found[ours] = theirs
    return found


def pairs(items: list[str] | None, option: str) -> dict[str, float]:
    """`["NAME=2"]` -> {"NAME": 2.0}. Raises ValueError for another form."""
    found = {}
    for item in items or []:
        name, _, value = item.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"{option} '{item}': write NAME=NUMBER")
    return found


def scalars(items: list[str] | None, option: str) -> dict[str, Any]:
    """`["density=0.5", "normalize=true"]` -> both, with values as in YAML. Raises ValueError for another form."""
    found = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        read = yaml.safe_load(value) if equals else None
        if not name or not isinstance(read, bool | int | float | str):
            raise ValueError(f"{option} '{item}': write NAME=VALUE, such as density=0.5")
        found[name] = read
    return found


def size(number: int) -> str:
    """Return a number of bytes for people to read: 1.5 GB."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= one:
            return f"{number / one:.3g} {unit}"
    return f"{number} B"


def print_effort(result: dict[str, Any]) -> None:
    """Print the time and memory that the run took."""
    memory = f", at most {size(result['peak_memory'])} of memory" if result["peak_memory"] else ""
    print(f"{result['seconds']:.3g} s{memory}")
