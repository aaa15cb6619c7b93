# SPDX-License-Identifier: Apache-2.0
"""Results of finished units as small files, so that a run that was killed can go on where it stopped, and facts that
later commands would find again."""

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
    """folder: made when the first result comes. inputs: text that says what results depend on; each unit's name is
    hashed together with it, so that results of other inputs are never found."""

    def __init__(self, folder: Path, inputs: str) -> None:
        self.folder, self.inputs = folder, inputs

    def find(self, unit: str) -> Path | None:
        """The file of a finished unit."""
        path = self._path(unit)
        return path if path.is_file() else None

    def put(self, unit: str, write: Write) -> None:
        """Keep what `write` writes to the path that it is given; a killed process leaves no half of it.

        Raises OSError with one clear sentence where it cannot be written.
        """
        path = self._path(unit)
        temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        with clearly(self.folder, "what is finished"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                flush(temporary)  # or a power cut could leave the name without the numbers
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _path(self, unit: str) -> Path:
        return self.folder / hashlib.sha256(f"{self.inputs}\n{unit}".encode()).hexdigest()[:32]


class Cache:
    """Facts (JSON objects) that outlive a command, in the user's cache folder: `ONEBASIN_CACHE`, or else `onebasin` in
    `XDG_CACHE_HOME` or `~/.cache`. Where `ONEBASIN_CACHE` is empty, or the folder cannot be used, nothing is kept, and
    nobody is told: all of it can be found again.

    inputs: as in `Store`.
    """

    def __init__(self, inputs: str) -> None:
        self.inputs = inputs

    def find(self, unit: str) -> dict[str, Any] | None:
        """Return what was kept of a unit; None where nothing was, or where its file is not as it was written."""
        with suppress(OSError, ValueError, RecursionError):
            if (store := self._store()) and (file := store.find(unit)):
                said, text = file.read_text("utf-8").split("\n", 1)
                if said == hashlib.sha256(text.encode()).hexdigest():
                    facts: dict[str, Any] = json.loads(text)
                    return facts
        return None

    def put(self, unit: str, facts: dict[str, Any]) -> None:
        """Keep the facts of a unit."""
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
            except RuntimeError:  # there is no home
                return None
        return Store(Path(place), self.inputs) if place else None


@contextmanager
def kept(folder: Path, resume: bool, *, through_errors: bool = False) -> Iterator[Path]:
    """Yield a folder for results, which is removed at the end of the block.

    A process that is killed or interrupted leaves the folder where it holds anything, and so does every error but a
    refusal (ValueError). A refusal leaves what was there before.

    resume: use what is there; else it is removed first. through_errors: leave everything after a refusal, too.

    Raises:
        ValueError: Another living process has the folder.
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
            raise
        remove(folder)


def discard(folder: Path, made: Iterable[Path]) -> None:
    """Remove a folder, and the parents that were `made` for it where nothing else is in them."""
    remove(folder)
    for parent in made:
        with suppress(OSError):
            parent.rmdir()
