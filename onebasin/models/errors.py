# SPDX-License-Identifier: Apache-2.0
"""The error for a model that cannot be used, and one-line versions of other errors."""

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
    """Return the first two lines of an error's message as one line, for use inside another message. The error's type is
    added if its message alone is not a sentence, such as the key of a KeyError."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:300]
    bare = isinstance(error, AssertionError | AttributeError | LookupError | NameError | TypeError)
    return f"{type(error).__name__}: {text}" if bare and text else text or type(error).__name__


def _number(read: dict[str, Any]) -> Any:
    """Return a number that JSON cannot express, which transformers writes as an object; other objects as they are."""
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
