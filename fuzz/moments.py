# SPDX-License-Identifier: Apache-2.0
"""The moments at which a process changes the disk, and what can befall it there.

Python announces opens, renames, links and removals to audit hooks, the lookup of `renameat2` among them; syncs and
writes are counted where Python makes them. What native code writes by itself has a moment before and none within.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

# What happens at a moment: a rename, a sync, the opening of a file to be written, a piece of it, a removal, a folder.
RENAME, SYNC, OPEN, WRITE, REMOVE, FOLDER = "rename", "sync", "open", "write", "remove", "folder"
EVENTS = {"os.rename": RENAME, "os.link": RENAME, "os.symlink": RENAME, "os.mkdir": FOLDER, "os.remove": REMOVE,
          "os.rmdir": REMOVE, "os.truncate": WRITE}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Act = Callable[[str], None]


class Watch:
    """Count every moment under `room`, and do `act` at the one of number `at`.

    It cannot be taken off again: for a process of its own.
    """

    def __init__(self, room: Path, at: int = -1, act: Act | None = None) -> None:
        self.room, self.at, self.act = os.fsencode(room), at, act
        self.seen: list[str] = []
        self._lock = threading.RLock()
        self._busy = False
        _wrap(self)
        sys.addaudithook(self._hear)

    def moment(self, what: str) -> None:
        """Note one, before it happens."""
        with self._lock:
            if self._busy:
                return
            number = len(self.seen)
            self.seen.append(what)
            if number != self.at or self.act is None:
                return
            self._busy = True  # what is done then has no moments
            try:
                self.act(what)
            finally:
                self._busy = False

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(path, int) and flags & WRITES and self._here(path):
                self.moment(OPEN)
        elif event == "ctypes.dlsym" and args[1] == "renameat2":
            self.moment(RENAME)
        elif event in EVENTS and (self._here(args[0]) or (event in ("os.remove", "os.rmdir") and args[1] != -1)):
            self.moment(EVENTS[event])

    def _here(self, path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsencode(path)).startswith(self.room)


def full(_: str) -> None:
    """What a full disk does to whoever writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")


def die(_: str) -> None:
    """What the out-of-memory killer does."""
    os.kill(os.getpid(), 9)


def _wrap(watch: Watch) -> None:
    """Have every sync, and every piece that goes to a file, counted."""
    plain_open = io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> int | None:
            if watch._here(str(self.name)):
                watch.moment(WRITE)
            return super().write(data)

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if not set(mode) & set("wax+") or isinstance(file, int) or buffering == 0:
            return plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Raw(os.fspath(file), "".join(letter for letter in mode if letter not in "bt"), closefd, opener)
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    builtins.open = io.open = opened  # type: ignore[assignment]

    def counted(what: str, function: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            watch.moment(what)
            return function(*args, **options)

        return wrapped

    for owner, name, what in (
        (os, "fsync", SYNC), (os, "fdatasync", SYNC), (os, "sendfile", WRITE), (os, "copy_file_range", WRITE),
        (safetensors.torch, "serialize_file", OPEN), (safetensors.torch, "save_file", OPEN),
    ):  # fmt: skip
        if hasattr(owner, name):
            setattr(owner, name, counted(what, getattr(owner, name)))
