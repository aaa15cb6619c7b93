# SPDX-License-Identifier: Apache-2.0
"""The sweep over all types: each has so many seconds of computing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onebasin.models import ModelError
from onebasin.running import inference

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


def test_a_type_with_a_table_is_exact_only_if_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise ModelError(f"no tiny '{kind}' runs")

    monkeypatch.setattr(inference, "infer", refuse)
    assert families.one("llama") == {"source": "table", "exact": False, "reason": "no tiny 'llama' runs"}
