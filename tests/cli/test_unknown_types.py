# SPDX-License-Identifier: Apache-2.0
"""Models whose type no table knows: what is said, and what `--family` and `--table` do about it."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pairs import scrambled


def renamed(source: Path, where: Path, kind: str = "my-bert") -> Path:
    """A copy that calls its type something else."""
    shutil.copytree(source, where)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "model_type": kind, "architectures": ["MyBertModel"]}))
    return where


@pytest.fixture
def mine(a: Path, tmp_path: Path) -> Path:
    return renamed(a, tmp_path / "mine")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table file of one's own: BERT's, under another name."""
    text = (files("onebasin.families") / "bert.txt").read_text("utf-8")
    path = tmp_path / "my_family.txt"
    path.write_text(text.replace("family bert", "family my-bert"), "utf-8")
    return path


def test_every_command_names_the_type_the_nearest_and_what_to_do(
    refused: Any, mine: Path, a: Path, tmp_path: Path
) -> None:
    for words in (
        ("inspect", mine), ("match", mine, a, "-o", tmp_path / "out"), ("match", a, mine, "-o", tmp_path / "out"),
        ("merge", a, mine, "-o", tmp_path / "out"), ("distance", mine, a), ("canonical", mine, "-o", tmp_path / "out"),
    ):  # fmt: skip
        line = refused(*words)
        assert str(mine) in line and "model type 'my-bert' has no table yet (nearest: bert" in line
        assert "--family" in line and "--table" in line


def test_check_says_so_and_says_no(ask: Any, mine: Path, a: Path) -> None:
    assert "'my-bert' has no table yet (nearest: bert" in ask("check", mine, a, code=1)["reason"]
    assert ask("check", mine, a, "--family", "bert")["can_match"]


@pytest.mark.parametrize("own", [False, True], ids=["--family", "--table"])
def test_a_scrambled_copy_is_recovered(own: bool, ask: Any, mine: Path, table: Path, tmp_path: Path) -> None:
    which = ("--table", table) if own else ("--family", "bert")
    source = scrambled(mine, tmp_path / "source", family="bert")
    assert ask("inspect", mine, *which)["family"] == ("my-bert" if own else "bert")
    assert ask("distance", source, mine, *which)["relative"] > 0.1
    found = ask("match", source, mine, "-o", tmp_path / "out", *which, "--no-verify")
    assert found["max_output_difference"] is None
    assert ask("distance", tmp_path / "out", mine, *which)["relative"] < 1e-5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "my-bert"
    ask("merge", source, mine, "-o", tmp_path / "merged", *which, "--anchor", 1, "--no-verify", "--match", "paper")
    assert ask("distance", tmp_path / "merged", mine, *which)["relative"] < 1e-5


def test_verifying_needs_a_class_and_says_so_before_any_work(
    refused: Any, mine: Path, a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def worked(*args: object, **kwargs: object) -> None:
        raise AssertionError("matching began")

    monkeypatch.setattr("onebasin.jobs.aligning.match_weights", worked)
    for place in ("folders", "canonical"):
        monkeypatch.setattr(f"onebasin.jobs.{place}.Canonical", worked)
    jobs = (
        ("match", mine, a),
        ("merge", a, mine, "--match", "paper"),
        ("match", mine, a, "--symmetry", "full"),
        ("canonical", mine),
    )
    for words in jobs:
        line = refused(*words, "-o", tmp_path / "out", "--family", "bert")
        assert f"'{mine}' is of type 'my-bert', for which transformers has no class" in line and "--no-verify" in line
    assert "for which transformers has no class" in refused("verify", mine, a)


def test_an_anchor_of_an_unknown_type_needs_no_class(ask: Any, mine: Path, b: Path, tmp_path: Path) -> None:
    assert ask("match", b, mine, "-o", tmp_path / "out", "--family", "bert")["max_output_difference"] is not None


def test_tables_that_do_not_do(refused: Any, mine: Path, a: Path, table: Path, tmp_path: Path) -> None:
    assert "there is no family 'no-such'; known: " in refused("inspect", mine, "--family", "no-such")
    assert str(mine) in refused("inspect", mine, "--family", "gpt2")
    table.write_text(table.read_text("utf-8").replace("vocab stream", "vocab strem", 1), "utf-8")
    line = refused("match", mine, a, "-o", tmp_path / "out", "--table", table)
    assert "my_family.txt" in line and "'strem'" in line
    table.write_bytes(b"\xff\xfe\x00")
    assert "my_family.txt" in refused("inspect", mine, "--table", table)
