# SPDX-License-Identifier: Apache-2.0
"""The line that tells of progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onebasin.cli import common


@pytest.mark.parametrize(("seconds", "said"), [(None, "0:00:00"), (90.0, "at most 1:30 left")])
def test_a_terminal_shows_what_goes_on_and_for_how_long(
    seconds: float | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with brackets is no markup."""
    shown = io.StringIO()
    monkeypatch.setattr(common, "console", Console(file=shown, force_terminal=True, width=100))
    with common.progress(False, 0, seconds) as tell:
        assert tell is not None
        tell("matching [bold]name[/bold]")
    assert "[bold]name[/bold]" in shown.getvalue() and said in shown.getvalue()


def test_quiet_is_silent_and_v_writes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(common, "console", Console(file=shown, width=100))
    with common.progress(True) as tell:
        assert tell is None
    with common.progress(False, 1) as tell:
        assert tell is not None
        tell("a step")
    assert shown.getvalue() == "a step\n"
