# SPDX-License-Identifier: Apache-2.0
"""Text that is published: names instead of paths, and other people's words escaped for Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_ROOTED = re.compile(r"""(?<![\w.:/~-])(?:~|\.\.?)?/[^\s'"`(),;=#<>|{}\[\]]+""")  # a path inside a sentence
_SPLIT = re.compile("([,=#])")  # separators inside a word of the command line


def is_path(text: str) -> bool:
    """Return whether this is a path on this machine, by the rule of `locate`: other words with a slash are hub ids."""
    if "://" in text or "\0" in text:
        return False
    if text in (".", "..", "~"):
        return True
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if not any(separator in text for separator in separators):
        return False
    return text.startswith(".") or not _HUB_ID.fullmatch(text) or os.path.isdir(os.path.dirname(text))


def public_name(place: str) -> str:
    """Return a public name for a place: the last part of a path, or the hub id of a snapshot in the hub's cache.

    A file `model.safetensors` is called by the name of its folder, a model with an adapter (A+B) by both names.
    Anything but a path is returned as it is.
    """
    if not is_path(place):
        return place
    if "+" in place and not os.path.lexists(place):
        return "+".join(map(public_name, place.split("+")))
    path = Path(os.path.abspath(os.path.expanduser(place)))
    cached = re.fullmatch("models--(.+?)--(.+)", path.parent.parent.name)
    if cached and path.parent.name == "snapshots":
        return f"{cached[1]}/{cached[2]}@{path.name}"
    return (path.parent if path.name == "model.safetensors" else path).name or place


def words(text: str) -> str:
    """Return a word of the command line with names instead of paths: `a=/b/c,/d/e` becomes `a=c,e`."""
    return "".join(map(public_name, _SPLIT.split(text)))


def without_paths(value: Any, known: Iterable[str] = ()) -> Any:
    """Return a JSON value with names instead of paths in all of its texts.

    value: any JSON value. known: paths that may occur in its sentences and that no rule could find there, because they
    are relative or contain spaces.
    """
    if isinstance(value, Mapping):
        return {without_paths(key, known): without_paths(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item, known) for item in value]
    if not isinstance(value, str):
        return value
    value = "".join(public_name(piece) if _is_whole(piece) else piece for piece in _SPLIT.split(value))
    for place in sorted(filter(is_path, known), key=len, reverse=True):
        through = place[: len(place.rstrip("/" + os.sep)) - len(Path(place).name)]
        if Path(place).name and through:
            value = re.sub(rf"(?<![\w./~-]){re.escape(through)}(?=[^/])", "", value)
    return _ROOTED.sub(lambda found: public_name(found[0]), value)


def _is_whole(piece: str) -> bool:
    """Whether this is a path, rather than a sentence that contains one."""
    return is_path(piece) and (not re.search(r"\s", piece) or os.path.isdir(os.path.dirname(piece)))


def plain(text: str) -> str:
    """Return the text on one line, without control characters or characters that UTF-8 cannot encode."""
    return "".join(character if character.isprintable() else " " for character in text)


def prose(text: str) -> str:
    """Return a text escaped for a Markdown sentence, heading or cell."""
    return re.sub(r"([\\`*\[\]<>|&#$~]|(?<!\w)_|_(?!\w))", r"\\\1", plain(text))


def code(text: str) -> str:
    """Return a text as code in a Markdown sentence."""
    text, fence = plain(text) or " ", _fence(text, 1)
    pad = " " if text.strip(" `") != text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str) -> list[str]:
    """Return the lines of a block of code in Markdown."""
    fence = _fence(text, 3)
    return [fence + language, *map(plain, text.split("\n")), fence]


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
