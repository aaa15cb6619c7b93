# SPDX-License-Identifier: Apache-2.0
"""What is said before any weight is read is what matching then does."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder, scrambled
from torch import Tensor

import onebasin
from onebasin.engine import KEPT
from onebasin.matching import Run, match_weights
from onebasin.matching.cost import numbers_held
from onebasin.models import Folder, ModelError, read_pair, shared_roles
from onebasin.models.preflight import ancestors, preflight, tokens, vocabulary
from onebasin.symmetry import acting_groups


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("gpt2") / "a", "GPT2LMHeadModel")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("bert") / "a")


def test_no_weights_are_read(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder(tmp_path / "b", seed=1)

    def read(self: Folder, name: str) -> Tensor:
        raise AssertionError(name)

    monkeypatch.setattr(Folder, "read_name", read)
    for level in ("paper", "full"):
        assert onebasin.check(bert, other, symmetry=level)["can_match"]
    with pytest.raises(AssertionError, match="weight"):
        onebasin.check(bert, other, peek=True)


PAIRS: dict[str, dict[str, Any]] = {
    "same": {},
    "positions": {"n_positions": 9},
    "head": {"case": "GPT2ForSequenceClassification"},
    "neurons": {"n_inner": 14},
    "narrow neurons": {"n_inner": 8},
    "layers": {"n_layer": 3},
    "heads": {"n_head": 2},
    "words": {"vocab_size": 24},
    "activation": {"activation_function": "relu"},
    "untied": {"tie_word_embeddings": False},
    "family": {"case": "BertForSequenceClassification"},
}


@pytest.mark.parametrize("level", ["paper", "full"])
@pytest.mark.parametrize("pair", PAIRS)
def test_it_says_what_match_does(gpt2: Path, tmp_path: Path, pair: str, level: str) -> None:
    """Whether it works and why not; and where it works, that exactly the spaces it names have moved."""
    other = folder(tmp_path / "b", **{"case": "GPT2LMHeadModel", "seed": 1, **PAIRS[pair]})
    said = onebasin.check(gpt2, other, symmetry=level)
    try:
        onebasin.match(gpt2, other, tmp_path / "out", symmetry=level, verify=False, alignment=tmp_path / "maps")
    except ValueError as error:
        assert not said["can_match"] and said["reason"] == str(error)
        return
    assert said["can_match"] and said["reason"] is None
    moved = {root.rsplit(".", 1)[-1] for root in onebasin.Alignment.load(tmp_path / "maps")}
    assert moved == set(said["moves"])
    assert not moved & set(said["fixed"])


def test_what_differs(bert: Path, gpt2: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "b", num_labels=5, max_position_embeddings=9)
    said = onebasin.check(bert, other)
    assert said["rows"] == {"position": (12, 9)}
    assert said["heads"] == ["classifier.weight", "classifier.bias"] and said["only_a"] == said["only_b"] == []
    assert {"vocab", "stream", "head", "position"} <= set(said["fixed"]) and set(said["moves"]) == {"qk", "vo", "ffn"}
    headless = folder(tmp_path / "c", "BertModel")
    assert onebasin.check(bert, headless)["only_a"] == said["heads"] == onebasin.check(headless, bert)["only_b"]
    wide = folder(tmp_path / "w", "GPT2LMHeadModel", n_inner=14)
    said = onebasin.check(gpt2, wide, symmetry="full")
    assert said["widened"] == {"h.0.ffn": (10, 14), "h.1.ffn": (10, 14)} and said["untied"] == ["lm_head.weight"]


@pytest.mark.parametrize("level", ["paper", "permutation"])
def test_matching_holds_no_more_than_was_foretold(gpt2: Path, tmp_path: Path, level: str) -> None:
    """Counted while it runs: the bytes of all tensors handed to it that are still alive, at their most."""
    a, b = Folder(gpt2), Folder(folder(tmp_path / "b", "GPT2LMHeadModel", seed=1))
    alive = peak = 0

    def release(count: int) -> None:
        nonlocal alive
        alive -= count

    def read(role: str) -> tuple[Tensor, Tensor]:
        nonlocal alive, peak
        pair = tuple(tensor.clone() for tensor in read_pair(b, a, role))
        for tensor in pair:
            alive += tensor.nbytes
            weakref.finalize(tensor, release, tensor.nbytes)
        peak = max(peak, alive)
        return pair[0], pair[1]

    roles, groups = shared_roles(a, b).roles, acting_groups(a.signature, level)
    match_weights(a.signature, read, groups, roles=roles, run=Run(1))
    foretold = numbers_held(a.signature, roles, groups, workers=1)
    assert peak <= 4 * foretold
    said = preflight(a, b, level)
    assert said.signature is not None
    assert numbers_held(said.signature, said.roles, groups, 1) == foretold
    deep = Folder(folder(tmp_path / "deep", "GPT2LMHeadModel", n_layer=6))
    many = acting_groups(deep.signature, level)
    assert numbers_held(deep.signature, list(deep.signature.tensors), many, 1) == foretold  # whatever the depth
    single, double = (
        {
            key: [size - KEPT for size in ends]
            for key, ends in onebasin.check(gpt2, b.folder, precision=p)["memory"].items()
        }
        for p in ("float32", "float64")
    )
    assert single["paper"] < single["permutation"] < single["full"]
    assert double == {key: [2 * size for size in ends] for key, ends in single.items()}


# --- vocabularies -------------------------------------------------------------------------------------------------


def _tokenizer(vocab: Any, added: tuple[tuple[int, str], ...] = ()) -> str:
    tokens = [{"id": number, "content": text} for number, text in added]
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens})


@pytest.mark.parametrize(
    "file, text",
    [
        ("tokenizer.json", _tokenizer({"x": 0, "y": 1, "z": 2})),
        ("tokenizer.json", _tokenizer({"x": 0, "y": 1}, ((2, "z"),))),
        ("tokenizer.json", _tokenizer([["x", 0.0], ["y", -1.5], ["z", -2.0]])),
        ("vocab.json", json.dumps({"z": 2, "y": 1, "x": 0})),
        ("vocab.txt", "x\ny\nz\n"),
    ],
)
def test_every_form_of_a_vocabulary(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text, "utf-8")
    assert tokens(tmp_path) == {0: "x", 1: "y", 2: "z"}


def test_a_separator_that_python_knows_is_a_token(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("x\n\u2028\nz", "utf-8")
    assert tokens(tmp_path) == {0: "x", 1: "\u2028", 2: "z"}


def test_vocabularies_compared(bert: Path, tmp_path: Path) -> None:
    a, b = (Path(shutil.copytree(bert, tmp_path / name)) for name in "ab")
    assert vocabulary(Folder(a), Folder(b)) is None
    (a / "vocab.txt").write_text("p\nq\nr\ns\n")
    assert vocabulary(Folder(a), Folder(b)) is None
    (b / "tokenizer.json").write_text(_tokenizer({"p": 0, "r": 1, "q": 2, "s": 3, "t": 4}))
    found = vocabulary(Folder(a), Folder(b), shown=2)
    assert found is not None and not found.same
    assert (found.size_a, found.size_b, found.agreeing) == (4, 5, 2)
    assert found.first == [(1, "q", "r"), (2, "r", "q")]
    assert onebasin.check(a, b)["vocabulary"]["first"][-1] == (4, None, "t")
    (b / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json' is not valid JSON"):
        onebasin.check(a, b)


# --- ancestry -----------------------------------------------------------------------------------------------------


def test_ancestors(bert: Path, tmp_path: Path) -> None:
    a, b = (Path(shutil.copytree(bert, tmp_path / name)) for name in "ab")
    assert ancestors(Folder(a)) == [] and onebasin.check(a, b)["common_ancestors"] == []
    config = json.loads((a / "config.json").read_text())
    (a / "config.json").write_text(json.dumps({**config, "_name_or_path": "owner/base"}))
    (b / "README.md").write_text("---\nbase_model:\n- owner/base\n- owner/other\n---\n# b\n")
    said = onebasin.check(a, b)
    assert said["ancestors"] == [["owner/base"], ["owner/base", "owner/other"]]
    assert said["common_ancestors"] == ["owner/base"]
    (b / "README.md").write_text(f"---\nbase_model: {a}\n---\n")  # a itself
    assert onebasin.check(a, b)["common_ancestors"] == [str(a)]
    for text in ("no front matter", "---\nbase_model: [\n---\n", "---\n- a list\n---\n"):
        (b / "README.md").write_text(text)
        assert onebasin.check(a, b)["common_ancestors"] == []


def test_a_peek_tells_one_base_from_two(bert: Path, tmp_path: Path) -> None:
    tuned, apart = folder(tmp_path / "tuned", seed=1), folder(tmp_path / "apart", seed=1)
    with torch.no_grad():
        from safetensors.torch import load_file, save_file

        base = load_file(bert / "model.safetensors")
        noise = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in base.items()}
        save_file(noise, tuned / "model.safetensors", {"format": "pt"})
        fresh = {name: torch.randn(tensor.shape) for name, tensor in base.items()}
        save_file(fresh, apart / "model.safetensors", {"format": "pt"})
    assert onebasin.check(bert, tuned, peek=True)["peek"]["cosine"] > 0.99
    said = onebasin.check(bert, apart, peek=True)["peek"]
    assert abs(said["cosine"]) < 0.5  # some ten standard deviations would be 0.9: it has 120 entries
    assert said["tensor"] == "bert.encoder.layer.0.intermediate.dense.weight"  # no bias, norm or table
    rewritten = scrambled(bert, tmp_path / "rewritten")
    assert onebasin.check(bert, rewritten, peek=True)["peek"]["cosine"] < 0.9


@pytest.mark.parametrize("scale", [1.0, 1e-42])
def test_a_peek_passes_over_zeros_and_sees_numbers_of_any_size(tmp_path: Path, scale: float) -> None:
    from safetensors.torch import load_file, save_file

    model = folder(tmp_path / "a")
    tensors = load_file(model / "model.safetensors")
    zero = "bert.encoder.layer.0.intermediate.dense.weight"  # the one that it would look at
    changed = {name: tensor * (0.0 if name == zero else scale) for name, tensor in tensors.items()}
    save_file(changed, model / "model.safetensors", {"format": "pt"})
    said = onebasin.check(model, model, peek=True)["peek"]
    assert said["tensor"] != zero
    assert said["cosine"] == pytest.approx(1.0, abs=1e-9)
    save_file({name: 0 * tensor for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    assert onebasin.check(model, model, peek=True)["peek"] is None
