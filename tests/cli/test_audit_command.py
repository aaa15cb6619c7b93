# SPDX-License-Identifier: Apache-2.0
"""onebasin audit: what it prints, its exit codes, what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from zoo import build, save

import onebasin.families

SMALL = ("--set", "num_hidden_layers=1", "--set", "vocab_size=9")
GPT2 = dict(n_positions=4, n_embd=6, n_layer=1, n_head=2, n_inner=5)


def test_a_complete_family(ask: Any, run: Any) -> None:
    found = ask("audit", "llama", *SMALL)
    assert found.keys() == {
        "target", "parameters", "rank", "nullity", "gap", "dimension", "largest_change", "missing", "complete"
    }  # fmt: skip
    assert (found["parameters"], found["nullity"], found["dimension"], found["complete"]) == (480, 78, 78, True)
    shown = run("audit", "llama", *SMALL)
    assert shown.exit_code == 0
    assert "480 parameters" in shown.stdout and shown.stdout.count(" 78\n") == 2


def test_an_incomplete_family_exits_with_1(run: Any) -> None:
    assert run("audit", "gptj", *SMALL, "--quiet").exit_code == 1


def test_what_is_missing_is_found_in_the_fewest_tensors(ask: Any, run: Any, tmp_path: Path) -> None:
    """A table that lets nothing act on values lacks GL(4) of one head, less the scale, which the norm before takes off:
    in the matrices that write and read them."""
    table = Path(onebasin.families.__file__).with_name("llama.txt").read_text("utf-8")
    (tmp_path / "still.txt").write_text(re.sub(r"\n    vo +linear.*", "\n    vo fixed attention per layer, kv", table))
    words = ("audit", "llama", *SMALL, "--family", tmp_path / "still.txt")
    found = ask(*words, code=1)
    tensors = ["layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight"]
    assert found["missing"] == [[tensors, 15]]
    assert f"missing               15 in {', '.join(tensors)}" in run(*words).stdout


def test_a_small_model(ask: Any, tmp_path: Path) -> None:
    folder = save(build("GPT2LMHeadModel", vocab_size=7, **GPT2, tie_word_embeddings=False), tmp_path / "model")
    found = ask("audit", folder)
    assert (found["parameters"], found["nullity"], found["complete"]) == (383, 147, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("lama",), "'lama' is neither a model folder nor a model type of transformers; nearest types: llama"),
        (("BertModel",), "nearest types: bert"),
        (("bert", "--set", "hidden_size"), "write NAME=VALUE"),
        (("bert", "--set", "hidden_size=7"), "cannot be built"),
        (("bert", "--set", "hidden_size=64"), "at most 7,000"),
    ],
)
def test_bad_input(refused: Any, words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("audit", *words)


def test_a_large_model_is_refused(refused: Any, tmp_path: Path) -> None:
    folder = save(build("GPT2LMHeadModel", vocab_size=1400, **GPT2), tmp_path / "model")
    assert "parameters; an audit takes the Jacobian" in refused("audit", folder)
    assert "in its config.json" in refused("audit", folder, "--set", "n_layer=1")
