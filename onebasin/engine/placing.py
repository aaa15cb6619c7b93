# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all, several of them together.

Each output is written to a hidden folder beside its final path, `.NAME.PID-HEX`, flushed to the disk, and renamed. The
folder is locked as long as its process lives (the kernel releases a flock with its process), so a later run can tell
the leftovers of a killed one and remove them. On file systems without locks nothing is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from .filesystem import ASIDE, flush, identity_of, is_at, missing_parents, real, remove, rename, swap, take_lock


class Appeared(ValueError):
    """The path of an output was free when the command began, and is now taken."""


@dataclass
class _Staged:
    """An output that is being written.

    content: becomes `out`; `folder` itself or a file in it. marker: a folder that holds a file of this name may be
    replaced; "": a file may be replaced; None: nothing may. made: parents of `out` that did not exist.
    """

    out: Path
    folder: Path
    content: Path
    marker: str | None
    lock: int | None
    made: list[Path]
    swapped: bool = False


class Placing:
    """Files and folders that all appear when the block ends, or not at all if it fails.

    The one that was requested first appears last: the others belong to it.

    Args:
        journal: File that lists the outputs before the first of them appears; `placed_by` reads it.
        raised: Type of the error that a failed write raises, with a message of one sentence.

    Raises:
        Appeared: The path of an output was taken meanwhile. The outputs are kept under other names, which the message
            lists.
    """

    def __init__(self, journal: Path | None = None, raised: type[Exception] = OSError) -> None:
        self.journal, self.raised = journal, raised
        self._staged: list[_Staged] = []

    def folder(self, out: Path, marker: str | None = None) -> Path:
        """Return an empty hidden folder, which becomes `out`. If `out` is a folder that holds a file of the name
        `marker`, it is replaced."""
        return self._stage(out, marker, "").content

    def file(self, out: Path, replace: bool = False) -> Path:
        """Return a path to write to, which becomes the file `out`."""
        return self._stage(out, "" if replace else None, out.name).content

    def _stage(self, out: Path, marker: str | None, name: str) -> _Staged:
        out, made = real(out), missing_parents(real(out))
        tidy(out)
        with clearly(out, "it", self.raised):
            out.parent.mkdir(parents=True, exist_ok=True)
            folder, lock = _hidden_folder(out)
        self._staged.append(_Staged(out, folder, folder / name, marker, lock, made))
        return self._staged[-1]

    def __enter__(self) -> Placing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._install()
        except BaseException:
            kind = BaseException
            raise
        finally:
            for one in self._staged:
                remove(one.folder)
                for parent in one.made if kind is not None else []:
                    with suppress(OSError):
                        parent.rmdir()
                if one.lock is not None:
                    os.close(one.lock)
            self._staged.clear()

    def _install(self) -> None:
        if not self._staged:
            return
        with clearly(self._staged[0].out, "it", self.raised):
            for one in self._staged:
                if one.content.is_file():
                    one.content.chmod(one.folder.stat().st_mode & 0o666)  # safetensors writes 0600
                flush(one.content)
            if self.journal is not None and self.journal.parent.is_dir():
                noted = [[str(one.out), *identity_of(one.content)] for one in self._staged]
                self.journal.write_text(json.dumps(noted), "utf-8")
                flush(self.journal)
                flush(self.journal.parent, deep=False)
            done: list[_Staged] = []
            try:
                for one in reversed(self._staged):
                    _put(one)
                    done.append(one)
                    flush(one.out.parent, deep=False)
            except BaseException as error:
                for one in reversed(done):
                    swap(one.content, one.out) if one.swapped else os.rename(one.out, one.content)
                if isinstance(error, Appeared):
                    raise Appeared(f"{error}; what was written is kept: {', '.join(map(str, self._kept()))}") from None
                raise

    def _kept(self) -> Iterator[Path]:
        """Rename the outputs to `NAME-1`, or the next name that is free."""
        for one in self._staged:
            stem, suffix = (one.out.name, "") if one.content.is_dir() else (one.out.stem, one.out.suffix)
            for number in count(1):
                place = one.out.with_name(f"{stem}-{number}{suffix}")
                with suppress(FileExistsError):
                    rename(one.content, place)
                    yield place
                    break


