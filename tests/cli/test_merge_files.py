# SPDX-License-Identifier: Apache-2.0
"""onebasin merge --config: what is refused, and what the output folder looks like."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pairs import folder, weights

pytestmark = pytest.mark.usefixtures("three_sweeps")

Run = Any


@pytest.fixture
def write(tmp_path: Path, a: Path, b: Path) -> Any:
    """Write a merge file of two models, with lines after `merge_method` and after the models."""

    def call(before: str = "merge_method: linear", after: str = "", settings: str = "{weight: 1}") -> Path:
        file = tmp_path / "recipe.yml"
        models = "".join(f"  - model: {model}\n    parameters: {settings}\n" for model in (a, b))
        file.write_text(f"{before}\nmodels:\n{models}{after}\n")
        return file

    return call


@pytest.mark.parametrize(
    ("before", "after", "settings", "words"),
    [
        ("merge_methd: linear", "", "{}", "unknown key 'merge_methd'; did you mean 'merge_method'?"),
        ("merge_method: linear", "align: {symetry: full}", "{}", "'symetry' in align; did you mean 'symmetry'?"),
        ("merge_method: linear", "", "{wieght: 1}", "unknown parameter 'wieght' of linear in models[0].parameters"),
        ("merge_method: linear", "", "{}", "linear needs a weight for every model"),
        ("merge_method: linear", "", "{weight: much}", "parameter 'weight' 'much': it must be a valid number"),
        ("merge_method: linear", "slices: []\nbase_model: x@1@2", "{weight: 1}", "'x@1@2' does not name a model"),
        ("merge_method: linear", "modules: {a: {models: []}}", "{weight: 1}", "exactly one of models, slices"),
        ("merge_method: linear", "dtype: float31", "{weight: 1}", "dtype: Input should be 'float32'"),
        ("merge_method: linear", "align: {lambda_range: [0.6, 0.4]}", "{weight: 1}", "lambda-range 0.6,0.4: give the"),
        ("merge_method: linear", "align: {concentration: 0}", "{weight: 1}", "concentration 0: it must be"),
        ("merge_method: linear", "align: {anchor: nobody}", "{weight: 1}", "'nobody' is not base, auto or a model"),
        ("merge_method: average", "", "{weight: [0, 1]}", "'average' takes one weight for each model"),
        ("merge_method: linear\nslices: 3", "", "{weight: 1}", "slices: "),
        ("merge_method: linear", "random_seed: -1", "{weight: 1}", "random_seed: Input should be greater"),
        ("merge_method: linear", "out_shard_size: 20XB", "{weight: 1}", "'20XB' is not a shard size; write it as 5GB"),
        ("merge_method: linear", "random_seed: 1\nalign: {seed: 2}", "{weight: 1}", "a merge has one seed"),
        ("merge_method: [", "", "", "is not valid YAML"),
    ],
)  # fmt: skip
def test_one_sentence(
    before: str, after: str, settings: str, words: str, write: Any, refused: Run, tmp_path: Path
) -> None:
    file = write(before, after, settings)
    assert words in refused("merge", "--config", file, "-o", tmp_path / "out")


@pytest.mark.parametrize("method", ["linear", "average", "karcher"])
def test_the_file_or_the_option_says_how_large_weight_files_are(
    method: str, write: Any, ask: Run, tmp_path: Path
) -> None:
    """Also with threads, which change no result."""
    if method == "karcher":
        pytest.importorskip("mergekit")
    settings = "{}" if method == "karcher" else "{weight: 0.5}"
    file = write(f"merge_method: {method}", "out_shard_size: 4KB", settings)
    for option, several in (((), True), (("--out-shard-size", "5GB"), False)):
        ask("merge", "--config", file, "-o", tmp_path / "out", "-j", "1", "--overwrite", *option)
        assert (tmp_path / "out" / "model.safetensors.index.json").exists() is several


def test_unknown_methods_name_the_nearest(write: Any, refused: Run, tmp_path: Path) -> None:
    file = write("merge_method: linaer")
    assert "did you mean 'linear'?" in refused("merge", "--config", file, "-o", tmp_path / "out")


def test_options_that_the_file_settles(write: Any, refused: Run, tmp_path: Path, a: Path) -> None:
    file = write()
    assert "--match cannot be combined with" in refused(
        "merge", "--config", file, "-o", tmp_path / "out", "--match", "full"
    )
    assert "cannot be combined with --config" in refused("merge", a, "--config", file, "-o", tmp_path / "out")
    assert "cannot be read" in refused("merge", "--config", tmp_path / "no.yml", "-o", tmp_path / "out")


def test_slices_that_do_not_exist(refused: Run, tmp_path: Path, a: Path) -> None:
    file = tmp_path / "recipe.yml"
    source = f"slices: [{{sources: [{{model: {a}, layer_range: [0, 9], parameters: {{weight: 1}}}}]}}]"
    file.write_text(f"merge_method: linear\n{source}\n")
    assert "has 2 layers, not 9" in refused("merge", "--config", file, "-o", tmp_path / "out")


@pytest.mark.parametrize("method", ["linear", "passthrough"])
@pytest.mark.parametrize("block", ["", "modules: {default: "])
def test_layers_without_end(method: str, block: str, refused: Run, tmp_path: Path, a: Path) -> None:
    """Nobody counts them, neither we nor mergekit."""
    if method != "linear":
        pytest.importorskip("mergekit")
    file = tmp_path / "recipe.yml"
    slices = f"slices: [{{sources: [{{model: {a}, layer_range: [0, 1000000000]}}]}}]"
    file.write_text(f"merge_method: {method}\n{block}{'{' if block else ''}{slices}{'}}' if block else ''}\n")
    assert "has 2 layers, not 1000000000" in refused("merge", "--config", file, "-o", tmp_path / "out")


NESTED = "a: " + "[" * 20_000 + "]" * 20_000
ALIASES = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'] * 9)}]" for i in range(9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NESTED, "nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "nested more than 100 deep"),
        (ALIASES, "more than 100,000 values"),
        ("a: &a [*a]", "nested more than 100 deep"),
        ("a: 2001-99-99", "not valid YAML"),
        (f"a: {'9' * 5000}", "not valid YAML"),
    ],
    ids=["nested", "deep", "aliases", "itself", "date", "number"],
)
def test_yaml_that_no_reader_bears(text: str, words: str, refused: Run, tmp_path: Path) -> None:
    file = tmp_path / "file.yml"
    file.write_text(f"merge_method: linear\n{text}\n")
    for command in (("merge",), ("study", "distance")):
        line = refused(*command, "--config", file, "-o", tmp_path / "out")
        assert words in line and str(file) in line and len(line) < 600


def test_own_methods_run_here(write: Any, ask: Run, tmp_path: Path, a: Path, b: Path) -> None:
    ask("merge", "--config", write("merge_method: average", settings="{weight: 3}"), "-o", tmp_path / "out")
    ask("merge", a, b, "--match", "none", "-o", tmp_path / "plain")
    ours, plain = weights(tmp_path / "out"), weights(tmp_path / "plain")
    assert ours.keys() == plain.keys() and all(ours[name].equal(plain[name]) for name in plain)


def test_learning_over_a_wider_range_of_lambda(ask: Run, tmp_path: Path) -> None:
    a, b = (folder(tmp_path / f"{seed}", "GPT2LMHeadModel", seed) for seed in (0, 1))
    told = {"match": "full", "match_with": "learned", "steps": 4, "data": "self", "samples": 64}
    file = tmp_path / "recipe.yml"
    models = f"models: [{{model: {a}}}, {{model: {b}}}]\nparameters: {{weight: 1}}"
    align = json.dumps({**told, "lambda_range": [0, 1], "anchor": str(a)})
    file.write_text(f"merge_method: linear\n{models}\nalign: {align}\n")
    ask("merge", "--config", file, "-o", tmp_path / "file")
    words = [word for name, value in told.items() for word in (f"--{name.replace('_', '-')}", value)]
    ask("merge", a, b, *words, "-o", tmp_path / "usual", "--anchor", 0)
    ask("merge", a, b, *words, "-o", tmp_path / "wide", "--anchor", 0, "--lambda-range", "0,1")
    ours, wide, usual = (weights(tmp_path / name) for name in ("file", "wide", "usual"))
    assert all(ours[name].allclose(wide[name]) for name in wide)
    assert not all(wide[name].allclose(usual[name]) for name in wide)


def test_the_folder_is_what_users_of_mergekit_expect(write: Any, ask: Run, tmp_path: Path, a: Path, b: Path) -> None:
    file, out = write(after="align: {symmetry: paper, anchor: auto}"), tmp_path / "out"
    result = ask("merge", "--config", file, "-o", out, "--out-shard-size", "5K")
    assert result["match"] == "paper" and result["models"] == [str(a), str(b)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 1 and set(index["weight_map"].values()) == set(shards)
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    named = file.read_text().replace(str(a), a.name).replace(str(b), b.name)
    assert (out / "mergekit_config.yml").read_text() == named
    front = (out / "README.md").read_text().split("---")[1]
    for line in ("library_name: transformers", "base_model:", "tags:", "- merge", "- mergekit"):
        assert line in front.splitlines(), line


def test_what_is_left_out_on_request(ask: Run, tmp_path: Path, a: Path, b: Path) -> None:
    shutil.copytree(a, tmp_path / "a")
    for name in ("tokenizer_config.json", "LICENSE"):
        (tmp_path / "a" / name).write_text("{}")
    file = tmp_path / "recipe.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {tmp_path / 'a'}}}, {{model: {b}}}]\n"
                    "parameters: {weight: 1}\n")  # fmt: skip
    ask("merge", "--config", file, "-o", tmp_path / "out", "--no-copy-tokenizer", "--no-write-model-card")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"config.json", "model.safetensors", "onebasin.json", "LICENSE"}


def test_steps_are_lines_with_v(write: Any, run: Run, tmp_path: Path) -> None:
    result = run("merge", "--config", write(after="align: {symmetry: paper}"), "-o", tmp_path / "out", "-v")
    assert result.exit_code == 0 and any("verifying" in line for line in result.stderr.splitlines())


def test_vocabularies_that_differ_are_refused(run: Run, refused: Run, tmp_path: Path, a: Path, b: Path) -> None:
    words = [f"w{i}" for i in range(23)]
    for name, source, vocabulary in (("one", a, words), ("two", b, [*words[:20], "x", "y", "w20"])):
        shutil.copytree(source, tmp_path / name)
        (tmp_path / name / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
    line = refused("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "out")
    assert "has 23 tokens" in line and "20 ids agree" in line
    assert "20 'w20' / 'x', 21 'w21' / 'y', 22 'w22' / 'w20'" in line and "--tokenizer-source (union, base" in line


def test_a_linear_file_refuses_models_that_cannot_be_averaged(refused: Run, tmp_path: Path) -> None:
    """As `merge A B` does: equal shapes are not enough, and nothing is left out in silence."""
    small: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    one = folder(tmp_path / "one", "LlamaForCausalLM", **small)
    others = {
        "number of layers": {"num_hidden_layers": 3},
        "the size of": {"num_attention_heads": 2, "num_key_value_heads": 2},
    }
    for number, (words, change) in enumerate(others.items()):
        other = folder(tmp_path / f"other-{number}", "LlamaForCausalLM", 1, **{**small, **change})
        file = tmp_path / "recipe.yml"
        for models in ((one, other), (other, one)):
            listed = ", ".join(f"{{model: {model}}}" for model in models)
            file.write_text(f"merge_method: linear\nmodels: [{listed}]\nparameters: {{weight: 1}}\n")
            line = refused("merge", "--config", file, "-o", tmp_path / "out")
            assert words in line and str(one) in line and str(other) in line
    pieces = ", ".join(f"{{sources: [{{model: {model}, layer_range: [0, 1]}}]}}" for model in (one, other))
    file.write_text(f"merge_method: linear\nslices: [{pieces}]\nparameters: {{weight: 1}}\n")
    assert "the size of 'kv'" in refused("merge", "--config", file, "-o", tmp_path / "out")


def test_a_linear_file_tells_of_tensors_that_the_layout_lacks(ask: Run, tmp_path: Path) -> None:
    lean, whole = (folder(tmp_path / kind, kind) for kind in ("BertForMaskedLM", "BertModel"))
    file = tmp_path / "recipe.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {lean}}}, {{model: {whole}}}]\n"
                    f"base_model: {lean}\nparameters: {{weight: 1}}\n")  # fmt: skip
    notes = ask("merge", "--config", file, "-o", tmp_path / "out")["notes"]
    assert any(note.startswith("left out") and "pooler" in note for note in notes), notes


def test_a_file_takes_a_seed_beside_it(write: Any, ask: Run, tmp_path: Path) -> None:
    for words, seed in (((), 5), (("--seed", 0), 0), (("--seed", 7), 7)):
        ask("merge", "--config", write(after="random_seed: 5"), "-o", tmp_path / "out", "--overwrite", *words)
        assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["options"]["seed"] == seed
