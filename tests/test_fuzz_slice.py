# SPDX-License-Identifier: Apache-2.0
"""The first cases of the campaign (`make fuzz`), of every kind: a minute of its twenty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "kinds, cases",
    [
        (["header", "shards", "config", "pickle", "links", "tokenizer", "files"], 30),
        (["family", "kill", "full", "writers"], 16),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_nothing_that_must_not_happen(kinds: list[str], cases: int) -> None:
    chosen = [word for kind in kinds for word in ("--only", kind)]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fuzz", "--cases", str(cases), "--workers", "1", *chosen]
    done = subprocess.run(command, env=paths, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
