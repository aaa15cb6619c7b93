# SPDX-License-Identifier: Apache-2.0
"""Results of finished units as small files, so that a run that was killed can go on where it stopped."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Write = Callable[[Path], None]


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
        """Keep what `write` writes to the path that it is given; a killed process leaves no half of it."""
        path = self._path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        try:
            write(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, unit: str) -> Path:
        return self.folder / hashlib.sha256(f"{self.inputs}\n{unit}".encode()).hexdigest()[:32]


@contextmanager
def kept(folder: Path, resume: bool, *, through_errors: bool = False) -> Iterator[Path]:
    """A folder for results: with `resume` what is there is used, else it is removed first. It goes away with the end of
    the block or an error; a process that is killed or interrupted leaves it, and so does an error where
    `through_errors` says so and the folder holds anything."""
    made = missing_parents(folder)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    except Exception:
        if not (through_errors and folder.is_dir() and any(folder.iterdir())):
            discard(folder, made)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def missing_parents(folder: Path) -> list[Path]:
    """The folders that would have to be made for `folder`, innermost first."""
    return [parent for parent in folder.parents if not parent.exists()]


def discard(folder: Path, made: Iterable[Path]) -> None:
    """Remove a folder, and the parents that were `made` for it where nothing else is in them."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in made:
        with suppress(OSError):
            parent.rmdir()