@contextmanager
def appearing_file(out: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes or replaces the file `out` when the block ends without an error."""
    with Placing() as placing:
        yield placing.file(out, replace=True)


def appearing_text(out: Path, text: str) -> None:
    """Write or replace a text file in UTF-8, which appears whole or not at all."""
    with appearing_file(out) as temporary:
        temporary.write_text(text, "utf-8")


def appearing_json(out: Path, value: Any) -> None:
    """Write or replace a JSON file, which appears whole or not at all."""
    appearing_text(out, json.dumps(value, indent=2) + "\n")


def placed_by(journal: Path) -> set[Path]:
    """Return the outputs that a killed run listed in its journal and that are still there, unchanged."""
    try:
        noted = json.loads(journal.read_text("utf-8"))
        return {Path(out) for out, *identity in noted if os.path.lexists(out) and identity == identity_of(Path(out))}
    except (OSError, ValueError, TypeError):
        return set()


def tidy(out: Path) -> None:
    """Remove what killed runs with this output have left beside it, and restore what one of them had moved aside."""
    stem = f".{short(out)}."
    with suppress(OSError):
        for path in sorted(out.parent.glob(f"{escape(stem)}*-*")):
            if not re.fullmatch(rf"\d+-[0-9a-f]{{8}}({re.escape(ASIDE)})?", path.name[len(stem) :]):
                continue
            with suppress(OSError):
                lock = take_lock(path)  # BlockingIOError: its process lives
                if path.name.endswith(ASIDE) and not os.path.lexists(out):
                    os.rename(path, out)
                elif lock is not None:
                    remove(path)
                if lock is not None:
                    os.close(lock)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder, which is created if it is missing, while the block runs.

    Raises:
        ValueError: Another living process holds the lock.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(folder)
        except FileNotFoundError:  # the run that held it has just removed it
            continue
        except BlockingIOError:
            raise ValueError(f"another run is using '{folder}'; wait for it, or choose another output") from None
        if lock is None or is_at(lock, folder):
            break
        os.close(lock)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def hidden(out: Path, ending: str) -> Path:
    """Return the path of a hidden file or folder beside `out`."""
    return out.with_name(f".{short(out)}.{ending}")


def short(out: Path) -> str:
    """Return the name of a path, cut so that a suffix does not make it too long for the file system."""
    name = os.fsencode(out.name)
    if len(name) <= 200:
        return out.name
    return f"{name[:180].decode('utf-8', 'ignore')}-{hashlib.sha256(name).hexdigest()[:8]}"


@contextmanager
def clearly(
    out: Path, what: str, raised: type[Exception] = OSError, kinds: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Report a failed write in one clear sentence.

    Args:
        out: Path that is written to.
        what: What is written, for the message.
        raised: Type of the error to raise.
        kinds: Errors that mean a failed write, besides OSError and SafetensorError.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError, *kinds)):
            raise
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "(os error 28)" in str(error)
        if full:
            raise raised(f"the disk is full: '{out.parent}' has no room for {what}") from None
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise raised(f"cannot write '{out}': {reason}") from None


def said(error: Exception) -> str:
    """Return the message of an error, without the error number of an OSError."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"'{error.filename}': {error.strerror}"
    return str(error)


def _put(one: _Staged) -> None:
    taken = Appeared(f"'{one.out}' appeared while this command ran, and is not overwritten")
    if one.marker is not None and os.path.lexists(one.out):
        if not replaceable(one.out, one.marker):
            raise taken
        swap(one.content, one.out)
        one.swapped = True
        return
    try:
        rename(one.content, one.out)
    except FileExistsError:
        raise taken from None


def replaceable(out: Path, marker: str) -> bool:
    """Return whether `Placing` may replace `out`: a folder that is empty or holds a file `marker`, or, where the marker
    is "", a file."""
    if not marker:
        return out.is_file()
    return out.is_dir() and ((out / marker).is_file() or not any(out.iterdir()))


def _hidden_folder(out: Path) -> tuple[Path, int | None]:
    while True:
        folder = hidden(out, f"{os.getpid()}-{secrets.token_hex(4)}")
        folder.mkdir()
        try:
            lock = take_lock(folder)
        except (BlockingIOError, FileNotFoundError):  # another run took it for a leftover before it was locked
            continue
        if lock is None or is_at(lock, folder):
            return folder, lock
        os.close(lock)
