# SPDX-License-Identifier: Apache-2.0
"""File systems: atomic renames and swaps, locks, and flushes to the disk.

Without renameat2 (anywhere but Linux) a folder is replaced in two steps; see `swap`. Without flock (Windows, some
network file systems) nothing is locked.
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
ASIDE = ".old"  # suffix of a folder that is being replaced


def real(path: str | Path) -> Path:
    """Return the absolute path with all links resolved."""
    return Path(os.path.realpath(path))


def missing_parents(path: Path) -> list[Path]:
    """Return the parent folders of `path` that do not exist, innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def remove(path: Path) -> None:
    """Remove a file or a folder; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path, deep: bool = True) -> None:
    """Flush a file, or a folder's entries, to the disk, so that they survive a power cut.

    Windows cannot open folders; it keeps their entries in its journal.

    Args:
        path: The file or folder.
        deep: Flush the files in a folder, too.
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # this file system cannot flush
            raise
    finally:
        os.close(opened)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, without replacing anything.

    Without renameat2: on Windows `os.rename` refuses any existing target. On POSIX it refuses a folder that is not
    empty, and replaces an empty one, which loses nothing; a file is linked to its new name before the old one is
    removed.

    Raises:
        FileExistsError: `new` exists.
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
    """Exchange two folders, or two files.

    On Linux this is one step (renameat2). Elsewhere a file is replaced in one step; a folder is moved aside first, and
    if the process is killed just then, `tidy` moves it back.
    """
    if _renameat2(one, other, _EXCHANGE):
        return
    aside = one.with_name(one.name + ASIDE)
    if not other.is_dir():
        shutil.copy2(other, aside)
        os.replace(one, other)
    else:
        lock = None
        with suppress(BlockingIOError):
            lock = take_lock(other)  # so that no other run takes it for a leftover
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
    """Rename in one step, as the flag says. Return False if the system or the file system does not support it."""
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
    """Lock a file or folder.

    Returns:
        A file descriptor; closing it releases the lock. None where the file system has no locks.

    Raises:
        BlockingIOError: Another process holds the lock.
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
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except FileNotFoundError:
        return False


def identity_of(path: Path) -> list[int]:
    """Return numbers that identify a file or folder until an entry in it is created, removed or renamed."""
    stat = path.stat()
    return [stat.st_ino, stat.st_mtime_ns]
