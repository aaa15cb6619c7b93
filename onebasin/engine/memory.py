# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process, memory that the machine has left, and freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def peak_memory() -> int:
    """Return the largest resident set so far, in bytes; 0 where it is unknown (Windows)."""
    status = Path("/proc/self/status")  # Linux, where `getrusage` would count the parent's memory
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text("utf-8").splitlines() if "VmHWM" in line)
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


KEPT = 64 << 20  # bytes by which a process may grow before freed memory is returned
OFTEN = 0.01  # seconds between two looks at it; many a unit of work is shorter than a look
_least = 0  # bytes it had when this was last done, or fewer since
_looked = 0.0  # seconds on the clock of `time.monotonic`


def return_freed() -> None:
    """Return freed memory to the system if this process has grown by more than `KEPT` since the last time.

    The GNU C library keeps freed blocks of up to 32 MB, but puts an aligned block, as every tensor is, only into a
    larger one. What it keeps becomes more and more. With other libraries, nothing is done.
    """
    global _least, _looked
    if (trim := _trim()) is None or time.monotonic() < _looked + OFTEN:
        return
    _looked = time.monotonic()
    if (now := _in_use()) > _least + KEPT:
        trim(ctypes.c_size_t(0))
        _least = _in_use()
    else:
        _least = min(_least, now)


@cache
def _trim() -> Callable[[ctypes.c_size_t], int] | None:
    """Return the function of the GNU C library, None with others."""
    if not Path("/proc/self/statm").exists():
        return None
    found: Callable[[ctypes.c_size_t], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def _in_use() -> int:
    """Return the bytes in memory that no file holds."""
    resident, of_files = map(int, Path("/proc/self/statm").read_text("utf-8").split()[1:3])
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int | None:
    """Return how many bytes programs can still allocate; None where that is unknown."""
    facts = Path("/proc/meminfo")  # Linux, where MemAvailable includes reclaimable caches
    if facts.exists():
        return 1024 * next(int(line.split()[1]) for line in facts.read_text("utf-8").splitlines() if "MemAvail" in line)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return None
