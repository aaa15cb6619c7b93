# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process, and memory that the machine has left."""

from __future__ import annotations

import os
import platform
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


def available_memory() -> int | None:
    """Return how many bytes programs can still allocate; None where that is unknown."""
    facts = Path("/proc/meminfo")  # Linux, where MemAvailable includes reclaimable caches
    if facts.exists():
        return 1024 * next(int(line.split()[1]) for line in facts.read_text("utf-8").splitlines() if "MemAvail" in line)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return None
