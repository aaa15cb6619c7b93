# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a model, in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onebasin.config_files import refuse_vast

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class ModelError(ValueError):
    """A model folder that cannot be read; the message says which file and what to do."""


def one_line(error: Exception) -> str:
    """The first two lines of an error's message as one, for use inside another message; with the error's kind where
    its message alone is no sentence, such as the key of a KeyError."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in _COLOUR.sub("", told).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:300]
    bare = isinstance(error, AssertionError | AttributeError | LookupError | NameError | TypeError)
    return f"{type(error).__name__}: {text}" if bare and text else text or type(error).__name__


def _number(read: dict[str, Any]) -> Any:
    """A number that JSON has no word for, as transformers writes it, or what else was read."""
    return float(read["__float__"]) if read.get("__float__") in ("Infinity", "-Infinity", "NaN") else read


def read_json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text("utf-8"), object_hook=_number)
        refuse_vast(content)
        return content
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{path}' is not valid JSON: {one_line(error)}") from None
