# SPDX-License-Identifier: Apache-2.0
"""How much memory this process has used at most, and how much the machine has left."""

from __future__ import annotations

import os
import platform
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def peak_memory() -> int:
    """The largest resident set so far, in bytes; 0 where the system does not tell (Windows)."""
    status = Path("/proc/self/status")  # Linux, where `getrusage` starts from what the parent had
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text("utf-8").splitlines() if "VmHWM" in line)
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def available_memory() -> int | None:
    """Return the bytes that programs may still take; None where the system does not tell."""
    facts = Path("/proc/meminfo")  # Linux, which counts what its caches would give back
    if facts.exists():
        return 1024 * next(int(line.split()[1]) for line in facts.read_text("utf-8").splitlines() if "MemAvail" in line)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return None
