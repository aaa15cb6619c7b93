# SPDX-License-Identifier: Apache-2.0
"""How much memory this process has used at most."""

from __future__ import annotations

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
