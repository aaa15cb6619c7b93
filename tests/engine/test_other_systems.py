# SPDX-License-Identifier: Apache-2.0
"""What is promised of outputs holds where the means of Linux are missing, hidden by `other_systems/sitecustomize.py`.

This is no run on those systems; the workflow makes those.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PLACING, WRITING = TESTS / "engine" / "test_placing.py", TESTS / "checkpoint" / "test_writer.py"
COMMANDS = TESTS / "cli" / "test_places_of_outputs.py"
# Of what a killed run leaves, nobody can tell it from a living one's where there are no locks.
CHOSEN = "not the_dead_left and (test_placing or overwrit or kill or exchange or full or replaced or refusal)"


def run(system: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS / "other_systems"), str(TESTS.parent), *sys.path])
    how = {**os.environ, "OTHER_SYSTEM": system, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], env=how, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("system", ["macos", "windows"])
def test_what_is_hidden(system: str) -> None:
    """Else the tests below would show nothing."""
    script = """
import importlib.util, os
from onebasin.engine import placing
print(placing._renameat2(placing.Path("/no"), placing.Path("/nor"), 1), hasattr(os, "sched_setscheduler"))
print(placing.fcntl is None, __import__("onebasin.engine").engine.peak_memory() > 0)
"""
    found = run(system, "-c", script)
    assert found.returncode == 0, found.stderr
    rest = {"macos": ["False", "True"], "windows": ["True", "False"]}
    assert found.stdout.split() == ["False", "False", *rest[system]]


def test_outputs(tmp_path: Path) -> None:
    """On Windows, which lacks the most; `plain` in test_placing.py and `bare` in kills.py hide renameat2 alone."""
    words = ["-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    found = run("windows", *words, "-k", CHOSEN, *map(str, (PLACING, WRITING, COMMANDS)))
    assert found.returncode == 0, found.stdout[-5000:]
