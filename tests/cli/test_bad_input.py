# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear line on stderr, exit code 2, and nothing left behind.

The fixture `refused` checks all of this; a test here checks that the line says what is wrong, and where.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder
from safetensors.torch import load_file, save_file

from onebasin.models import Rewritten
from onebasin.models.shards import Shard
from onebasin.symmetry import Alignment


@pytest.fixture
def damaged(a: Path, tmp_path: Path) -> Path:
    """A copy of `a` to do harm to."""
    return Path(shutil.copytree(a, tmp_path / "damaged"))


POSITIONS = "bert.embeddings.position_embeddings.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


def edit(where: Path, change: Change) -> None:
    tensors = load_file(where / "model.safetensors")
    change(tensors)
    save_file(tensors, where / "model.safetensors", {"format": "pt"})


# --- the models -----------------------------------------------------------------------------------------------


def test_a_missing_folder(refused: Any, a: Path, tmp_path: Path) -> None:
    for words in (("match", tmp_path / "no", a, "-o", tmp_path / "out"), ("merge", a, "./no", "-o", tmp_path / "out"),
                  ("verify", a, "./no"), ("distance", "./no", a), ("inspect", "./no"),
                  ("canonical", "./no", "-o", tmp_path / "out")):  # fmt: skip
        assert "there is no folder" in refused(*words)


@pytest.mark.parametrize("keep", [0, 5, 300, 5000])
def test_truncated_weights(refused: Any, a: Path, damaged: Path, tmp_path: Path, keep: int) -> None:
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    line = refused("match", damaged, a, "-o", tmp_path / "out")
    assert "is damaged or cut short" in line and str(file) in line


