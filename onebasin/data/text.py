# SPDX-License-Identifier: Apache-2.0
"""Running text: the built-in text, character vocabularies, splits, and sequences of equal length."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from onebasin.settings import choose_from

SPLITS = ("train", "validation", "all")
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


@lru_cache(maxsize=1)
def stdlib_text(size: int = 96) -> str:
    """Return the .py files of Python's standard library, without its tests, in sorted order as one text.

    Only the `size` most frequent characters are kept (ties by code point). The text depends on the version of Python
    alone.
    """
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    text = "\n".join(file.read_text("utf-8", "replace") for file in sorted(files))
    if not text:
        raise ValueError(f"this Python has no source files in '{root}', so builtin:stdlib is empty; give a text file")
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    counts = np.bincount(points)
    frequent = np.zeros(len(counts), dtype=bool)
    frequent[np.argsort(-counts, kind="stable")[:size]] = True
    kept: bytes = points[frequent[points]].tobytes()
    return kept.decode("utf-32-le")


def character_vocabulary(text: str) -> dict[str, int]:
    """Return character -> id: the distinct characters of `text`, sorted."""
    return {character: index for index, character in enumerate(sorted(set(text)))}


def read_vocabulary(file: str | Path) -> dict[str, int]:
    """Return character -> id, from a JSON object, or from a JSON list whose positions are the ids. Raises
    ValueError."""
    try:
        stored = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the vocabulary '{file}': {error}") from None
    vocabulary = dict(zip(stored, range(len(stored)), strict=True)) if _characters(stored) else stored
    good = isinstance(vocabulary, dict) and _characters(list(vocabulary))
    if not good or not all(type(index) is int and index >= 0 for index in vocabulary.values()):
        raise ValueError(f"the vocabulary '{file}' must be a JSON object {{character: id}} or a list of characters")
    return vocabulary


def encode(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Return one id per character. Raises ValueError, naming characters that the vocabulary lacks."""
    unknown = sorted(set(text) - set(vocabulary))
    if unknown:
        shown = ", ".join(repr(character) for character in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ValueError(f"the text has {len(unknown)} characters that the vocabulary lacks: {shown}")
    return [vocabulary[character] for character in text]


def part(text: str, split: str) -> str:
    """Return a split: `train` is the first 90 % of the characters, `validation` the rest. Raises ValueError for
    others."""
    if split not in SPLITS:
        raise ValueError(f"a text has no split '{split}'; {choose_from(split, SPLITS)}")
    cut = int(0.9 * len(text))
    return {"train": text[:cut], "validation": text[cut:], "all": text}[split]


def sequences(ids: list[int], context: int) -> list[list[int]]:
    """Return consecutive sequences of `context` ids, without a shorter rest. Raises ValueError if there are none."""
    if len(ids) < context:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one sequence of {context}")
    return [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]


def _characters(stored: object) -> bool:
    return isinstance(stored, list) and all(isinstance(one, str) and len(one) == 1 for one in stored)
