# SPDX-License-Identifier: Apache-2.0
"""What people bring who come from mergekit: adapters, packed and quantised files, several documents, its switches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import folder, weights
from safetensors.torch import save_file

from onebasin.cli.switches import translated

Run = Callable[..., Any]


def adapter(place: Path, base: Path) -> Path:
    """A LoRA adapter of a tensor of every layer."""
    name, tensor = next(
        (name, one) for name, one in weights(base).items() if name.endswith("intermediate.dense.weight")
    )
    place.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (place / "adapter_config.json").write_text(json.dumps(config))
    key, rows, columns = f"base_model.model.{name.removesuffix('.weight')}", *tensor.shape
    torch.manual_seed(0)
    save_file({f"{key}.lora_A.weight": torch.randn(2, columns), f"{key}.lora_B.weight": torch.randn(rows, 2)},
              place / "adapter_model.safetensors")  # fmt: skip
    return place


def test_an_adapter_stands_behind_its_base(ask: Run, refused: Run, tmp_path: Path, a: Path, b: Path) -> None:
    """Wherever a model is named; the result is that of the merged adapter."""
    lora = adapter(tmp_path / "lora", a)
    file = tmp_path / "one.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {a}+{lora}, parameters: {{weight: 1}}}}]\n")
    ask("merge", "--config", file, "-o", tmp_path / "whole")
    ask("merge", f"{a}+{lora}", b, "-o", tmp_path / "out", "--method", "average", "--match", "none")
    ask("merge", tmp_path / "whole", b, "-o", tmp_path / "expected", "--method", "average", "--match", "none")
    expected = weights(tmp_path / "expected")
    assert all(tensor.equal(expected[name]) for name, tensor in weights(tmp_path / "out").items())
    assert ask("verify", f"{a}+{lora}", tmp_path / "whole")["same"]
    assert ask("distance", f"{a}+{lora}", tmp_path / "whole")["distance"] == 0
    for command in ("inspect", "infer"):
        described = ask(command, f"{a}+{lora}")
        assert described == {**ask(command, a), "model": f"{a}+{lora}"}
        assert "lacking" in refused(command, f"{a}+{tmp_path / 'lacking'}")


def test_an_adapter_alone_is_told_where_to_stand(refused: Run, tmp_path: Path, a: Path, b: Path) -> None:
    lora = adapter(tmp_path / "lora", a)
    said = refused("merge", lora, b, "-o", tmp_path / "out")
    assert f"is only an adapter; write it with its base model: '{a}+{lora}'" in said


def test_packed_and_quantised_models_are_told_the_way(refused: Run, tmp_path: Path, a: Path, b: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "model-q4.gguf").write_bytes(b"GGUF")
    for given in (packed, packed / "model-q4.gguf"):
        assert "gguf_file='model-q4.gguf')" in refused("merge", given, b, "-o", tmp_path / "out")
    shutil.copy(a / "config.json", packed)  # as in most repositories on the hub
    assert "gguf_file='model-q4.gguf')" in refused("merge", packed, b, "-o", tmp_path / "out")
    few = shutil.copytree(a, tmp_path / "few")
    config = json.loads((few / "config.json").read_text())
    for method, way in {
        "bitsandbytes": ".dequantize().save_pretrained(FOLDER)",
        "mxfp4": "Mxfp4Config(dequantize=True)",
        "gptq": "(gptq); give the model in floating point that it was made from",
    }.items():
        (few / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
        assert way in refused("merge", few, b, "-o", tmp_path / "out")


def test_several_documents_are_merged_one_after_another(ask: Run, tmp_path: Path, a: Path, b: Path, c: Path) -> None:
    def document(models: dict[Any, float], name: str = "") -> str:
        rows = "".join(f"  - {{model: {model}, parameters: {{weight: {share}}}}}\n" for model, share in models.items())
        return f"{name and f'name: {name}'}\nmerge_method: linear\nmodels:\n{rows}"

    file = tmp_path / "several.yml"
    file.write_text("---\n".join([document({a: 1, b: 3}, "first"), document({"first": 1, c: 1})]))
    found = ask("merge", "--config", file, "-o", tmp_path / "out", judged=True)
    one, two, three = map(weights, (a, b, c))
    for name, tensor in weights(tmp_path / "out").items():
        torch.testing.assert_close(tensor, 0.125 * one[name] + 0.375 * two[name] + 0.5 * three[name])
    assert found["verdict"] and (tmp_path / "out" / "mergekit_config.yml").read_text().count("merge_method") == 2


@pytest.mark.parametrize(
    ("first", "said"),
    [("", "needs a name"), ("name: ../up", "needs a name"), ("name: x\n---\nname: x", "two documents are called 'x'")],
)
def test_documents_need_names(first: str, said: str, refused: Run, tmp_path: Path, a: Path) -> None:
    rest = f"\nmerge_method: linear\nmodels: [{{model: {a}, parameters: {{weight: 1}}}}]\n"
    file = tmp_path / "several.yml"
    file.write_text("---\n".join(part + rest for part in (*first.split("\n---\n"), "")))
    assert said in refused("merge", "--config", file, "-o", tmp_path / "out")


def test_switches_of_mergekit_are_taken_or_explained(run: Run, refused: Run, tmp_path: Path, a: Path, b: Path) -> None:
    file = tmp_path / "one.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {a}, parameters: {{weight: 1}}}}]\n")
    given = [
        "--random-seed",
        "3",
        "--lazy-unpickle",
        "--write-threads",
        "2",
        "--no-trust-remote-code",
        "--clone-tensors",
    ]
    found = run("merge", "--config", file, "-o", tmp_path / "out", *given)
    assert found.exit_code == 0 and "--lazy-unpickle has no effect: weights are always read" in found.stderr
    assert "architectures cannot be merged" in refused("merge", a, b, "-o", tmp_path / "no", "--allow-crimes")
    assert translated(["--cuda", "-j", "4", "--", "--cuda"]) == (
        ["--device", "cuda", "--workers", "4", "--", "--cuda"],
        [],
    )


def test_every_switch_of_mergekit_is_known(run: Run) -> None:
    """Those of the installed release, each accepted, translated or explained."""
    script = pytest.importorskip("mergekit.scripts.run_yaml")
    same = {"--help", "-v", "--quiet", "--device", "--out-shard-size", "--copy-tokenizer",
            "--no-copy-tokenizer", "--write-model-card", "--no-write-model-card"}  # fmt: skip
    assert all(name in run("merge", "--help").output for name in same)
    for param in script.main.params:
        for name in {one for one in (*param.opts, *param.secondary_opts) if one.startswith("-")} - same:
            try:
                found, notes = translated([name, "1"])
            except ValueError:
                continue
            assert notes or found[0] != name, name


def test_sentence_transformers_keep_their_modules(ask: Run, tmp_path: Path) -> None:
    models = [folder(tmp_path / str(seed), "BertModel", seed) for seed in (0, 1)]
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for number, (path, kind) in enumerate(kinds.items())]  # fmt: skip
    for model in models:
        (model / "modules.json").write_text(json.dumps(modules))
        (model / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
        (model / "config_sentence_transformers.json").write_text("{}")
        (model / "1_Pooling").mkdir()
        (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (model / "1_Pooling" / "code.py").write_text("raise SystemExit")
    for _ in range(2):  # the second replaces the first
        ask("merge", *models, "-o", tmp_path / "out", "--match", "paper", "--overwrite")
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    names = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"}
    assert names <= written and "1_Pooling/code.py" not in written
    (models[1] / "1_Pooling" / "config.json").unlink()
    (models[1] / "1_Pooling" / "config.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    with pytest.raises(Exception, match="leads out"):
        from onebasin import Folder

        Folder(models[1])
