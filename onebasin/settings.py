# SPDX-License-Identifier: Apache-2.0
"""What users give, and its bounds: numbers as types for the fields of settings, and files of YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import yaml
from pydantic import Field, TypeAdapter, ValidationError

Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes, and so mergekit
Index = Annotated[int, Field(ge=0, lt=10**6)]  # of layers and tokens, counted from 0
Indices = Annotated[list[Index], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=10**9)]  # of examples, steps
Few = Annotated[int, Field(ge=1, le=1000)]  # of what is costly each time: starts of a search, threads, labels drawn
Context = Annotated[int, Field(ge=2, le=10**6)]  # tokens; one leaves nothing to predict
Points = Annotated[int, Field(ge=2, le=1000)]  # on a line or an edge, both ends included
Share = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1)]  # of a whole
Factor = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Rate = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10)]  # of learning
Strength = Annotated[float, Field(allow_inf_nan=False, ge=0, le=10**6)]  # of noise, of entropy, of a tensor in a sum
Temperature = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10**6)]
Weight = Annotated[float, Field(allow_inf_nan=False, ge=-(10**6), le=10**6)]  # of a model in a sum

MOST_VALUES = 100_000  # of a YAML file
DEEPEST = 100


def checked(kind: Any, name: str, value: Any) -> Any:
    """Return a value in the type that it shall have: a "2" as 2.

    Args:
        kind: a type with bounds, such as `Count` or `Count | None`, or a collection of such.
        name: of the setting, for the message.
        value: what was given.

    Raises:
        ValueError: in one sentence, for what is not of that type or is out of bounds (NaN always is).
    """
    return _valid(TypeAdapter(kind), name, value)


def check_fields(settings: object) -> None:
    """Bring all fields of a dataclass whose types have bounds into these types, for its `__post_init__`.

    Raises:
        ValueError: as `checked` does.
    """
    kind = type(settings)
    if kind not in _ADAPTERS:
        hints = get_type_hints(kind, include_extras=True)
        _ADAPTERS[kind] = {name: TypeAdapter(hint) for name, hint in hints.items() if _has_bounds(hint)}
    for name, adapter in _ADAPTERS[kind].items():
        object.__setattr__(settings, name, _valid(adapter, name, getattr(settings, name)))


_ADAPTERS: dict[type, dict[str, TypeAdapter[Any]]] = {}


def _has_bounds(hint: Any) -> bool:
    return bool(getattr(hint, "__metadata__", ())) or any(map(_has_bounds, get_args(hint)))


def _valid(adapter: TypeAdapter[Any], name: str, value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join([name.replace("_", "-"), *(str(piece) for piece in first["loc"])])
        raise ValueError(f"{where} {first['input']!r}: {first['msg'].replace('Input should', 'it must')}") from None


def read_yaml(path: str | Path) -> tuple[Any, str]:
    """Return what a YAML file holds, and its text.

    Raises ValueError, naming the file, where it cannot be read, is not YAML, or holds more than `refuse_vast` allows.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not valid YAML: {error}") from None
    try:
        content = yaml.safe_load(text)
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
