# SPDX-License-Identifier: Apache-2.0
"""Merge files give what their schema says: by independent arithmetic, by mergekit itself, and matched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pairs import few_sweeps, folder, scrambled, weights
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from zoo import ROTARY

from onebasin import merge_config, verify

FILES = sorted((Path(__file__).parent / "files").glob("*.yml"))
LAYERS, RANK, ALPHA = 4, 2, 6
LLAMA = {**ROTARY, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the files name: base, a, b, an adapter of a, and other, whose vocabulary differs."""
    where = tmp_path_factory.mktemp("recipes")
    for seed, name in enumerate(["base", "a", "b"]):
        _tokenizer(folder(where / name, "LlamaForCausalLM", seed, **LLAMA), WORDS)
    other = folder(where / "other", "LlamaForCausalLM", 3, **{**LLAMA, "vocab_size": 25})
    _tokenizer(other, [*WORDS[5:], "new0", *WORDS[:3]], added=["<mask>"])
    _adapter(where / "adapter", where / "a")
    return where


def _tokenizer(where: Path, words: list[str], added: list[str] | None = None) -> None:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    bare = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    bare.pre_tokenizer = Whitespace()
    whole = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    whole.add_special_tokens({"additional_special_tokens": added or []})
    whole.save_pretrained(where)


def _adapter(where: Path, base: Path) -> None:
    where.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in weights(base).items():
        if "q_proj" in name or "down_proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM",
              "target_modules": ["q_proj", "down_proj"], "base_model_name_or_path": str(base)}  # fmt: skip
    (where / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, where / "adapter_model.safetensors")


