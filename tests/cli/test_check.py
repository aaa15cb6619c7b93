# SPDX-License-Identifier: Apache-2.0
"""`onebasin check` as people and programs see it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pairs import folder

import onebasin


def test_models_that_fit(run: Any, ask: Any, a: Path, b: Path) -> None:
    said = ask("check", a, b)
    assert said["can_match"] and said["reason"] is None and said["peek"] is None
    assert set(said["moves"]) == {"qk", "vo", "ffn"} and "stream" in said["fixed"]
    assert set(ask("check", a, b, "--symmetry", "permutation")["moves"]) >= {"stream", "head", "ffn"}
    shown = run("check", a, b, "--peek")
    assert shown.exit_code == 0 and shown.stderr == ""
    for words in ("can be matched at level paper", "moves: qk", "stays: ", "memory", "time", "cosine of"):
        assert words in shown.stdout


@pytest.mark.parametrize(
    "change, words",
    [
        ({"case": "GPT2LMHeadModel"}, ["family", "bert", "gpt2"]),
        ({"vocab_size": 24}, ["size of 'vocab'", "23", "24"]),
        ({"num_hidden_layers": 3}, ["number of layers", "2", "3"]),
    ],
)
def test_models_that_do_not(
    run: Any, ask: Any, a: Path, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    other = folder(tmp_path / "other", **change)
    said = ask("check", a, other, code=1)
    assert not said["can_match"] and all(word in said["reason"] for word in words)
    shown = run("check", a, other, "--peek")
    assert shown.exit_code == 1 and shown.stdout.startswith("cannot be matched: ")


def test_vocabularies_and_ancestors_are_shown(run: Any, a: Path, tmp_path: Path) -> None:
    one, two = (Path(shutil.copytree(a, tmp_path / name)) for name in ("one", "two"))
    for model, text in ((one, "p\nq\n"), (two, "p\nr\n")):
        (model / "vocab.txt").write_text(text)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "_name_or_path": "owner/base"}))
    shown = run("check", one, two).stdout
    assert "vocabularies differ: 2 and 2 tokens, 1 in common; first at 1: 'q' and 'r'" in shown
    assert "both come from 'owner/base'" in shown
    shutil.copy(one / "vocab.txt", two / "vocab.txt")
    assert "vocabularies: the same 2 tokens" in run("check", one, two).stdout


def test_the_level_has_three_names_in_python(a: Path, b: Path) -> None:
    for name in ("match", "symmetry", "level"):
        assert onebasin.check(a, b, **{name: "permutation"})["symmetry"] == "permutation"
    with pytest.raises(ValueError, match="match and level are two names for one argument"):
        onebasin.check(a, b, match="full", level="full")


def test_bad_input_is_not_a_no(refused: Any, a: Path, b: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("check", a, tmp_path / "no")
    assert "unknown match 'most'" in refused("check", a, b, "--symmetry", "most")
    broken = Path(shutil.copytree(a, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"x")
    assert "is damaged or cut short" in refused("check", a, broken)
    (broken / "config.json").write_text("{")
    assert "is not valid JSON" in refused("check", broken, a)
