# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for others sleep soon, so that commands are not slowed by programs beside them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def spins(**given: str) -> str:
    """What the program sets, by the time that torch is imported."""
    program = """
import os, sys
class Reader:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Reader())
from onebasin.__main__ import main
main()
"""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", program, "inspect", os.devnull]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={**kept, **given}).stdout.strip()


def test_they_spin_for_a_moment() -> None:
    """Some thousand looks at most, each a few processor cycles."""
    assert 0 < int(spins()) <= 10_000


@pytest.mark.parametrize(("given", "set_to"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")])
def test_what_the_user_sets_counts(given: dict[str, str], set_to: str) -> None:
    assert spins(**given) == set_to
