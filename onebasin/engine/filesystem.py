# SPDX-License-Identifier: Apache-2.0
"""File systems: names that are given and swapped in one step, locks, and flushes to the disk.

Where there is no renameat2 (all but Linux) a folder is replaced in two steps; see `swap`. Where there is no flock
(Windows, some network file systems) nothing is locked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2
ASIDE = ".old"  # ending of a folder's name while another takes its place


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


def rename(old: Path, new: Path) -> None:
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


def swap(one: Path, other: Path) -> None:
    """Let two folders, or two files, change places. One step on Linux (renameat2). Else a file is replaced in one step;
    a folder is moved aside first, to where `tidy` puts it back from if the process is killed just then."""
    if _renameat2(one, other, _EXCHANGE):
        return
    aside = one.with_name(one.name + ASIDE)
    if not other.is_dir():
        shutil.copy2(other, aside)
        os.replace(one, other)
    else:
        lock = None
        with suppress(BlockingIOError):
            lock = take_lock(other)  # so that nobody takes it for a dead run's
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


def take_lock(path: Path) -> int | None:
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


def is_at(opened: int, path: Path) -> bool:
    """Return whether an open file is the one that stands at a path."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except FileNotFoundError:
        return False


def identity_of(path: Path) -> list[int]:
    """Return what identifies a file or folder, as long as nothing in it is made, removed or renamed."""
    stat = path.stat()
    return [stat.st_ino, stat.st_mtime_ns]
