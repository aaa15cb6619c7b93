# SPDX-License-Identifier: Apache-2.0
"""What docs/families.json calls exact is: other types every day, all of them within a month, but for those of which it
says that they take long."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
import transformers

from onebasin.running import inference

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "families.json").read_text("utf-8"))
LONG = 4  # seconds on record; most types take one or two, a few whose twins keep all layers half a minute
EXACT = sorted(kind for kind, found in RECORD["types"].items() if found["exact"] and found.get("seconds", LONG) < LONG)
A_DAY, SECONDS = 100, 10
DAYS = -(-len(EXACT) // A_DAY)
ROUND, TODAY = divmod(date.today().toordinal(), DAYS)


def turn(kind: str) -> float:
    """Another order in every round of so many days, one slice of which is a day's."""
    return random.Random(f"{ROUND} {kind}").random()


@contextmanager
def patience() -> Iterator[None]:
    """Skip the test if the block takes too many seconds of computing, so that a busy machine skips no more."""

    def give_up(*_: object) -> None:
        pytest.skip(f"not proven within {SECONDS} s of computing, as `make families` does")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="nothing interrupts a proof that takes too long")
@pytest.mark.skipif(transformers.__version__ != RECORD["transformers"], reason="another release has other types")
@pytest.mark.parametrize("kind", sorted(EXACT, key=turn)[TODAY::DAYS])
def test_a_type_is_exact(kind: str) -> None:
    with patience():
        departure = inference.infer(kind).facts["departure"]
    assert departure < 1e-9
