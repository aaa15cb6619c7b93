# SPDX-License-Identifier: Apache-2.0
"""Running commands as a user does, and looking at what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import folder
from typer.testing import CliRunner

from onebasin.cli import app

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def a(shared: Path) -> Path:
    """A tiny BERT classifier. Tests do not write to it; those that damage it take a copy."""
    return folder(shared / "a")


@pytest.fixture(scope="session")
def b(shared: Path) -> Path:
    return folder(shared / "b", seed=1)


@pytest.fixture(scope="session")
def c(shared: Path) -> Path:
    return folder(shared / "c", seed=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of twelve sequences of tokens."""
    rows = [{"input_ids": [3 + (7 * i + j) % 17 for j in range(4 + i % 3)]} for i in range(12)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(autouse=True)
def _tidy(nothing_stays_in_the_temporary_folder: None) -> None: ...


@pytest.fixture
def run() -> Run:
    """run("match", a, b, "-o", out) -> the result: exit_code, stdout, stderr."""

    def call(*words: object) -> Any:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception  # a traceback is never an answer
        return result

    return call


@pytest.fixture
def ask(run: Run) -> Run:
    """The same with --json: what the command prints, which must be one JSON object and nothing else.

    judged: whether a merge is judged, which takes longer than the merge.
    """

    def call(*words: object, code: int = 0, judged: bool = False) -> Any:
        result = run(*words, "--json", *(["--no-verdict"] if words[0] == "merge" and not judged else []))
        assert result.exit_code == code, result.stderr
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout)

    return call


@pytest.fixture
def refused(run: Run, tmp_path: Path) -> Run:
    """The error line of a command that must fail: exit code 2, one line, nothing new in the test's folder."""

    def call(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        result = run(*words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert sorted(tmp_path.rglob("*")) == before
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        return str(lines[0])

    return call
