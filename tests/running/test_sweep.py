# SPDX-License-Identifier: Apache-2.0
"""The sweep over all types: each has so many seconds of computing."""

from __future__ import annotations

import time
from typing import Any

import pytest

families = pytest.importorskip("benchmarks.families")


def waiting(kind: str) -> dict[str, Any]:
    time.sleep(float(kind))
    return {"exact": True}


def computing(kind: str) -> dict[str, Any]:
    while True:
        pass


def test_a_type_is_stopped_by_its_computing_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert families.tried("1.5", waiting, 1) == {"exact": True}
    assert families.tried("", computing, 1)["reason"] == "took over 1 s of computing"
    monkeypatch.setattr(families, "WALL", 1)
    assert families.tried("60", waiting)["reason"] == "took over 1 s by the clock"