def test_corrupt_weights(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    file = damaged / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert str(file) in refused("merge", a, damaged, "-o", tmp_path / "out")


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


@pytest.mark.parametrize(
    "change, words",
    [
        (_cut, ["'bert.encoder.layer.1.output.dense.weight'", "shape (12, 9)"]),
        (lambda t: t.update({"bert.extra.weight": torch.ones(2)}), ["does not know", "'bert.extra.weight'"]),
        (
            lambda t: t.pop("bert.encoder.layer.0.output.dense.bias"),
            ["lack", "'bert.encoder.layer.0.output.dense.bias'"],
        ),
        (lambda t: t["bert.pooler.dense.bias"].fill_(torch.nan), ["'bert.pooler.dense.bias'", "NaN"]),
        (lambda t: t["classifier.weight"][0].fill_(-torch.inf), ["'classifier.weight'", "infinite"]),
    ],
    ids=["shape", "unknown", "missing", "nan", "inf"],
)
@pytest.mark.parametrize("job", ["match", "merge"])
def test_tensors(
    refused: Any, a: Path, damaged: Path, tmp_path: Path, job: str, change: Change, words: list[str]
) -> None:
    edit(damaged, change)
    line = refused(job, a, damaged, "-o", tmp_path / "out")
    assert all(word in line for word in words)
    assert str(damaged) in line


@pytest.mark.parametrize("match", ["none", "full"])
def test_the_model_that_a_merge_is_written_like_is_whole(
    refused: Any, a: Path, damaged: Path, tmp_path: Path, match: str
) -> None:
    """Its head is in no table, and the anchor is not rewritten, so it was not run either."""
    edit(damaged, lambda t: t.pop("classifier.weight"))
    line = refused("merge", damaged, a, "-o", tmp_path / "out", "--match", match)
    assert str(damaged) in line and "needs 'classifier.weight', which the weights lack" in line


@pytest.mark.parametrize(
    "kind, config, words",
    [
        ("ViTForImageClassification", {}, ["family", "bert", "vit"]),
        ("RobertaForSequenceClassification", {}, ["family", "bert", "roberta"]),
        ("BertForSequenceClassification", {"num_hidden_layers": 3}, ["number of layers", "2", "3"]),
        ("BertForSequenceClassification", {"num_attention_heads": 2}, ["size of 'head'", "3", "2"]),
        ("BertForSequenceClassification", {"intermediate_size": 9}, ["size of 'ffn'", "10", "9"]),
        ("BertForSequenceClassification", {"vocab_size": 24}, ["size of 'vocab'", "23", "24"]),
        ("BertForSequenceClassification", {"hidden_act": "relu"}, ["activation function"]),
    ],
)
def test_models_that_cannot_be_paired(
    refused: Any, a: Path, tmp_path: Path, kind: str, config: dict[str, Any], words: list[str]
) -> None:
    other = folder(tmp_path / "other", kind, **config)
    for command in (("match", a, other, "-o", tmp_path / "out"), ("distance", a, other),
                    ("merge", a, other, "-o", tmp_path / "out", "--match", "paper")):  # fmt: skip
        line = refused(*command)
        assert all(word in line for word in [*words, str(a), str(other)])


def test_an_unknown_model_type(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    text = (damaged / "config.json").read_text()
    (damaged / "config.json").write_text(text.replace('"model_type": "bert"', '"model_type": "birt"'))
    line = refused("match", damaged, a, "-o", tmp_path / "out")
    assert "'birt'" in line and "bert" in line and "--family" in line
    assert "no family 'nosuch'" in refused("inspect", a, "--family", "nosuch")


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (Path.write_text, (self.marker, "the pickle ran this"))  # type: ignore[return-value]


def test_a_pickle_that_would_run_code(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    weights = load_file(damaged / "model.safetensors")
    torch.save({**weights, "x": Hostile(marker)}, damaged / "pytorch_model.bin")
    (damaged / "model.safetensors").unlink()
    for command in (("match", damaged, a, "-o", tmp_path / "out"), ("merge", a, damaged, "-o", tmp_path / "out"),
                    ("verify", a, damaged), ("distance", damaged, a), ("inspect", damaged)):  # fmt: skip
        line = refused(*command)
        assert "could run code (Unsupported global: GLOBAL getattr was not an allowed global" in line
        assert "weights_only" not in line  # how to load it all the same
        assert not marker.exists()


def test_a_pickle_of_another_protocol(refused: Any, run: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    """torch warns of it, on a line of its own."""
    weights = load_file(damaged / "model.safetensors")
    (damaged / "model.safetensors").unlink()
    torch.save({**weights, "x": Hostile(tmp_path / "marker")}, damaged / "pytorch_model.bin", pickle_protocol=3)
    command = [sys.executable, "-m", "onebasin", "inspect", str(damaged)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("way", ["a pickle with complex numbers", "a setting that transformers renamed"])
def test_what_libraries_warn_of_is_no_second_line(
    refused: Any, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    weights = load_file(damaged / "model.safetensors")
    if "pickle" in way:
        (damaged / "model.safetensors").unlink()
        name = "bert.embeddings.word_embeddings.weight"
        torch.save({**weights, name: weights[name].to(torch.complex64)}, damaged / "pytorch_model.bin")
    else:
        config = json.loads((damaged / "config.json").read_text())
        (damaged / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "yarn"}}))
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        refused("canonical", damaged, "-o", tmp_path / "out")
    assert not heard, [str(warning.message) for warning in heard]


def test_a_pickle_cut_short(refused: Any, a: Path, damaged: Path) -> None:
    torch.save(load_file(damaged / "model.safetensors"), damaged / "pytorch_model.bin")
    (damaged / "model.safetensors").unlink()
    data = (damaged / "pytorch_model.bin").read_bytes()
    for share in (0.1, 0.5, 0.9):
        (damaged / "pytorch_model.bin").write_bytes(data[: int(share * len(data))])
        line = refused("inspect", damaged)
        assert "is damaged" in line and "Errno" not in line


def test_a_weight_file_without_tensors(refused: Any, a: Path, damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    torch.save({}, damaged / "pytorch_model.bin")
    for command in (("distance", damaged, a), ("inspect", damaged), ("verify", a, damaged), ("check", a, damaged)):
        assert "pytorch_model.bin' holds no tensors" in refused(*command)


def test_a_config_that_wants_other_shapes(refused: Any, tmp_path: Path) -> None:
    """Which the table does not name: transformers tells it in a report on the console, which is not shown."""
    gpt2 = folder(tmp_path / "gpt2", "GPT2LMHeadModel")
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**config, "n_positions": 13}))
    line = refused("verify", gpt2, gpt2)
    assert "'transformer.wpe.weight' has shape (12, 12), and GPT2LMHeadModel needs (13, 12)" in line


def test_an_error_that_is_no_sentence(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    """Of transformers, about a value that no config has: what kind of error it is stands before it."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "to_dict": 1}))
    assert "TypeError: 'int' object is not callable" in refused("match", damaged, a, "-o", tmp_path / "out")


def test_a_name_without_end(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    edit(damaged, lambda t: t.update({"x" * 100_000: torch.ones(2)}))
    line = refused("match", damaged, a, "-o", tmp_path / "out")
    assert "does not know 'xxx" in line and len(line) < 1500


def test_a_tokenizer_that_is_a_link_to_somebody_s_file(refused: Any, a: Path, damaged: Path, tmp_path: Path) -> None:
    """Its content would go into the output, which may be published."""
    (tmp_path / "secret").write_text("{}")
    (damaged / "tokenizer.json").symlink_to(tmp_path / "secret")
    out = ("-o", tmp_path / "out")
    for words in (("match", damaged, a, *out), ("merge", a, damaged, *out), ("inspect", damaged),
                  ("canonical", damaged, *out), ("merge", a, damaged / "model.safetensors", *out)):  # fmt: skip
        assert "leads out of its folder" in refused(*words)


@pytest.mark.parametrize("how", ["missing", "no weights", "broken config", "cut short"])
def test_all_inputs_are_looked_at_before_the_first_is_worked_on(
    refused: Any, a: Path, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "missing":
        damaged = tmp_path / "missing"
    elif how == "no weights":
        (damaged / "model.safetensors").unlink()
    elif how == "broken config":
        text = (damaged / "config.json").read_text()
        (damaged / "config.json").write_text(text.replace('"num_attention_heads": 3', '"num_attention_heads": "x"'))
    else:
        (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:50])
    data = tmp_path / "rows.csv"
    data.write_text("text,label\na,0\n")

    def work(*_: object, **__: object) -> None:
        pytest.fail("work began")

    for place in (
        # First: a module that is imported while another is replaced would keep that.
        "jobs.layers.load_task",
        "jobs.measure.load_task",
        "jobs.measure.load_model",
        "data.load_task",
        "data.load_model",
        "jobs.folders.Canonical",
        "jobs.match.align",
        "jobs.merge.in_one_frame",
        "jobs.refine.Data",
        "jobs.mergekit.merge_file.write_adapted",
        "running.verification.in_order",
    ):
        monkeypatch.setattr(f"onebasin.{place}", work)
    on = ("--task", "text-classification", "--data", data)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: linear\nparameters: {weight: 1}\n"
                      f"models: [{{model: {a}+{tmp_path / 'lora'}}}, {{model: {damaged}}}]\n")  # fmt: skip
    out = ("-o", tmp_path / "out")
    for words in (
        ("evaluate", a, damaged, *on),
        ("barrier", a, damaged, *on, *out),
        ("study", "levels", a, damaged, *on, *out),
        ("study", "simplex", a, a, damaged, *on, *out),
        ("match", a, damaged, "--symmetry", "full", *out),
        ("merge", a, a, damaged, "--match", "full", *out),
        ("merge", "--config", recipe, *out),
        ("refine", a, "--teachers", damaged, *out),
        ("verify", a, damaged, "--tensors"),
    ):
        assert str(damaged) in refused(*words), words


def test_statistics_that_are_not_there_are_missed_before_matching(
    refused: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebasin.jobs.merge.in_one_frame", lambda *_, **__: pytest.fail("work began"))
    words = ("merge", a, b, "-o", tmp_path / "out", "--method", "fisher", "--statistics")
    assert "there is no file" in refused(*words, f"{tmp_path / 'x'},{tmp_path / 'y'}")
    assert "2 models need 2 statistics files, not 1" in refused(*words, tmp_path / "x")


@pytest.mark.parametrize("how", [("--method", "fisher"), ("--method", "regmean"), ("--match-with", "activations")])
def test_data_that_are_not_there_are_missed_before_any_work(
    refused: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, str]
) -> None:
    monkeypatch.setattr("onebasin.jobs.merge.opened", lambda *_, **__: pytest.fail("work began"))
    for data in ("none.jsonl", "none.jsonl#train", f"self,{tmp_path}/none.csv"):
        line = refused("merge", a, b, "-o", tmp_path / "out", *how, "--data", data)
        assert "cannot read the data file" in line and "none." in line


@pytest.mark.parametrize("level", ["none", "paper"])
def test_a_config_that_contradicts_the_weights(
    refused: Any, run: Any, a: Path, damaged: Path, tmp_path: Path, level: str
) -> None:
    """What is merged as it is would load no better than what is matched."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "vocab_size": 31}))
    words = ("merge", a, damaged, "-o", tmp_path / "out", "--match", level)
    line = refused(*words)
    assert str(damaged) in line and "(23, 12)" in line and "(31, 12) by config.json" in line
    assert level != "none" or run(*words, "--no-verify").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        "match X A",
        "match A X",
        "match A X --match full",
        "canonical X",
        "merge X A --match permutation",
        "merge A X --match none",
    ],
)
def test_weights_that_contradict_their_config_without_a_run(
    refused: Any, a: Path, damaged: Path, tmp_path: Path, words: str
) -> None:
    """`--verify tensors` runs no model, and what is then written would not load."""
    edit(damaged, lambda t: t.update({POSITIONS: torch.cat([t[POSITIONS], t[POSITIONS][-1:]])}))
    models = {"A": a, "X": damaged}
    line = refused(*(models.get(word, word) for word in words.split()), "-o", tmp_path / "out", "--verify", "tensors")
    assert str(damaged) in line and f"'{POSITIONS}' has shape (13, 12)" in line and "(12, 12) by config.json" in line


