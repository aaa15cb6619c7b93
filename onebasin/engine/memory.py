# SPDX-License-Identifier: Apache-2.0
"""How much memory this process has used at most."""

from __future__ import annotations

import platform
import resource
from pathlib import Path


def peak_memory() -> int:
    """The largest resident set so far, in bytes."""
    status = Path("/proc/self/status")  # Linux, where `getrusage` starts from what the parent had
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text("utf-8").splitlines() if "VmHWM" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
