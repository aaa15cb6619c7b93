# SPDX-License-Identifier: Apache-2.0
"""Results of finished units as small files, from which a killed run can resume, and a cache for later commands."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .filesystem import flush, missing_parents, remove
from .placing import clearly, owned

Write = Callable[[Path], object]


class Store:
    """Files for the results of units.

    Args:
        folder: Created with the first result.
        inputs: Text that describes what the results depend on. It is hashed together with each unit's name, so that
            results of other inputs are never found.
    """

    def __init__(self, folder: Path, inputs: str) -> None:
        self.folder, self.inputs = folder, inputs

    def find(self, unit: str) -> Path | None:
        """Return the file of a finished unit, or None."""
        path = self._path(unit)
        return path if path.is_file() else None

    def put(self, unit: str, write: Write) -> None:
        """Store what `write` writes to the path that it is given. A killed process leaves no partial file.

        Raises:
            OSError: The file cannot be written.
        """
        path = self._path(unit)
        temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        with clearly(self.folder, "what is finished"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                flush(temporary)  # or a power cut could leave an empty file of that name
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _path(self, unit: str) -> Path:
        return self.folder / hashlib.sha256(f"{self.inputs}\n{unit}".encode()).hexdigest()[:32]


class Cache:
    """A cache of JSON objects in the user's cache folder: `ONEBASIN_CACHE`, or `onebasin` in `XDG_CACHE_HOME` or
    `~/.cache`.

    If `ONEBASIN_CACHE` is empty or the folder cannot be used, nothing is cached. That is no error: everything in it can
    be computed again.

    Args:
        inputs: As in `Store`.
    """

    def __init__(self, inputs: str) -> None:
        self.inputs = inputs

    def find(self, unit: str) -> dict[str, Any] | None:
        """Return the cached object of a unit; None if there is none or its file is damaged."""
        with suppress(OSError, ValueError, RecursionError):
            if (store := self._store()) and (file := store.find(unit)):
                said, text = file.read_text("utf-8").split("\n", 1)
                if said == hashlib.sha256(text.encode()).hexdigest():
                    facts: dict[str, Any] = json.loads(text)
                    return facts
        return None

    def put(self, unit: str, facts: dict[str, Any]) -> None:
        """Cache the object of a unit."""
        text = json.dumps(facts)
        content = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"
        with suppress(OSError):
            if store := self._store():
                store.put(unit, lambda file: file.write_text(content, "utf-8"))

    def _store(self) -> Store | None:
        place = os.environ.get("ONEBASIN_CACHE")
        if place is None:
            try:
                place = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onebasin")
            except RuntimeError:  # there is no home folder
                return None
        return Store(Path(place), self.inputs) if place else None


@contextmanager
def kept(folder: Path, resume: bool, *, through_errors: bool = False) -> Iterator[Path]:
    """Yield a folder for results, which is removed when the block ends.

    The folder stays, unless it is empty, if the process is killed or interrupted, or if the block raises any error but
    ValueError: bad input would fail again. After a ValueError it stays if it held results before the block.

    Args:
        folder: Created if it is missing.
        resume: Use the results that are in the folder; otherwise they are removed first.
        through_errors: Keep the folder after a ValueError, too.

    Raises:
        ValueError: Another living process uses the folder.
    """
    made = missing_parents(folder)
    with owned(folder):
        if not resume:
            for path in folder.iterdir():
                remove(path)
        before = any(folder.iterdir())
        try:
            yield folder
        except BaseException as error:
            refused = isinstance(error, ValueError) and not isinstance(error, OSError)
            if not any(folder.iterdir()) or (refused and not (before or through_errors)):
                discard(folder, made)
            elif isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt("what was done is kept: continue with --resume") from None
            raise
        remove(folder)


def discard(folder: Path, made: Iterable[Path]) -> None:
    """Remove a folder, and those of the parents `made` for it that are then empty."""
    remove(folder)
    for parent in made:
        with suppress(OSError):
            parent.rmdir()
