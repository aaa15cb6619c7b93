# SPDX-License-Identifier: Apache-2.0
"""The canonical form leaves every model's outputs alone, and lets the stream of pre-norm models rotate."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elements import random_alignment
from rewritten import difference, outputs_of, read_all, run
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import CASES, inputs, outputs, save

from onebasin.models import views
from onebasin.models.folder import Folder
from onebasin.running import compare_rewritten, twins
from onebasin.symmetry import acting_groups
from onebasin.symmetry.gauge.canonical import Canonical, canonical, plan
from onebasin.symmetry.gauge.dataflow import contract
from onebasin.symmetry.tables.axes import Leaf

Saved = Callable[[str], Folder]


def write(form: Canonical, tensors: dict[str, Tensor], given: Path, out: Path) -> Path:
    out.mkdir()
    config = json.loads((given / "config.json").read_text()) | form.config_updates
    (out / "config.json").write_text(json.dumps(config))
    split = (form.signature.tensors[role].split(tensor) for role, tensor in tensors.items())
    named = {name: part.contiguous().clone() for parts in split for name, part in parts}
    save_file(named, str(out / "model.safetensors"), {"format": "pt"})
    return out


@pytest.mark.parametrize("case", CASES)
def test_outputs_stay_and_every_group_acts_afterwards(case: str, saved: Saved, tmp_path: Path) -> None:
    checkpoint = saved(case)
    tensors = read_all(checkpoint)
    form = canonical(checkpoint.signature, tensors)
    before = outputs_of(checkpoint, tensors)

    written = Folder(write(form, form.tensors, checkpoint.folder, tmp_path / case))
    assert difference(before, outputs_of(written, form.tensors)) < 1e-9

    signature = written.signature
    assert set(signature.tensors) == set(form.signature.tensors)
    for level in ("orthogonal", "full"):
        element = random_alignment(signature, acting_groups(signature, level, rescale="joint"), seed=1)
        moved = {role: element.apply(signature, role, tensor) for role, tensor in form.tensors.items()}
        assert difference(before, outputs_of(written, moved)) < 1e-9, level


@pytest.mark.parametrize("case", CASES)
def test_second_run_changes_nothing(case: str, saved: Saved) -> None:
    checkpoint = saved(case)
    once = canonical(checkpoint.signature, read_all(checkpoint))
    twice = canonical(once.signature, once.tensors)
    assert not twice.log and not twice.config_updates
    for role, tensor in once.tensors.items():
        assert torch.allclose(tensor, twice.tensors[role], rtol=0, atol=1e-12), role


def test_what_the_form_looks_like(tmp_path: Path) -> None:
    """A tied GPT-2: head untied, norms plain, no component along ones, key and value biases gone."""
    checkpoint = Folder(save(CASES["GPT2LMHeadModel"]().double(), tmp_path))
    form = canonical(checkpoint.signature, read_all(checkpoint))
    assert form.config_updates == {"tie_word_embeddings": False}
    assert len(form.log) == 1 and "lm_head.weight" in form.log[0]
    width = form.tensors["wte.weight"].shape[1]
    for norm in ("ln_f", "h.0.ln_1", "h.1.ln_2"):
        assert bool((form.tensors[f"{norm}.weight"] == 1).all())
    assert bool((form.tensors["h.0.ln_1.bias"] == 0).all())
    assert torch.allclose(form.tensors["ln_f.bias"], torch.full((width,), width**-0.5, dtype=torch.float64))
    assert float(form.tensors["wte.weight"].sum(1).abs().max()) < 1e-12
    assert float(form.tensors["wpe.weight"].sum(0).abs().max()) < 1e-12  # its mean has moved into the token table
    assert float(form.tensors["h.0.attn.c_attn.weight"].sum(0).abs().max()) < 1e-12
    assert bool((form.tensors["h.0.attn.c_attn.bias"][width:] == 0).all())


@pytest.mark.parametrize(("kind", "cls"), [("t5", "T5ForConditionalGeneration"), ("longt5", None)])
def test_what_a_class_derives_from_ties_stays_where_a_head_is_untied(
    kind: str, cls: str | None, tmp_path: Path
) -> None:
    """T5 scales what its decoder returns if the head is tied, and its older configurations say nothing else."""
    twins.build(kind, cls)[0].save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    older = {key: value for key, value in json.loads(file.read_text()).items()
             if key not in ("scale_decoder_outputs", "tie_word_embeddings")}  # fmt: skip
    file.write_text(json.dumps(older))
    checkpoint = Folder(tmp_path)
    form = views.Canonical(checkpoint, torch.float64)
    assert form.updates == {"tie_word_embeddings": False, "scale_decoder_outputs": True}
    assert compare_rewritten(checkpoint, form, dtype=torch.float64).relative_difference < 1e-9


def test_ties_stay_where_no_rotation_waits(tmp_path: Path) -> None:
    checkpoint = Folder(save(CASES["BertForMaskedLM"]().double(), tmp_path))
    form = canonical(checkpoint.signature, read_all(checkpoint))
    assert not form.config_updates and not form.log
    assert set(form.tensors) == set(checkpoint.signature.tensors)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ViTForImageClassification", "BertForTokenClassification"])
def test_zero_norm_weights_are_as_good_as_any(name: str, tmp_path: Path) -> None:
    model = CASES[name]().double()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data[3] = 0
            module.weight.data[5] = 0
    given = save(model, tmp_path / "given")
    checkpoint = Folder(given)
    form = canonical(checkpoint.signature, read_all(checkpoint))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in form.tensors.values())
    written = write(form, form.tensors, given, tmp_path / name)
    assert difference(outputs(model, inputs(model)), run(name, written)) < 1e-9


@pytest.mark.parametrize("name", ["GPT2Model", "ViTModel", "BertModel", "RobertaModel", "DistilBertModel"])
def test_nothing_acts_on_the_hidden_states_of_a_model_without_a_head(name: str, tmp_path: Path) -> None:
    signature = Folder(save(CASES[name](), tmp_path)).signature
    assert signature.kinds[signature.root["stream"]] == "fixed"
    assert signature.root["stream"] not in acting_groups(signature, "full")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2ForSequenceClassification", "ViTForImageClassification"])
def test_pre_norm_streams_rotate(name: str, tmp_path: Path) -> None:
    signature = Folder(save(CASES[name](), tmp_path)).signature
    stream = acting_groups(signature, "full")[signature.root["stream"]]
    assert stream.name == "orthogonal fixing ones"


@pytest.mark.parametrize(
    ("name", "writer", "length"),
    [
        ("StableLmForCausalLM-qk-layernorm-biases", "model.layers.1.self_attn.q_proj.weight", 4),  # of a head
        ("StableLmForCausalLM-qk-layernorm-biases", "model.layers.0.self_attn.k_proj.bias", 4),
        ("OPTForCausalLM-weightless-norms", "model.decoder.layers.0.fc2.weight", 12),  # of the stream
    ],
)
def test_what_norms_take_away_leaves_the_form_as_it_is(name: str, writer: str, length: int, tmp_path: Path) -> None:
    """All that a tensor writes along ones, for every input by itself."""
    checkpoint = Folder(save(CASES[name]().double(), tmp_path / "given"))
    tensors = read_all(checkpoint)
    role = next(role for role, entry in checkpoint.signature.tensors.items() if entry.name == writer)
    moved = tensors | {role: tensors[role].clone()}
    rows = moved[role].view(-1, length, *moved[role].shape[1:])
    rows += torch.randn_like(rows[:, :1])
    one, two = (canonical(checkpoint.signature, given).tensors for given in (tensors, moved))
    assert float((moved[role] - tensors[role]).abs().max()) > 0.1
    assert all(torch.allclose(one[role], two[role], rtol=0, atol=1e-12) for role in one)


def test_the_source_is_not_changed(tmp_path: Path) -> None:
    checkpoint = Folder(save(CASES["ViTForImageClassification"]().double(), tmp_path))
    tensors = read_all(checkpoint)
    before = {role: tensor.clone() for role, tensor in tensors.items()}
    canonical(checkpoint.signature, tensors)
    assert all(torch.equal(tensor, before[role]) for role, tensor in tensors.items())


def test_steps_of_deep_models_are_found_without_asking_every_norm_of_every_bias(tmp_path: Path) -> None:
    """Twice the layers ask at most for each pair of them, four times as much, not eight."""

    def calls(layers: int) -> int:
        config = GPT2Config(n_embd=8, n_head=2, n_layer=layers, vocab_size=5, n_positions=4)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / str(layers))
        form = plan(Folder(tmp_path / str(layers)).signature)
        count = 0

        def one(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(one)
        try:
            assert form.steps
        finally:
            sys.setprofile(None)
        return count

    assert calls(24) < 5 * calls(12)


def test_a_constant_axis_of_weight_and_bias_is_no_axis_to_sum_over() -> None:
    """Two outputs, read from a space by a kernel of two."""
    weight, constant = torch.randn(2, 5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    two, source = Leaf("2"), Leaf("stream", dual=True)
    assert torch.allclose(contract(weight, (two, source, two), constant, (source,), (two,)), weight.sum(-1) @ constant)
