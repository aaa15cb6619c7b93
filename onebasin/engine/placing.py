# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all, several of them together.

Each is written in a hidden folder beside its place, `.NAME.PID-HEX`, flushed to the disk, and renamed. The folder is
locked as long as its process lives (flock, which the kernel lets go with the process), so that another run can tell
what a killed one has left, and remove it. Where there is no flock (Windows, some network file systems) nothing is
removed. Where there is no renameat2 (all but Linux) a folder is replaced in two steps; see `_swap`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from itertools import count
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2
_ASIDE = ".old"


class Appeared(ValueError):
    """Something stands where an output should go, and did not when the command began."""


@dataclass
class _Staged:
    """content: what becomes `out`, `folder` itself or a file in it. marker: the file by which a folder is known that
    may be replaced; `""`: a file may be replaced; None: nothing may."""

    out: Path
    folder: Path
    content: Path
    marker: str | None
    lock: int | None
    made: list[Path]
    swapped: bool = False


class Placing:
    """Files and folders that take their places together when the block ends, or not at all where it fails.

    The first one asked for appears last: it is what the others belong to. journal: a file in which their places are
    noted before the first of them appears; `placed_by` reads it. raised: what a failed write raises, in one sentence.

    Raises Appeared where something has come to stand in a place since; what was written is kept under other names then,
    which the message tells.
    """

    def __init__(self, journal: Path | None = None, raised: type[Exception] = OSError) -> None:
        self.journal, self.raised = journal, raised
        self._staged: list[_Staged] = []

    def folder(self, out: Path, marker: str | None = None) -> Path:
        """An empty hidden folder, which becomes `out`; one that holds a file `marker` is replaced."""
        return self._stage(out, marker, "").content

    def file(self, out: Path, replace: bool = False) -> Path:
        """A path to write to, which becomes the file `out`."""
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
                noted = [[str(one.out), *_identity(one.content)] for one in self._staged]
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
                    _swap(one.content, one.out) if one.swapped else os.rename(one.out, one.content)
                if isinstance(error, Appeared):
                    raise Appeared(f"{error}; what was written is kept: {', '.join(map(str, self._kept()))}") from None
                raise

    def _kept(self) -> Iterator[Path]:
        """Give what was written other names: `NAME-1`, or the next that is free."""
        for one in self._staged:
            stem, suffix = (one.out.name, "") if one.content.is_dir() else (one.out.stem, one.out.suffix)
            for number in count(1):
                place = one.out.with_name(f"{stem}-{number}{suffix}")
                with suppress(FileExistsError):
                    _rename(one.content, place)
                    yield place
                    break


@contextmanager
def appearing_file(out: Path) -> Iterator[Path]:
    """A path to write to, which becomes the file `out`, or replaces it, when the block ends without an error."""
    with Placing() as placing:
        yield placing.file(out, replace=True)


def appearing_text(out: Path, text: str) -> None:
    """Write a text file in UTF-8, which appears whole or not at all, and replaces what stood there."""
    with appearing_file(out) as temporary:
        temporary.write_text(text, "utf-8")


def placed_by(journal: Path) -> set[Path]:
    """The places in which what a killed run put there still stands, unchanged."""
    try:
        noted = json.loads(journal.read_text("utf-8"))
        return {Path(out) for out, *identity in noted if os.path.lexists(out) and identity == _identity(Path(out))}
    except (OSError, ValueError, TypeError):
        return set()


def tidy(out: Path) -> None:
    """Remove what killed runs with this output have left beside it, and put back what one of them had moved aside."""
    stem = f".{short(out)}."
    with suppress(OSError):
        for path in sorted(out.parent.glob(f"{escape(stem)}*-*")):
            if not re.fullmatch(rf"\d+-[0-9a-f]{{8}}({re.escape(_ASIDE)})?", path.name[len(stem) :]):
                continue
            with suppress(OSError):
                lock = _lock(path)  # BlockingIOError: its process lives
                if path.name.endswith(_ASIDE) and not os.path.lexists(out):
                    os.rename(path, out)
                elif lock is not None:
                    remove(path)
                if lock is not None:
                    os.close(lock)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made where it is missing, for this process alone. Raises ValueError where another lives
    that holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = _lock(folder)
        except FileNotFoundError:  # its owner has just removed it
            continue
        except BlockingIOError:
            raise ValueError(f"another run is at work in '{folder}'; wait for it, or choose another output") from None
        if lock is None or _is_at(lock, folder):
            break
        os.close(lock)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def hidden(out: Path, ending: str) -> Path:
    """The path beside `out` of something hidden that belongs to it."""
    return out.with_name(f".{short(out)}.{ending}")


