# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends the program with exit code 130 and no traceback, also while it imports what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from onebasin.cli.common import exits_with_2
from onebasin.engine.store import kept


def interrupted(modules: set[str], *words: object, handler: str = "signal.default_int_handler") -> tuple[int, str]:
    """What becomes of the program when Ctrl-C comes wherever one of the modules is about to be imported."""
    program = f"""
import os, signal, sys

left = {modules!r}

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name in left:
            left.remove(name)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupt())
from onebasin.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as on POSIX")
@pytest.mark.parametrize(
    "module",
    ["onebasin.cli", "rich.console", "onebasin.jobs", "torch", "transformers.models.auto.modeling_auto"],
)
def test_no_traceback_while_importing(a: Path, b: Path, tmp_path: Path, module: str) -> None:
    code, said = interrupted({module}, "match", a, b, "-o", tmp_path / "out")
    assert code == 130 and "interrupted" in said and "Traceback" not in said and len(said.splitlines()) == 1, said
    assert "--resume" not in said, "nothing is kept yet"
    assert not list(tmp_path.iterdir())


def test_a_shell_that_ignores_it_is_obeyed(a: Path) -> None:
    """As for a command in the background of a script."""
    assert interrupted({"typer", "torch"}, "inspect", a, "--json", handler="signal.SIG_IGN") == (0, "")


@pytest.mark.parametrize("done", [True, False])
def test_it_says_what_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path, done: bool) -> None:
    @exits_with_2
    def command() -> None:
        with kept(tmp_path / "units", False) as folder:
            if done:
                (folder / "unit").touch()
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        command()
    said = capsys.readouterr().err
    assert "no output was written" in said and ("--resume" in said) is done is (tmp_path / "units").exists()
