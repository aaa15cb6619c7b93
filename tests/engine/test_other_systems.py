# SPDX-License-Identifier: Apache-2.0
"""The package loads and writes where the means of Linux are missing, hidden by `other_systems/sitecustomize.py`.

This is no run on those systems; the workflow makes those. What is promised of outputs is tested beside the code that
keeps it, by tests that take the fixture `system`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = """
import os, sys
from pathlib import Path
from onebasin.engine import filesystem, memory, peak_memory, placing
out = Path(sys.argv[1])
for text in ("old", "new"):
    with placing.Placing() as one:
        (one.folder(out, "mark") / "mark").write_text(text)
assert (out / "mark").read_text() == "new" and os.listdir(out.parent) == [out.name]
print(filesystem._renameat2(Path("/no"), Path("/nor"), 1), hasattr(os, "sched_setscheduler"))
print(filesystem.fcntl is None, memory.resource is None, peak_memory() > 0)
"""


@pytest.mark.parametrize(
    ("system", "found"), [("macos", "False False False False True"), ("windows", "False False True True False")]
)
def test_what_a_system_lacks_is_done_without(system: str, found: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(TESTS / "other_systems"), str(TESTS.parent), *sys.path])
    how = {**os.environ, "OTHER_SYSTEM": system, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-c", SCRIPT, str(tmp_path / "out")]
    done = subprocess.run(script, env=how, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == found.split()
