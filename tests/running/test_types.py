# SPDX-License-Identifier: Apache-2.0
"""What docs/families.json calls exact is: other types every day, all of them within about six weeks."""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path

import pytest
import transformers

from onebasin.running import inference

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "families.json").read_text("utf-8"))
EXACT = sorted(kind for kind, found in RECORD["types"].items() if found["exact"] and "departure" in found)
A_DAY = 14  # some take a minute
DAYS = -(-len(EXACT) // A_DAY)
ROUND, TODAY = divmod(date.today().toordinal(), DAYS)


def turn(kind: str) -> float:
    """Another order in every round of so many days, one slice of which is a day's."""
    return random.Random(f"{ROUND} {kind}").random()


@pytest.mark.skipif(transformers.__version__ != RECORD["transformers"], reason="another release has other types")
@pytest.mark.parametrize("kind", sorted(EXACT, key=turn)[TODAY::DAYS])
def test_a_type_is_exact(kind: str) -> None:
    assert inference.infer(kind).facts["departure"] < 1e-9
