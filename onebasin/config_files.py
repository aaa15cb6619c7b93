# SPDX-License-Identifier: Apache-2.0
"""Files that say what to do, in YAML or JSON: reading them with bounds, and what is wrong with one in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .settings import refuse_unknown

MOST_VALUES = 100_000  # of a YAML file
DEEPEST = 100


def read_yaml(path: str | Path, several: bool = False) -> tuple[Any, str]:
    """Return what a YAML file holds, and its text; with `several` a list of all its documents.

    Raises ValueError, naming the file, where it cannot be read, is not YAML, or holds more than `refuse_vast` allows.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not valid YAML: {error}") from None
    try:
        content = [one for one in yaml.safe_load_all(text) if one is not None] if several else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that Python cannot hold
        raise ValueError(f"'{path}' is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"'{path}' is nested too deeply") from None
    try:
        refuse_vast(content, MOST_VALUES)
    except ValueError as error:
        raise ValueError(f"'{path}' {error}") from None
    return content, text


def refuse_vast(content: object, most: int | None = None) -> None:
    """Refuse lists and dictionaries that are nested too deeply for code that recurses, or hold too many values.

    most: how many; None for any number. A value behind several aliases of YAML counts every time: whoever walks through
    the content meets it as often, which a few lines can make 10^9 times. Raises ValueError ("is nested ...").
    """
    layer, count = [content], 0
    for _ in range(DEEPEST):
        inner: list[object] = []
        for item in layer:
            inside = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
            count += len(inside)
            if most is not None and count > most:
                raise ValueError(f"holds more than {most:,} values")
            inner += [value for value in inside if isinstance(value, dict | list | tuple)]
        if not inner:
            return
        layer = inner
    raise ValueError(f"is nested more than {DEEPEST} deep")


def sentence_of(error: ValidationError, whole: type[BaseModel]) -> str:
    """Return the first mistake of a file in words; an unknown key goes before all others.

    error: what reading the file as `whole`, its outermost block, raised.
    """
    first = sorted(error.errors(), key=lambda mistake: mistake["type"] != "extra_forbidden")[0]
    *inside, last = where = [str(piece) for piece in first["loc"]] or [""]
    if first["type"] == "extra_forbidden":
        try:
            refuse_unknown([last], sorted(_keys_at(inside, whole)), "key", f"in {_path(inside)}" if inside else "")
        except ValueError as unknown:
            return str(unknown)
    what = first["msg"].removeprefix("Value error, ")
    return f"{_path(where)}: {what}" if first["loc"] else what


def _path(where: Sequence[str]) -> str:
    """`models[0].parameters`; what pydantic adds to tell the members of a union apart is left out."""
    pieces = [one for one in where if one.isdigit() or (one.isidentifier() and one.islower() and one not in _TYPES)]
    return "".join(f"[{piece}]" if piece.isdigit() else f".{piece}" for piece in pieces).lstrip(".")


_TYPES = {"bool", "int", "float", "str"}


def _keys_at(where: Sequence[str], whole: type[BaseModel]) -> set[str]:
    """The keys of the block at a place of a file."""
    blocks: list[type[BaseModel]] = [whole]
    for piece in where:
        inside = [found for block in blocks if piece in block.model_fields for found in
                  _blocks(block.model_fields[piece].annotation)]  # fmt: skip
        blocks = inside or blocks
        blocks = [block for block in blocks if block.__name__ == piece] or blocks
    return {key for block in blocks for key in block.model_fields}


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    """The blocks inside a type such as `list[Source] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inside in get_args(annotation):
        yield from _blocks(inside)
