# SPDX-License-Identifier: Apache-2.0
"""One table per architecture, as readable text.

To add a family, add a `.txt` file here, in the notation of docs/notation.md: no other file knows a model family, and
no algorithm lives here. Other packages add families through the entry point group `onebasin.families`, which maps the
family's name to a string, the text of its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from onebasin.symmetry import Table, TableError, read_table

GROUP = "onebasin.families"
INFERENCE = "onebasin.running.inference"  # imported when needed: it runs models, and its room is above this one


class UnknownFamily(TableError):
    """No table covers a model type."""


@cache
def _texts() -> dict[str, str]:
    """Return the text of the shipped tables, by family name, in alphabetical order."""
    found = {path.name[:-4]: path for path in files(__name__).iterdir() if path.name.endswith(".txt")}
    return {name: found[name].read_text("utf-8") for name in sorted(found)}


@cache
def _shipped(family: str) -> Table:
    return read_table(_texts()[family], f"{family}.txt", _included)


def _included(family: str) -> Table:
    if family not in _texts():
        raise TableError(f"there is no family '{family}' to include")
    return _shipped(family)


@cache
def tables() -> dict[str, Table]:
    """Return all shipped tables, by family name, in alphabetical order."""
    return {name: _shipped(name) for name in _texts()}


@cache
def installed() -> dict[str, Table]:
    """Return the tables that other packages offer, by family name.

    Raises:
        TableError: A table is wrong; the message names its package.
    """
    found: dict[str, Table] = {}
    for point in entry_points(group=GROUP):
        name = f"{point.name} of {point.dist.name if point.dist else point.value}"
        if point.name in found or point.name in tables():
            raise TableError(f"there is already a family of the name {name}; rename one")
        try:
            text = point.load()
        except Exception as error:  # importing another package may raise anything
            raise TableError(f"the family {name} cannot be loaded: {error}") from error
        if not isinstance(text, str):
            raise TableError(f"the family {name} is not a string ({point.value})")
        found[point.name] = read_table(text, name, _included)
    return found


def table_of(config: Mapping[str, Any]) -> Table:
    """Return the table for a model's config: a shipped or an installed one, or one inferred from the model's class.

    Raises:
        TableError: There is none; the message names the closest known types.
    """
    try:
        return table_for(config["model_type"])
    except UnknownFamily as error:
        try:
            found: Table = import_module(INFERENCE).table_of(config)
        except TableError as why:
            raise UnknownFamily(f"{error}; none could be inferred either: {why}") from None
        return found


def table_for(model_type: str) -> Table:
    """Return the shipped or installed table for a config's `model_type`.

    Raises:
        TableError: There is none (the message names the closest known types), or several packages offer one.
    """
    for family, text in _texts().items():
        if model_type in text and model_type in _shipped(family).types:  # parsing all of them takes 0.1 s
            return _shipped(family)
    found = {name: table for name, table in installed().items() if model_type in table.types}
    if len(found) > 1:
        raise TableError(f"several families cover '{model_type}': {', '.join(found)}; name one with --family")
    if found:
        return found.popitem()[1]
    known = sorted(name for table in (*tables().values(), *installed().values()) for name in table.types)
    near = get_close_matches(model_type, known, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    raise UnknownFamily(f"model type '{model_type}' has no table yet ({hint}); name one with --family, "
                     "or give a table of your own with --table FILE")  # fmt: skip


def named_table(family: str) -> Table:
    """Return the table of a family.

    Args:
        family: The name of a shipped or installed family, or the path of a table.

    Raises:
        TableError: It is neither.
    """
    if family in _texts():
        return _shipped(family)
    if family in installed():
        return installed()[family]
    path = Path(family)
    if path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise TableError(f"the table '{path}' cannot be read as text: {error}") from None
        return read_table(text, str(path), _included)
    raise TableError(f"there is no family '{family}'; known: {', '.join([*tables(), *installed()])}")