@pytest.fixture
def there(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the names of the files mean models."""
    monkeypatch.chdir(models)
    return models


# --- by independent arithmetic --------------------------------------------------------------------------------

Weights = Callable[[str, float], tuple[float, ...]]


def _filtered(name: str, t: float) -> tuple[float, ...]:
    mine = 0.1 + 0.8 * t if "self_attn" in name else 0.2 if "mlp" in name else 0.5
    return mine, 0.8


def _preceding(name: str, t: float) -> tuple[float, ...]:
    shared = 0.4 if "mlp" in name else 0.5
    return (0.9 if "q_proj" in name else shared), shared


EXPECTED: dict[str, tuple[list[str], Weights]] = {
    "scalar": (["a", "b"], lambda name, t: (0.7, 0.6)),
    "gradient": (["a", "b"], lambda name, t: (t, 1 - 0.9 * t)),
    "filters": (["a", "b"], _filtered),
    "base": (["a", "b", "base"], lambda name, t: (2, 1, 1)),
    "precedence": (["a", "b"], _preceding),
}


def place(name: str, layers: int = LAYERS) -> float:
    return int(name.split(".")[2]) / (layers - 1) if ".layers." in name else 0.0


@pytest.mark.parametrize("file", EXPECTED)
def test_weights_are_those_of_the_file(file: str, there: Path, tmp_path: Path) -> None:
    names, share = EXPECTED[file]
    merge_config(FILES[0].with_stem(file), tmp_path / "out")
    sources = [weights(there / name) for name in names]
    for name, tensor in weights(tmp_path / "out").items():
        shares = share(name, place(name))
        wanted = sum(w * source[name].double() for w, source in zip(shares, sources, strict=True)) / sum(shares)
        torch.testing.assert_close(tensor.double(), wanted, rtol=2e-6, atol=2e-7)


def test_a_sum_that_is_not_normalised(there: Path, tmp_path: Path) -> None:
    merge_config(FILES[0].with_stem("normalize"), tmp_path / "out")
    a, b = weights(there / "a"), weights(there / "b")
    for name, tensor in weights(tmp_path / "out").items():
        torch.testing.assert_close(tensor, 1.5 * a[name] - 0.5 * b[name], rtol=1e-5, atol=1e-6)


def test_slices_stack_layers(there: Path, tmp_path: Path) -> None:
    merge_config(FILES[0].with_stem("slices"), tmp_path / "out")
    found, a, b = (weights(where) for where in (tmp_path / "out", there / "a", there / "b"))
    # output layer: layers of a and b, share of a
    layers = {0: (0, 1, 0.25), 1: (1, 2, 0.25), 2: (1, 1, 0.0), 3: (2, 2, 0.5 / 1.0), 4: (3, 3, 1 / 1.5)}
    for layer, (i, j, share) in layers.items():
        for kind in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            wanted = share * a[f"model.layers.{i}.{kind}"] + (1 - share) * b[f"model.layers.{j}.{kind}"]
            torch.testing.assert_close(found[f"model.layers.{layer}.{kind}"], wanted, rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 5
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_dtypes(there: Path, tmp_path: Path) -> None:
    merge_config(FILES[0].with_stem("dtype"), tmp_path / "out")
    a, b = weights(there / "a"), weights(there / "b")
    for name, tensor in weights(tmp_path / "out").items():
        assert tensor.dtype == torch.float16
        wanted = (0.3 * a[name].bfloat16().float() + 0.7 * b[name].bfloat16().float()).bfloat16()
        torch.testing.assert_close(tensor.float(), wanted.float(), rtol=2**-7, atol=1e-7)  # one step of bfloat16


def test_an_adapter_is_merged_first(there: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    merge_config(FILES[0].with_stem("lora"), tmp_path / "out")
    a, b, lora = weights(there / "a"), weights(there / "b"), load_file(there / "adapter" / "adapter_model.safetensors")
    for name, tensor in weights(tmp_path / "out").items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora"
        change = 0.0
        if f"{stem}_A.weight" in lora:
            change = ALPHA / RANK * lora[f"{stem}_B.weight"] @ lora[f"{stem}_A.weight"]
        torch.testing.assert_close(tensor, (a[name] + change + b[name]) / 2, rtol=1e-5, atol=1e-5)


def rows(where: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Token -> its rows in the embedding and in the head."""
    found = weights(where)
    tokens = PreTrainedTokenizerFast.from_pretrained(where).get_vocab()
    return {word: (found["model.embed_tokens.weight"][i], found["lm_head.weight"][i]) for word, i in tokens.items()}


@pytest.mark.parametrize("source", ["union", "base", "other"])
def test_a_tokenizer_is_taken(source: str, there: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(FILES[0].with_stem("union").read_text().replace("union", source))
    merge_config(file, tmp_path / "out")
    a, b, found = rows(there / "a"), rows(there / "other"), rows(tmp_path / "out")
    wanted = {"union": a.keys() | b.keys(), "base": a.keys(), "other": b.keys()}[source]
    assert found.keys() == wanted and ("<mask>" in found) == (source != "base")
    for word, pair in found.items():
        for mine, one, two in zip(pair, a.get(word, b.get(word)), b.get(word, a.get(word)), strict=True):
            torch.testing.assert_close(mine, (one + two) / 2)  # a token that one model lacks is the other's
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == len(wanted) == len(weights(tmp_path / "out")["lm_head.weight"])
    if source == "union":
        kept = PreTrainedTokenizerFast.from_pretrained(there / "a").get_vocab()
        now = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
        assert kept.items() <= now.get_vocab().items() and now.tokenize("w3 <mask> new0") == ["w3", "<mask>", "new0"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- by mergekit itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_mergekit_gives_the_same(file: Path, there: Path, tmp_path: Path) -> None:
    pytest.importorskip("mergekit")
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    merge_config(file, tmp_path / "ours", verdict=False)
    config = MergeConfiguration.model_validate(yaml.safe_load(file.read_text()))
    options = MergeOptions(quiet=True, write_model_card=False, lora_merge_cache=str(tmp_path / "lora"))
    run_merge(config, str(tmp_path / "theirs"), options)
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    order = slice(None)
    if file.stem == "union":  # the two need not number the added tokens alike
        mine, yours = (PreTrainedTokenizerFast.from_pretrained(tmp_path / name).get_vocab()
                       for name in ("ours", "theirs"))  # fmt: skip
        assert mine.keys() == yours.keys()
        order = [mine[word] for word in sorted(yours, key=yours.__getitem__)]
    for name, tensor in theirs.items():
        vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
        found = ours[name][order] if vocabulary else ours[name]
        assert found.dtype == tensor.dtype
        # one rounding of the dtype that the sum was rounded to
        rounding = 2.0**-7 if file.stem == "dtype" else 2.0**-22
        torch.testing.assert_close(found.double(), tensor.double(), rtol=rounding, atol=1e-7, msg=name)


RANDOM = """merge_method: dare_linear
base_model: base
models: [{model: a, parameters: {weight: 0.5, density: 0.5}}]
"""


@pytest.mark.parametrize("align", ["", "align: {symmetry: paper}\n"])
def test_random_methods_follow_the_seed(align: str, there: Path, tmp_path: Path) -> None:
    """The seed of the call, or of the file, decides every drawn number, and is written down; no generator moves."""
    pytest.importorskip("mergekit")
    file = tmp_path / "recipe.yml"

    def merged(text: str, **options: Any) -> dict[str, Tensor]:
        file.write_text(text + align)
        merge_config(file, tmp_path / "out", overwrite=True, verify=False, verdict=False, **options)
        told = json.loads((tmp_path / "out" / "onebasin.json").read_text())["options"]["seed"]
        return {"seed": torch.tensor(told), **weights(tmp_path / "out")}

    state = torch.get_rng_state()
    three = merged(RANDOM, seed=3)
    assert torch.get_rng_state().equal(state) and three["seed"] == 3
    for same in (merged(RANDOM + "random_seed: 3\n"), merged(RANDOM + "random_seed: 4\n", seed=3)):
        assert all(same[name].equal(tensor) for name, tensor in three.items())
    zero, unsaid = merged(RANDOM, seed=0), merged(RANDOM)
    assert all(unsaid[name].equal(tensor) for name, tensor in zero.items())
    assert not zero["lm_head.weight"].equal(three["lm_head.weight"])


# --- matched --------------------------------------------------------------------------------------------------


MATCHED = [file for file in FILES if file.stem not in ("lora", "union", "slices", "dtype")]


@pytest.mark.parametrize("file", MATCHED, ids=lambda file: file.stem)
def test_copies_of_one_function_merge_into_it(file: Path, there: Path, tmp_path: Path) -> None:
    """The models are scrambled copies of the base: once matched, each of these merges gives the base's function."""
    if file.stem in ("ties", "slerp"):
        pytest.importorskip("mergekit")
    shutil.copytree(there / "base", tmp_path / "base")
    for seed, name in enumerate("ab"):
        scrambled(there / "base", tmp_path / name, "paper", seed)
    three = "base_model" in file.read_text()  # which tests/matching/test_universe matches at full
    result = matched(file, tmp_path, "paper" if three else "full")
    if three:
        assert result["distance_after"] == pytest.approx([0] * len(result["distance_after"]), abs=1e-3)
    assert verify(tmp_path / "base", tmp_path / "out").same


@pytest.mark.parametrize("file", ["union", "slices", "dtype"])
def test_other_merges_of_matched_models_run(file: str, there: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "other"):
        shutil.copytree(there / name, tmp_path / name)
    result = matched(FILES[0].with_stem(file), tmp_path)
    assert all(after < before for before, after in
               zip(result["distance_before"], result["distance_after"], strict=True))  # fmt: skip
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_adapter_is_matched_with_its_model(there: Path, tmp_path: Path) -> None:
    """b is a scrambled copy of what a becomes with its adapter: once matched, the merge has that function."""
    for name in ("a", "adapter"):
        shutil.copytree(there / name, tmp_path / name)
    alone = tmp_path / "alone.yml"
    alone.write_text(
        f"merge_method: linear\nmodels: [{{model: '{there / 'a'}+{there / 'adapter'}', parameters: {{weight: 1}}}}]\n"
    )
    merge_config(alone, tmp_path / "whole")
    scrambled(tmp_path / "whole", tmp_path / "b", "paper", 0)
    matched(FILES[0].with_stem("lora"), tmp_path)
    assert verify(tmp_path / "whole", tmp_path / "out").same
    assert not verify(tmp_path / "a", tmp_path / "out").same


def matched(file: Path, where: Path, level: str = "full") -> dict[str, Any]:
    text = file.read_text() + f"align: {{symmetry: {level}, anchor: base, rescale: joint}}\n"
    (where / "recipe.yml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        few_sweeps(patch)
        result = merge_config("recipe.yml", "out", verdict=False)
    assert (where / "out" / "mergekit_config.yml").read_text() == text
    return result
