# SPDX-License-Identifier: Apache-2.0
"""Text that is published: names instead of paths, and foreign words that stay words in Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_ROOTED = re.compile(r"""(?<![\w.:/~-])(?:~|\.\.?)?/[^\s'"`(),;=#<>|{}\[\]]+""")  # a path inside a sentence
_SPLIT = re.compile("([,=#])")  # what joins several words of the command line in one


def is_path(text: str) -> bool:
    """Return whether this is a place on this machine, by the rule of `locate`: all else with one slash is a hub id."""
    if "://" in text or "\0" in text:
        return False
    if text in (".", "..", "~"):
        return True
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if not any(separator in text for separator in separators):
        return False
    return text.startswith(".") or not _HUB_ID.fullmatch(text) or os.path.isdir(os.path.dirname(text))


def public_name(place: str) -> str:
    """Return what to call a place: a path's last part, or the hub's name of a snapshot in its cache.

    A weight file that is called as all are goes by its folder's name, a model with an adapter (A+B) by both. What is
    no path stays as it is.
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
    """Return a text, or a JSON value with such texts in it, with names instead of paths.

    Args:
        value: any JSON value.
        known: paths that may stand inside its sentences, which no rule could find there: relative ones, those with
            spaces.

    Returns:
        The same value without the folders that the paths lead through.
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
    """Whether this is a path, and no sentence in which one stands."""
    return is_path(piece) and (not re.search(r"\s", piece) or os.path.isdir(os.path.dirname(piece)))


def plain(text: str) -> str:
    """Return the text on one line, without characters that command a terminal or that UTF-8 has no bytes for."""
    return "".join(character if character.isprintable() else " " for character in text)


def prose(text: str) -> str:
    """Return foreign words for a Markdown sentence, heading or cell, in which none of them is markup."""
    return re.sub(r"([\\`*\[\]<>|&#$~]|(?<!\w)_|_(?!\w))", r"\\\1", plain(text))


def code(text: str) -> str:
    """Return foreign words as code in a Markdown sentence."""
    text, fence = plain(text) or " ", _fence(text, 1)
    pad = " " if text.strip(" `") != text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str) -> list[str]:
    """Return the lines of a block of code in Markdown."""
    fence = _fence(text, 3)
    return [fence + language, *map(plain, text.split("\n")), fence]


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
