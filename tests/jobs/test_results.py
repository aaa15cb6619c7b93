# SPDX-License-Identifier: Apache-2.0
"""What jobs return, and alignments that move whatever belongs to a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from pairs import folder, model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from zoo import inputs, outputs

import onebasin
from onebasin.fusion import loadable
from onebasin.jobs import keywords
from onebasin.jobs.options import Options
from onebasin.settings import OutputSettings

pytestmark = pytest.mark.usefixtures("three_sweeps")

FAMILIES = {"GPT2LMHeadModel": ("paper", "permutation", "full"), "LlamaForCausalLM": ("paper", "full")}
LEVELS = [(kind, level) for kind, levels in FAMILIES.items() for level in levels]


def finetuned(one: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """A model a little way from another, which shares its memory with none."""
    moved: PreTrainedModel = type(one)(one.config)
    moved.load_state_dict(one.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return moved.eval()


def same_function(one: PreTrainedModel, two: PreTrainedModel) -> None:
    given = inputs(one)
    for mine, theirs in zip(outputs(one, given), outputs(two, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_a_result_is_the_facts_and_the_model(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", seed=1)
    written = onebasin.merge([a, b], tmp_path / "out", match="paper")
    assert isinstance(written, onebasin.MergeResult) and written.output == tmp_path / "out"
    assert written.distance_after == written["distance_after"] and json.loads(json.dumps(written)) == written
    assert written.verdict is not None and written.verdict.agreement == written["verdict"]["agreement"]
    assert written.model is written.model and "model" not in written  # loaded once, and no fact
    written.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").is_file()
    assert onebasin.verify(tmp_path / "copy", written.model).same
    held = onebasin.merge([a, b], match="paper", verdict=False)
    assert held.output is None and held.verdict is None
    held.save_pretrained(tmp_path / "held")
    assert onebasin.verify(tmp_path / "held", tmp_path / "out").same
    with pytest.raises(ValueError, match="exists already"):
        held.save_pretrained(tmp_path / "out")


def test_a_model_in_memory_is_saved_with_all_that_its_folder_would_hold(tmp_path: Path) -> None:
    """Else the first merge of the docs makes a folder that no tokenizer, processor or SentenceTransformer can read."""
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", seed=1)
    beside = {"tokenizer.json", "preprocessor_config.json", "generation_config.json", "modules.json",
              "1_Pooling/config.json"}  # fmt: skip
    for name in beside:
        for model_of in (a, b):
            (model_of / name).parent.mkdir(exist_ok=True)
            (model_of / name).write_text("{}")
    (a / "code.py").write_text("")
    for number, made in enumerate((onebasin.merge([a, b], match="none", verdict=False), onebasin.match(a, b))):
        out = tmp_path / f"made-{number}"
        made.save_pretrained(out)
        written = {str(path.relative_to(out)) for path in out.rglob("*")}
        assert beside <= written and "code.py" not in written


def test_a_result_is_pushed_whether_it_was_written_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[set[str]] = []

    def upload(place: Path, name: str) -> str:
        pushed.append({file.name for file in Path(place).iterdir()})
        return f"https://hub/{name}"

    monkeypatch.setattr("onebasin.jobs.results.upload", upload)
    models = [model(seed=seed) for seed in (0, 1)]
    assert onebasin.match(*models).push_to_hub("me/it") == "https://hub/me/it"
    onebasin.match(*models, tmp_path / "out").push_to_hub("me/it")
    assert all({"config.json", "model.safetensors"} <= files for files in pushed) and len(pushed) == 2


@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_what_belongs_to_the_source_follows_it(kind: str, level: str) -> None:
    """A fine-tune of the source, as a model, as tensors, and as a task vector on the source, moves to one function."""
    source, anchor = model(kind, seed=1), model(kind, seed=0)
    found = onebasin.match(source, anchor, symmetry=level)
    same_function(found.alignment.apply_to(source), source)
    tuned = finetuned(source)
    moved = found.alignment.apply_to(tuned)
    same_function(moved, tuned)
    tensors = found.alignment.apply_to(tuned.state_dict())
    expected = moved.state_dict()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    before, after = source.state_dict(), tuned.state_dict()
    vector = found.alignment.apply_to({name: after[name] - before[name] for name in after}, task_vector=True)
    start = found.model.state_dict()
    for name, tensor in vector.items():
        torch.testing.assert_close(start[name] + tensor, expected[name], rtol=1e-4, atol=1e-5)


def test_some_of_a_task_vector_is_enough() -> None:
    found = onebasin.match(model(seed=1), model(seed=0))
    whole = {name: torch.randn_like(tensor) for name, tensor in model(seed=1).state_dict().items()}
    moved = found.alignment.apply_to(whole, task_vector=True)
    some = {name: tensor for name, tensor in whole.items() if "layer.0" in name}
    for name, tensor in found.alignment.apply_to(some, task_vector=True).items():
        assert name in some and tensor.equal(moved[name])


def test_an_adapted_model_follows(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source, anchor = model("LlamaForCausalLM", seed=1), model("LlamaForCausalLM", seed=0)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        finetuned(source), peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).eval()
    adapted.get_base_model().load_state_dict(
        {**adapted.get_base_model().state_dict(), **{
            name.replace("_proj.weight", "_proj.base_layer.weight")
            if "q_proj" in name or "down_proj" in name else name: tensor
            for name, tensor in source.state_dict().items()}}
    )  # fmt: skip
    given = inputs(source)
    for level in ("paper", "full"):
        moved = onebasin.match(source, anchor, symmetry=level).alignment.apply_to(adapted)
        assert isinstance(moved, peft.PeftModel)
        torch.testing.assert_close(moved(**given).logits, adapted(**given).logits, rtol=1e-3, atol=1e-3)


def test_all_models_of_a_merge_have_their_alignment() -> None:
    models = [model(seed=seed) for seed in range(3)]
    found = onebasin.merge(models, match="permutation", anchor=1, verdict=False)
    for one, alignment in zip((models[0], models[2]), found.alignments, strict=True):
        same_function(alignment.apply_to(one), one)


def test_foreign_tensors_are_named() -> None:
    alignment = onebasin.match(model(seed=1), model(seed=0)).alignment
    full = onebasin.match(model("LlamaForCausalLM", 1), model("LlamaForCausalLM", 0), symmetry="full").alignment
    name, tensor = next((name, one) for name, one in model().state_dict().items() if one.dim() == 2)
    for what, said in (({"elsewhere.weight": torch.ones(2)}, "elsewhere.weight"), ({name: tensor[1:]}, name)):
        with pytest.raises(ValueError, match=said):
            alignment.apply_to(what)
    with pytest.raises(ValueError, match="all are needed"):
        full.apply_to({"model.norm.weight": torch.ones(12)})


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: onebasin.merge(["a", "b"], overwrit=True), "overwrite"),  # type: ignore[call-arg]
        (lambda: onebasin.match("a", "b", anchor_outputs="c"), "anchor_output"),  # type: ignore[call-arg]
        (lambda: onebasin.merge(["a", "b"], shrunk=0.1), "shrink"),  # type: ignore[call-arg]
        (lambda: onebasin.canonical("a", "b", dtyp="float16"), "dtype"),  # type: ignore[call-arg]
        (lambda: onebasin.evaluate("a", "b", limits=3), "limit"),
        (lambda: onebasin.barrier("a", "b", "c", point=3), "points"),
        (lambda: onebasin.verify("a", "b", tolerances=1.0), "tolerance"),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_nearest(call: Any, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        call()


def plain(*kinds: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for kind in reversed(kinds):
        hints |= {name: hint for name, hint in get_type_hints(kind).items() if name in kind.names()}  # type: ignore[attr-defined]
    return hints


def test_typed_keywords_are_those_of_the_settings() -> None:
    merge, match = get_type_hints(keywords.MergeKeywords), get_type_hints(keywords.MatchKeywords)
    assert get_type_hints(keywords.OptionKeywords) == plain(Options)
    assert get_type_hints(keywords.OutputKeywords) == plain(OutputSettings)
    assert match == {**plain(Options), "match": str, "level": str}
    assert merge == {**plain(Options, OutputSettings, *loadable().values()), "level": str}


def test_barrier_and_evaluate_measure(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(i)).tolist()}
            for i in range(6)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    a, b = model("GPT2LMHeadModel", 0), model("GPT2LMHeadModel", 1)
    line = onebasin.barrier(a, b, tmp_path / "data.jsonl", points=3, match="paper")
    ends = [onebasin.evaluate(one, tmp_path / "data.jsonl").loss for one in (a, b)]
    assert line.end_losses == pytest.approx(ends, rel=1e-4) and line.lambdas == [0.0, 0.5, 1.0]
    assert line.barrier == pytest.approx(max(0.0, line.losses[1] - sum(ends) / 2), abs=1e-5)
    assert line.alignment is not None


class MyConfig(GPT2Config):
    model_type = "my-gpt2"


class MyModel(GPT2LMHeadModel):
    config_class = MyConfig


def test_registered_classes_of_ones_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that `transformers` learned of by `register`, with the table of the family that it is made like."""
    for mapping in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        monkeypatch.setattr(mapping, "_extra_content", {})
    AutoConfig.register("my-gpt2", MyConfig)
    AutoModelForCausalLM.register(MyConfig, MyModel)
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(MyModel(MyConfig(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval())
    found = onebasin.match(*models, family="gpt2")
    assert isinstance(found.model, MyModel)
    merged = onebasin.merge(models, match="paper", family="gpt2")
    assert isinstance(merged.model, MyModel) and merged.verdict is not None and merged.verdict.predictions
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(found.model(ids).logits, models[0](ids).logits, rtol=1e-3, atol=1e-4)
