# SPDX-License-Identifier: Apache-2.0
"""The options of commands, made from the fields of settings: names, help and defaults are declared only there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from onebasin.settings import Settings

from . import common as c

Option = tuple[Any, Any]  # its type for typer, and its default


def options_of(
    kind: type[Settings], without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> dict[str, Option]:
    """Return the options of a command for settings: name -> its type and default, as `common.takes` expects.

    without: fields that get no option. defaults: where they differ from those of the fields.
    """
    found = {}
    for one in fields(kind):
        if one.name in kind.names() and one.name not in without:
            default = None if one.default is MISSING else one.default
            found[one.name] = _option(kind, one.name, (defaults or {}).get(one.name, default), one.metadata["help"])
    return found


def methods_options(methods: Mapping[str, type[Settings]], taken: Sequence[str]) -> dict[str, Option]:
    """Return the options of several methods. They default to None, so that a method can refuse another's.

    taken: names of other options of the command.

    Raises:
        ValueError: a setting has a name in `taken`, or another type in another method.
    """
    owners: dict[str, list[str]] = {}
    for method, kind in methods.items():
        for name in kind.names():
            owners.setdefault(name, []).append(method)
    found = {}
    for name, those in owners.items():
        kinds = [methods[method] for method in those]
        if name in taken or len({str(_hint(kind, name)) for kind in kinds}) > 1:
            raise ValueError(f"the setting '{name}' of the method {' and '.join(those)} has another meaning elsewhere; "
                             "it needs another name")  # fmt: skip
        one = next(one for one in fields(kinds[0]) if one.name == name)
        text, usual = one.metadata["help"], one.default
        text = f"{', '.join(those)}: {text[0].lower()}{text[1:]}"
        if usual is not None and not isinstance(usual, bool):
            text = f"{text.removesuffix('.')} [default: {usual}]."
        found[name] = _option(kinds[0], name, None, text)
    return found


def typed(kind: type[Settings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what was typed for settings to the types of their fields. Raises ValueError where that fails."""
    there = {name: value for name, value in given.items() if value is not None}
    return {name: _parser(kind, name)(value) if isinstance(value, str | list) else value
            for name, value in there.items()}  # fmt: skip


_HINTS: dict[type, dict[str, Any]] = {}  # getting them takes milliseconds, and every field needs them


def _hints(kind: type[Settings]) -> dict[str, Any]:
    """Return the types of all fields."""
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _hint(kind: type[Settings], name: str) -> Any:
    """Return the type of a field without bounds, and without None."""
    hint = _hints(kind)[name]
    if get_origin(hint) in (Union, UnionType):
        inside = tuple(one for one in get_args(hint) if one is not type(None))
        hint = inside[0] if len(inside) == 1 else inside
    return str if get_origin(hint) is Literal else hint


def _flag(kind: type[Settings], name: str) -> str:
    one = next(one for one in fields(kind) if one.name == name)
    return "--" + (one.metadata["flag"] or name.replace("_", "-"))


def _option(kind: type[Settings], name: str, default: Any, text: str) -> Option:
    hint, flag = _hint(kind, name), _flag(kind, name)
    look: dict[str, Any] = {"help": text, "rich_help_panel": section(kind, name)}
    if hint is bool:
        names = [flag if not default else f"{flag}/--no-{flag[2:]}"]
        return Annotated[bool | None if default is None else bool, typer.Option(*names, **look)], default
    words = choices(kind, name)
    if words:
        look |= c.choice(*words, several=bool(get_origin(hint)))
    plain: Any = hint if hint in (int, float) else list[str] if get_origin(hint) and _repeats(hint) else str
    return Annotated[plain | None if default is None else plain, typer.Option(flag, **look)], default


def section(kind: type[Settings], name: str) -> str:
    """Return the section of the help that lists a field, which the class that declares the field names."""
    owner: type[Settings] = next(one for one in kind.__mro__ if name in get_annotations(one))
    return owner.section


def choices(kind: type[Settings], name: str) -> tuple[str, ...]:
    """Return the words that a field allows; none if it allows any value of its type."""
    hint, own = _hints(kind)[name], next(one for one in fields(kind) if one.name == name)
    return get_args(hint) if get_origin(hint) is Literal else tuple(own.metadata["choices"])


def _repeats(hint: Any) -> bool:
    return bool(issubclass(get_origin(hint), Mapping) and get_args(hint)[1] is float)


def _parser(kind: type[Settings], name: str) -> Callable[[Any], Any]:
    """Return the function that converts what was typed to a value of the field."""
    hint, flag = _hint(kind, name), _flag(kind, name)
    if isinstance(hint, tuple):  # a word or several
        return c.datasets if any(get_args(one) == (str,) for one in hint) else _same
    origin = get_origin(hint)
    if origin is None:
        return _same
    if issubclass(origin, Mapping):
        return (lambda items: c.pairs(items, flag)) if _repeats(hint) else (lambda text: c.renamed(text, flag))
    if get_args(hint)[0] in (int, float):
        read = c.numbers if get_args(hint)[0] is int else c.weights
        return lambda text: read(text, flag)
    return c.words


def _same(value: Any) -> Any:
    return value
