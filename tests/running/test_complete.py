# SPDX-License-Identifier: Apache-2.0
"""Whether what is inferred of a type is all there is, as `docs/families.json` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onebasin.studies.audit import audit_inferred
from onebasin.symmetry.audit.null_space import Audit

complete = pytest.importorskip("benchmarks.complete")


def test_what_is_inferred_of_phi_is_all_there_is() -> None:
    assert complete.audited("phi") == {"complete": True, "missing": 0}


def test_an_audit_that_finds_less_than_is_generated_is_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Audit(50, 50, 0, (1.0, 0.0), 37, 0.0)
    monkeypatch.setattr("onebasin.studies.audit.audit_inferred", lambda kind: found)
    with pytest.raises(ValueError, match="37 directions are generated, but only 0 count as flat"):
        complete.audited("bitnet")


def test_no_type_is_said_to_miss_less_than_nothing() -> None:
    types = json.loads(complete.FILE.read_text("utf-8"))["types"]
    assert all(one.get("missing", 0) >= 0 for one in types.values())


def test_types_are_counted_by_what_their_audits_say() -> None:
    types = {"a": {"complete": True}, "b": {"complete": False, "missing": 3}, "c": {"unaudited": "too large"}, "d": {}}
    assert complete.counts(types) == "1 of 2 audited types are complete; 1 could not be audited"


def test_the_docs_say_how_many_types_are_complete() -> None:
    docs = Path(complete.FILE).parent
    said = complete.counts(json.loads(complete.FILE.read_text("utf-8"))["types"])
    assert said in " ".join((docs / "inference.md").read_text("utf-8").split())


def test_gates_and_values_that_are_joined_take_their_own_part_of_a_constant() -> None:
    """The axes of GTE's gates are some of those of the values beside them, which took the gates' constants, too."""
    found = audit_inferred("gte")
    assert found.complete and found.largest_change < 1e-12
