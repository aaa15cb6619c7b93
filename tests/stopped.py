# SPDX-License-Identifier: Apache-2.0
"""A descent that is interrupted, and run again with the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

Result = TypeVar("Result")


def stopped_and_continued(run: Callable[[Callable[[str, float], None]], Result], stop: int) -> tuple[Result, int]:
    """What `run(progress)` gives the second time, after an interrupt at its step `stop`, and how many steps it made."""
    seen: list[str] = []

    def interrupt(text: str, loss: float) -> None:
        seen.append(text)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupt)
    again: list[str] = []
    return run(lambda text, loss: again.append(text)), len(again)
