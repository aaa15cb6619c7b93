# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_every_job_runs_on_a_device_of_its_own() -> None:
    pytest.importorskip("elsewhere", reason="torch without devices written in Python", exc_type=ImportError)
    jobs = Path(__file__).with_name("on_a_device.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
