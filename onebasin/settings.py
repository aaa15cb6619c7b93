# SPDX-License-Identifier: Apache-2.0
"""What users give, and its bounds: numbers as types for the fields of settings, and files of YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes, and so mergekit

MOST_VALUES = 100_000  # of a YAML file
DEEPEST = 100


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
