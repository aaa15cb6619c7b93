# SPDX-License-Identifier: Apache-2.0
"""What other systems lack, hidden from every Python process that has this folder on its path.

OTHER_SYSTEM=macos: renameat2, the scheduler's policies and /proc/self/status. windows: resource and fcntl, too,
from our own modules.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import pathlib
from typing import Any

hidden = os.environ.get("OTHER_SYSTEM", "")
if hidden:
    library = ctypes.CDLL

    class Library(library):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name == "renameat2":
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]
    for name in ("sched_setscheduler", "sched_param", "SCHED_IDLE", "SCHED_OTHER"):
        delattr(os, name)
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda self, **how: str(self) != "/proc/self/status" and exists(self, **how)  # type: ignore
if hidden == "windows":
    found = builtins.__import__

    def without(name: str, scope: Any = None, *rest: Any, **more: Any) -> Any:
        if name in ("resource", "fcntl") and str((scope or {}).get("__name__")).startswith("onebasin"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return found(name, scope, *rest, **more)

    builtins.__import__ = without  # libraries choose their modules by the system's name, and need them here