def short(out: Path) -> str:
    """The name of a path, cut where an ending would make it longer than file systems take."""
    name = os.fsencode(out.name)
    if len(name) <= 200:
        return out.name
    return f"{name[:180].decode('utf-8', 'ignore')}-{hashlib.sha256(name).hexdigest()[:8]}"


@contextmanager
def clearly(
    out: Path, what: str, raised: type[Exception] = OSError, kinds: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn a failed write into one clear sentence.

    Args:
        out: The place that was written to.
        what: What was written, for the message.
        raised: The kind of error to raise.
        kinds: Errors that mean a failed write, besides those of Python and safetensors.
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
    """Return what an error says; one of the system's without the number that the system has for it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"'{error.filename}': {error.strerror}"
    return str(error)


def real(path: str | Path) -> Path:
    """The absolute path behind all links."""
    return Path(os.path.realpath(path))


def missing_parents(path: Path) -> list[Path]:
    """The folders that would have to be made for `path`, innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def remove(path: Path) -> None:
    """Remove a file or a folder; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path, deep: bool = True) -> None:
    """Bring a file, or a folder's entries, to the disk; deep: with all files in it. A power cut then loses neither.

    Windows opens no folders and keeps their entries in its journal.
    """
    if deep and path.is_dir():
        for inner in path.iterdir():
            flush(inner)
    try:
        opened = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    except PermissionError:
        return
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has nothing to flush
            raise
    finally:
        os.close(opened)


def _put(one: _Staged) -> None:
    if one.marker is not None and os.path.lexists(one.out):
        if not replaceable(one.out, one.marker):
            raise Appeared(f"'{one.out}' came to be while this command ran, and is not overwritten")
        _swap(one.content, one.out)
        one.swapped = True
        return
    try:
        _rename(one.content, one.out)
    except FileExistsError:
        raise Appeared(f"'{one.out}' came to be while this command ran, and is not overwritten") from None


def replaceable(out: Path, marker: str) -> bool:
    """Whether what stands at `out` is of the kind that `Placing` replaces: a file, or a folder with a `marker`."""
    if not marker:
        return out.is_file()
    return out.is_dir() and ((out / marker).is_file() or not any(out.iterdir()))


def _rename(old: Path, new: Path) -> None:
    """Give a file or folder a name that is free. Raises FileExistsError where it is taken.

    Without renameat2, `rename` itself refuses a folder that holds something, and on Windows whatever exists; on POSIX
    an empty folder gives way, in which nothing is lost, and a file has a second name before it loses the first.
    """
    if _renameat2(old, new, _NOREPLACE):
        return
    if os.name != "posix":
        os.rename(old, new)
    elif old.is_dir():
        try:
            os.rename(old, new)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
            raise
    else:
        os.link(old, new)
        os.unlink(old)


def _swap(one: Path, other: Path) -> None:
    """Let two folders, or two files, change places. One step on Linux (renameat2). Else a file is replaced in one step;
    a folder is moved aside first, to where `tidy` puts it back from if the process is killed just then."""
    if _renameat2(one, other, _EXCHANGE):
        return
    aside = one.with_name(one.name + _ASIDE)
    if not other.is_dir():
        shutil.copy2(other, aside)
        os.replace(one, other)
    else:
        lock = None
        with suppress(BlockingIOError):
            lock = _lock(other)  # so that nobody takes it for a dead run's
        os.rename(other, aside)
        try:
            os.rename(one, other)
        except BaseException:
            os.rename(aside, other)
            raise
        finally:
            if lock is not None:
                os.close(lock)
    os.rename(aside, one)


def _renameat2(old: Path, new: Path, flag: int) -> bool:
    """Rename in one step, as the flag says. False where the system or the file system does not offer it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    here = -100  # AT_FDCWD
    if call is None:
        return False
    if call(here, os.fsencode(old), here, os.fsencode(new), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(new))


def _hidden_folder(out: Path) -> tuple[Path, int | None]:
    while True:
        folder = hidden(out, f"{os.getpid()}-{secrets.token_hex(4)}")
        folder.mkdir()
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):  # another run takes it for a leftover, before it is locked
            continue
        if lock is None or _is_at(lock, folder):
            return folder, lock
        os.close(lock)


def _lock(path: Path) -> int | None:
    """The descriptor that holds the lock on a file or folder until it is closed; None where there are no locks.

    Raises BlockingIOError where another process holds it.
    """
    if fcntl is None:
        return None
    opened = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise
    except OSError:
        os.close(opened)
        return None
    return opened


def _is_at(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except FileNotFoundError:
        return False


def _identity(path: Path) -> list[int]:
    """Return what identifies a file or folder, as long as nothing in it is made, removed or renamed."""
    stat = path.stat()
    return [stat.st_ino, stat.st_mtime_ns]
