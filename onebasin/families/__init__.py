# SPDX-License-Identifier: Apache-2.0
"""One table per architecture, as text that people read.

A new family is a new `.txt` file here, in the notation of docs/notation.md, and nothing else: no
other file knows a model family, and no algorithm lives here. Packages add families by the entry point group
`onebasin.families`: the name of the family, and an object that is the table's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from onebasin.symmetry import Table, TableError, read_table

GROUP = "onebasin.families"
INFERENCE = "onebasin.running.inference"  # by name: it runs models, which rooms below it do not


class UnknownFamily(TableError):
    """A model type that no table is for."""


@cache
def _texts() -> dict[str, str]:
    """The shipped tables as they are written, by family name, in alphabetical order."""
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
    """All shipped tables, by family name, in alphabetical order."""
    return {name: _shipped(name) for name in _texts()}


@cache
def installed() -> dict[str, Table]:
    """The tables that other packages offer, by family name. Raises TableError naming the package of a wrong one."""
    found: dict[str, Table] = {}
    for point in entry_points(group=GROUP):
        if point.name in found or point.name in tables():
            raise TableError(f"the family '{point.name}' of {_package(point)} has the name of another; rename one")
        try:
            text = point.load()
        except Exception as error:  # whatever another package does while it is imported
            raise TableError(f"the family '{point.name}' of {_package(point)} cannot be loaded: {error}") from error
        if not isinstance(text, str):
            raise TableError(f"the family '{point.name}' of {_package(point)} is no text ({point.value})")
        found[point.name] = read_table(text, f"{point.name} of {_package(point)}", _included)
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def table_of(config: Mapping[str, Any]) -> Table:
    """The table of a model's configuration: a shipped one, an installed one, or else what its class lets infer.

    Raises TableError where there is none of them, naming the nearest known types.
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
    """The table of a config's `model_type`. Raises TableError naming the nearest known types, or the families of
    several packages that know it."""
    for family, text in _texts().items():
        if model_type in text and model_type in _shipped(family).types:  # to read all of them takes a tenth of a second
            return _shipped(family)
    found = {name: table for name, table in installed().items() if model_type in table.types}
    if len(found) > 1:
        raise TableError(f"several families know '{model_type}': {', '.join(found)}; name one with --family")
    if found:
        return found.popitem()[1]
    known = sorted(name for table in (*tables().values(), *installed().values()) for name in table.types)
    near = get_close_matches(model_type, known, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    raise UnknownFamily(f"model type '{model_type}' has no table yet ({hint}); name one with --family, "
                     "or give a table of your own with --table FILE")  # fmt: skip


def named_table(family: str) -> Table:
    """The table called `family`, or the one in the file of that path. Raises TableError if it is neither."""
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
