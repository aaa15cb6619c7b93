# SPDX-License-Identifier: Apache-2.0
"""The first cases of the campaign (`make fuzz`), of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_nothing_that_must_not_happen() -> None:
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fuzz", "--cases", "16", "--workers", "1"]
    done = subprocess.run(command, env=paths, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
