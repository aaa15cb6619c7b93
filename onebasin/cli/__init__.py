# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin file per command, which parses options and prints results.

The work of a command is done in `onebasin.jobs` and below; nothing is computed here.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from onebasin.fusion import installed

# Transformers reads these when it is imported; commands import it only when they need it.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Torch reads this when it allocates its first tensor, and puts those of 2 MB and more on huge pages (Linux). A matrix
# of 64 MB that is soon freed then takes a fifth of the time: most of it went into touching small pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from . import audit, barrier, canonical, check, demo, distance, env, evaluate, families, infer, inspect, study, verify
from .common import console, exits_with_2
from .switches import translated

# Commands whose options are the fields of settings classes. Importing these imports torch, so it is done only when one
# of the commands runs. Name -> its help, as `described` returns it; docs/generate.py writes the file, a test compares.
HELP = Path(__file__).with_name("help.json")
LATE: dict[str, dict[str, Any]] = json.loads(HELP.read_text("utf-8"))


def callback_of(name: str) -> Callable[..., None]:
    """Return the function behind a command in `LATE`."""
    return exits_with_2(getattr(import_module(f".{name}", __name__), name))


def loaded(name: str) -> Any:
    """Import a command in `LATE`, and return it as typer builds it."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name, cls=Sections)(callback_of(name))
    return typer.main.get_command(single)


CONTEXT = {"help_option_names": ["-h", "--help"]}
FIRST = {"merge": ("output", "data", "budget", "method", "match", "weights", "base", "require", "report", "overwrite")}


class Sections(TyperCommand):
    """A command whose help lists its options in sections. If a command has many, the options in `FIRST` come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, section by section."""
        for section, records in self.sections(ctx).items():
            with formatter.section(section):
                formatter.write_dl(list(records.items()))

    def sections(self, ctx: Any) -> dict[str, dict[str, str]]:
        """Return section -> option -> its description."""
        found: dict[str, dict[str, str]] = {}
        first = FIRST.get(str(self.name), ())
        params = self.get_params(ctx)
        named = {str(param.name): param for param in params}
        rest = [param for param in params if param.name not in first]
        for param in sorted([*map(named.__getitem__, first), *rest], key=lambda one: one.param_type_name != "argument"):
            record = param.get_help_record(ctx)
            if record is not None:
                if param.param_type_name == "argument":
                    kind = "Arguments"
                elif param.name in first:
                    kind = "Options"
                else:
                    kind = getattr(param, "rich_help_panel", None) or ("More options" if first else "Options")
                found.setdefault(kind, {}).update([record])
        return found


class Described(Sections):
    """A command in `LATE` that only prints its help, without being imported."""

    def __init__(self, name: str) -> None:
        lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, help=LATE[name]["help"], context_settings=lenient, rich_markup_mode=None)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return list(LATE[str(self.name)]["usage"])

    def sections(self, ctx: Any) -> dict[str, dict[str, str]]:
        return dict(LATE[str(self.name)]["sections"])


def described(name: str) -> dict[str, Any]:
    """Return the help of a command in `LATE`: its text, its usage, and its options by section."""
    command = loaded(name)
    context = command.make_context(name, [], resilient_parsing=True, **CONTEXT)
    return {"help": command.help, "usage": command.collect_usage_pieces(context), "sections": command.sections(context)}


class Commands(TyperGroup):
    """All commands; those in `LATE` are imported only when they run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Any: the types moved between versions of typer
        """Return the name of the command, the command, and the words after it."""
        # Importing torch and transformers creates a million lasting objects. Searching them for garbage again and again
        # takes about a tenth of the start-up time.
        gc.set_threshold(100_000)
        name, command, rest = super().resolve_command(ctx, args)
        words = rest[: rest.index("--")] if "--" in rest else rest
        if (
            name in LATE and set(CONTEXT["help_option_names"]) & set(words) and not installed()
        ):  # installed methods have options, too
            return name, Described(name), rest
        if name == "merge":
            rest, notes = exits_with_2(translated)(rest)
            for note in notes if "--quiet" not in rest and "-q" not in rest else []:
                console.print(note, style="dim", soft_wrap=True)
        return name, exits_with_2(loaded)(name) if name in LATE else command, rest


app = typer.Typer(
    cls=Commands,
    help="Put transformers that were trained apart into one loss basin, and merge them there. "
    "A MODEL is a Hugging Face model folder or a hub id (owner/name).",
    no_args_is_help=True,
    context_settings=CONTEXT,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from onebasin import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    atexit.register(gc.freeze)  # no garbage collection at exit, when all memory is released anyway


for command in (
    inspect.inspect,
    check.check,
    *LATE,
    verify.verify,
    audit.audit,
    distance.distance,
    canonical.canonical,
    evaluate.evaluate,
    barrier.barrier,
    families.families,
    infer.infer,
    env.env,
    demo.demo,
):
    if isinstance(command, str):
        app.command(command, help=LATE[command]["help"])(lambda: None)
    else:
        app.command()(exits_with_2(command))  # type: ignore[arg-type]
app.add_typer(study.app, name="study")
