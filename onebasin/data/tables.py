# SPDX-License-Identifier: Apache-2.0
"""Rows from other sources than text files: Parquet, image folders, folders of the `datasets` library, hub datasets.

Needs the extra `onebasin[data]`. No code that comes with a dataset is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from onebasin.settings import choose_from

Row = dict[str, Any]

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # written by `save_to_disk`
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner/name, or owner/name:configuration


class Class(NamedTuple):
    """A label of a dataset that gives its classes numbers and names."""

    number: int
    name: str


def table_kind(data: str | Path) -> str | None:
    """Return `parquet`, `images`, `datasets` or `hub`; None if it is not a table."""
    path = Path(data)
    if path.is_dir():
        return "datasets" if any((path / name).is_file() for name in SAVED) or not _classes(path) else "images"
    if path.suffix == ".parquet":
        return "parquet"
    return "hub" if HUB.fullmatch(str(data)) and not path.exists() and not path.suffix else None


def read_table(data: str | Path, split: str | None = None, limit: int | None = None) -> list[Row]:
    """Return the rows of a table. Classes with numbers and names become `Class`.

    Args:
        data: A table, or a folder of the `datasets` library.
        split: One of its splits, if it has any (default: the only one, else `test`, else `validation`).
        limit: Only this many rows, from the first on.

    Raises:
        ValueError: It cannot be read, or has no such split.
    """
    kind = table_kind(data)
    if kind == "images":
        return _images(Path(data), split, limit)
    if kind == "parquet":
        return _parquet(Path(data), split, limit)
    return _datasets(str(data), kind == "hub", split, limit)


def _parquet(path: Path, split: str | None, limit: int | None) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(_missing("Parquet files", "pyarrow")) from None
    if split not in (None, "all"):
        raise ValueError(f"'{path}' is taken whole; give the file of the split '{split}' instead")
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise ValueError(f"cannot read the data file '{path}': {' '.join(str(error).split())}") from None
    rows: list[Row] = (table if limit is None else table.slice(0, limit)).to_pylist()
    if not rows:
        raise ValueError(f"the data file '{path}' has no rows")
    return rows


def _classes(folder: Path) -> list[Path]:
    """Return the subfolders that hold images."""
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in inner if any(file.suffix.lower() in IMAGES for file in path.iterdir())]


def _images(folder: Path, split: str | None, limit: int | None) -> list[Row]:
    """Return the images of a folder with one subfolder per class, named by its label, in a fixed order in which classes
    take turns."""
    if split not in (None, "all"):
        raise ValueError(f"'{folder}' is taken whole; give the folder of the split '{split}' instead")
    piles = [
        [(f"{inner.name}/{file.name}", inner.name) for file in sorted(inner.iterdir()) if file.suffix.lower() in IMAGES]
        for inner in _classes(folder)
    ]
    longest = max(map(len, piles))
    turns = [pile[i] for i in range(longest) for pile in piles if i < len(pile)]
    return [{"image": image, "label": label} for image, label in turns[:limit]]


def _datasets(data: str, hub: bool, split: str | None, limit: int | None) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise ValueError(_missing(f"'{data}' is no file; datasets of the hub and their folders", "datasets")) from None
    name, _, config = data.partition(":") if hub else (data, "", "")
    saved = not hub and any((Path(data) / file).is_file() for file in SAVED)
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(data) if saved else datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises a dozen kinds of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot read the dataset '{data}': {reason}") from None
    if isinstance(found, dict):
        found = found[_split(data, list(found), split)]
    elif split not in (None, "all", "train"):
        raise ValueError(f"'{data}' is taken whole; give the dataset of the split '{split}' instead")
    part = found if limit is None else found.select(range(min(limit, len(found))))
    named = {column: _names(feature) for column, feature in found.features.items()}
    rows = [{column: named[column](value) for column, value in row.items()} for row in part]
    if not rows:
        raise ValueError(f"the dataset '{data}' has no rows")
    return rows


def _split(data: str, known: list[str], wanted: str | None) -> str:
    if wanted is None:
        wanted = next((name for name in ("test", "validation") if name in known), known[0])
    if wanted not in known:
        raise ValueError(f"'{data}' has no split '{wanted}'; {choose_from(wanted, known)}")
    return wanted


def _names(feature: Any) -> Callable[[Any], Any]:
    """Return a function that gives the numbered classes of a column their names, and leaves other values alone."""
    inner = getattr(feature, "feature", None)
    names = getattr(feature, "names", None) or getattr(inner, "names", None)

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(one) for one in value]
        return Class(value, names[value]) if type(value) is int and names and 0 <= value < len(names) else value

    return named


def _missing(what: str, package: str) -> str:
    return f"{what} need the package {package}: pip install 'onebasin[data]'"