# --- the output -----------------------------------------------------------------------------------------------


def test_an_output_that_exists(refused: Any, a: Path, b: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for command in (("match", b, a), ("merge", a, b, "--match", "paper"), ("canonical", a)):
        assert "--overwrite" in refused(*command, "-o", tmp_path / "out")
        assert "not a model folder" in refused(*command, "-o", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_full_temporary_folder(
    refused: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")

    monkeypatch.setattr(os, "mkdir", full)
    assert refused("match", b, a, "-o", tmp_path / "out") == "error: '/tmp/x': No space left on device"


def test_a_disk_that_fills_at_the_end(
    refused: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card and the record are written last."""
    real = Path.write_text

    def full(self: Path, *args: Any, **options: Any) -> int:
        if self.name in ("README.md", "onebasin.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert "the disk is full" in refused("merge", a, b, "-o", tmp_path / "out", "--match", "none")


def test_an_output_that_is_an_input(refused: Any, a: Path, damaged: Path) -> None:
    for command in (("match", damaged, a), ("match", a, damaged), ("merge", a, damaged), ("canonical", damaged)):
        assert "one of the inputs" in refused(*command, "-o", damaged, "--overwrite")


def test_a_place_for_the_anchor_that_exists(refused: Any, tmp_path: Path) -> None:
    first, second = (folder(tmp_path / f"{seed}", "ViTForImageClassification", seed) for seed in (0, 1))
    (tmp_path / "out-anchor").mkdir()
    line = refused("match", second, first, "-o", tmp_path / "out", "--symmetry", "full")
    assert "out-anchor" in line and "exists" in line


def test_a_place_for_the_alignment_that_cannot_be_written(refused: Any, a: Path, b: Path, tmp_path: Path) -> None:
    (tmp_path / "no").write_text("a file")
    where = tmp_path / "no" / "maps.safetensors"
    assert str(where) in refused("match", b, a, "-o", tmp_path / "out", "--alignment", where)


def test_a_full_disk(run: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the output is full, that of the temporary folder is not: what was matched is all that is kept."""
    real = Shard.add

    def add(shard: Shard, name: str, tensor: torch.Tensor) -> None:
        real(shard, name, tensor)
        if str(shard.path).startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    new = tmp_path / "new"
    for command in (("match", b, a), ("merge", a, b, "--match", "paper"), ("canonical", a)):
        with monkeypatch.context() as full:
            full.setattr(Shard, "add", add)
            failed = run(*command, "-o", new / "out")
        assert failed.exit_code == 2 and failed.stderr.count("\n") == 1
        assert "the disk is full" in failed.stderr and str(new) in failed.stderr
        if command[0] == "canonical":
            assert not new.exists()
            continue
        assert "continue with --resume" in failed.stderr
        assert [path.name for path in new.iterdir()] == [".out.units"]
        assert run(*command, "-o", new / "out", "--resume").exit_code == 0
        assert [path.name for path in new.iterdir()] == ["out"]
        shutil.rmtree(new)


@pytest.mark.parametrize("job", ["match", "merge"])
def test_a_model_that_differs_is_refused(
    refused: Any, run: Any, a: Path, b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """One wrong tensor in the rewriting: the figure is in the error, and there is no model."""
    real = Rewritten.read

    def wrong(self: Rewritten[Alignment], role: str, *how: Any) -> torch.Tensor:
        out = real(self, role, *how)
        return out * 1.5 if role == "encoder.layer.1.attention.self.value.weight" and self.alignment.elements else out

    monkeypatch.setattr(Rewritten, "read", wrong)
    paper = ["--match", "paper"] if job == "merge" else []
    line = refused(job, b, a, "-o", tmp_path / "out", *paper)
    assert "differs from the original by" in line and "nothing was written" in line
    run(job, b, a, "-o", tmp_path / "out", "--no-verify", *paper)
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("depth", [500, 100_000])
def test_json_that_is_nested_too_deeply(
    refused: Any, a: Path, damaged: Path, tmp_path: Path, name: str, depth: int
) -> None:
    if name == "model.safetensors.index.json":
        (damaged / "model.safetensors").unlink()
    (damaged / name).write_text('{"a_config": ' * depth + "1" + "}" * depth)
    line = refused("match", damaged, a, "-o", tmp_path / "out")
    assert str(damaged / name) in line and "valid JSON" in line


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "[]", "{}"])
def test_our_own_files_with_notes_that_say_nothing(refused: Any, a: Path, b: Path, tmp_path: Path, text: str) -> None:
    maps, statistics = tmp_path / "maps.safetensors", tmp_path / "statistics.safetensors"
    save_file({}, maps, {"format": "onebasin-alignment-1", "batch": text if text != "{}" else "[1]"})
    save_file({}, statistics, {"format": "onebasin-statistics-1", "facts": text})
    assert str(maps) in refused("verify", a, a, "--tensors", "--alignment", maps)
    given = ("--method", "fisher", "--match", "none", "--statistics", f"{statistics},{statistics}")
    assert str(statistics) in refused("merge", a, b, "-o", tmp_path / "out", *given)


# --- the options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (("--layers", "2"), ["no layer 2", "0 to 1"]),
        (("--layers", "0-7"), ["no layer 2", "0 to 1"]),
        (("--layers", "one"), ["'one'", "0-4"]),
        (("--layers", "3-1"), ["'3-1'"]),
        (("--layers", "0-9999999999"), ["'0-9999999999'", "999999"]),
        (("--parts", "attention,mlp"), ["unknown part 'mlp'", "attention, ffn"]),
        (("--rescale", "twice"), ["unknown rescale 'twice'", "none, after, joint"]),
        (("--dtype", "int8"), ["'int8'", "float32, float16, bfloat16, float64"]),
        (("--precision", "float16"), ["'float16'", "float32, float64"]),
        (("--device", "abacus"), ["abacus"]),
        (("--device", "meta"), ["'meta' is not available here"]),
        (("--device", "hpu"), ["'hpu' is not available here"]),
        (("--tensor-weight", "query"), ["'query'", "NAME=NUMBER"]),
        (("--tensor-weight", "quary=2"), ["--tensor-weight quary: no tensor's name contains it", "query"]),
        (("--family", "nosuch"), ["no family 'nosuch'"]),
    ],
)
@pytest.mark.parametrize("job", ["match", "merge"])
def test_options_of_both(
    refused: Any, a: Path, b: Path, tmp_path: Path, job: str, options: tuple[str, ...], words: list[str]
) -> None:
    line = refused(job, a, b, "-o", tmp_path / "out", *options)
    assert all(word in line for word in words)


NAMES = ["a\\[/b]", "[/b]", "[bold]x", "[link=file:///x]", ":smile:", "\x1b[31mx", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(
    refused: Any, run: Any, a: Path, b: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the console, no part of a name is markup, and none commands the terminal."""
    shown = "".join(one if one.isprintable() else " " for one in name)
    assert f"there is no folder './{shown}'" in refused("inspect", f"./{name}")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(a, f"./{name}")
    for words in (("inspect", f"./{name}"), ("match", f"./{name}", b, "-o", tmp_path / "out"),
                  ("merge", a, f"./{name}", "-o", tmp_path / "merged", "-v", "--match", "paper")):  # fmt: skip
        result = run(*words)
        assert result.exit_code == 0, result.stderr
        assert words[0] != "merge" or f"verifying ./{shown}" in result.stderr
    edit(Path(f"./{name}"), lambda tensors: tensors.update({f"{name}.weight": torch.zeros(1)}))
    assert shown in run("inspect", f"./{name}").stderr


def test_an_unknown_symmetry(refused: Any, a: Path, b: Path, tmp_path: Path) -> None:
    for words in (("match", a, b, "-o", tmp_path / "out", "--symmetry", "magic"), ("inspect", a, "--symmetry", "magic"),
                  ("merge", a, b, "-o", tmp_path / "out", "--match", "magic")):  # fmt: skip
        line = refused(*words)
        assert "'magic'" in line and "paper, permutation, orthogonal, full, invertible" in line


@pytest.mark.parametrize(
    "options, words",
    [
        (("--weights", "0.5,x"), ["'0.5,x'", "commas"]),
        (("--weights", "0.5"), ["2 models need 2 weights, not 1"]),
        (("--weights", "0.2,0.3,0.5"), ["2 models need 2 weights, not 3"]),
        (("--weights", "nan,1"), ["finite"]),
        (("--anchor", "2"), ["--anchor 2", "0 to 1"]),
        (("--anchor", "first"), ["'first'", "auto"]),
        (("--heads-from", "5"), ["--heads-from 5", "0 to 1"]),
        (("--method", "stir"), ["unknown merge_method 'stir'", "did you mean"]),
    ],
)
def test_options_of_merge(
    refused: Any, a: Path, b: Path, tmp_path: Path, options: tuple[str, ...], words: list[str]
) -> None:
    line = refused("merge", a, b, "-o", tmp_path / "out", *options)
    assert all(word in line for word in words)


def test_merging_one_model(refused: Any, a: Path, tmp_path: Path) -> None:
    assert "at least two models" in refused("merge", a, "-o", tmp_path / "out")


def test_verify_needs_an_output_in_common(refused: Any, a: Path, tmp_path: Path) -> None:
    assert "no output in common" in refused("verify", a, folder(tmp_path / "base", "BertModel"))
    assert "'float8'" in refused("verify", a, a, "--precision", "float8")


def test_words_that_no_command_takes(run: Any, a: Path, tmp_path: Path) -> None:
    """The parser of the command line answers these in its own words."""
    for words in (("mach", a), ("match", a), ("match", a, a), ("match", a, a, "-o", tmp_path / "out", "--fast")):
        result = run(*words)
        assert result.exit_code == 2 and result.stdout == "" and "Usage:" in result.stderr
    assert not list(tmp_path.iterdir())
