# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elements import random_alignment
from zoo import CASES, inputs, save

import onebasin
from onebasin.jobs.aligning import align_all
from onebasin.jobs.options import Options
from onebasin.matching.activations import _Meter, match_activations
from onebasin.models import Canonical, Folder, Rewritten
from onebasin.running import twins
from onebasin.running.inference.known import table_of
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import run
from onebasin.symmetry import acting_groups
from onebasin.symmetry.exactness import refuse_other_shapes


@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal"])
@pytest.mark.parametrize(
    "case",
    [
        "GPT2LMHeadModel",
        "BertForMaskedLM",
        "ViTForImageClassification",
        "DebertaV2ForTokenClassification",
        "AlbertForMaskedLM",
        "LlamaForCausalLM",
        "T5ForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "Wav2Vec2ForCTC",
        "HubertForCTC-stable",
    ],
)
def test_a_planted_element_is_recovered(case: str, level: str, tmp_path: Path) -> None:
    model = CASES[case]().double()
    checkpoint = Folder(save(model, tmp_path / "model"))
    if level == "orthogonal":
        checkpoint = Canonical(checkpoint, torch.float64)
    signature = checkpoint.signature
    groups = acting_groups(signature, level)
    planted = random_alignment(signature, groups, seed=5)
    anchor = loaded_model(checkpoint, dtype=torch.float64, attention="eager")
    source = loaded_model(Rewritten(checkpoint, planted, torch.float64), dtype=torch.float64, attention="eager")
    batches = [inputs(model, seed) for seed in range(6)]
    found = match_activations(signature, anchor, source, batches, groups)
    assert set(found.elements) == set(groups)
    whole = found.after(planted)
    for role in signature.tensors:
        tensor = checkpoint.read(role, torch.float64)
        assert torch.allclose(whole.apply(signature, role, tensor), tensor, atol=1e-6), role


@pytest.mark.parametrize("level", ["permutation", "orthogonal"])
@pytest.mark.parametrize("case", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_neurons_of_experts_are_matched_by_weights_after_the_rest(case: str, level: str, tmp_path: Path) -> None:
    model = CASES[case]().double()
    checkpoint = Canonical(Folder(save(model, tmp_path / "model")), torch.float64)
    signature = checkpoint.signature
    groups = {root: group.rigid() for root, group in acting_groups(signature, level).items()}
    planted = random_alignment(signature, groups, seed=5)
    source = Rewritten(checkpoint, planted, torch.float64)
    opt = Options(match_with="activations", symmetry=level, precision="float64")
    found = align_all([checkpoint, source], 0, level, opt, None, [inputs(model, seed) for seed in range(6)]).found[0]
    for role in signature.tensors:
        tensor = checkpoint.read(role, torch.float64)
        assert torch.allclose(found.alignment.after(planted).apply(signature, role, tensor), tensor, atol=1e-6), role


@pytest.mark.parametrize("kind", ["slanext", "dac", "wavlm"])
def test_norms_and_transposed_convolutions_are_measured_along_their_channels(kind: str, tmp_path: Path) -> None:
    """Which stand before the positions, as they do for a convolution."""
    model, given = twins.build(kind)
    model.save_pretrained(tmp_path)
    stock = loaded_model(Folder(tmp_path), dtype=torch.float64)
    groups = acting_groups(stock.signature, "full")
    found = match_activations(stock.signature, stock, stock, [given], groups)
    refuse_other_shapes(stock.signature, found.elements)
    assert len(found.elements) > 10


@pytest.mark.parametrize("kind", ["rt_detr_resnet", "sam3_lite_text_text_model"])
def test_convolutions_are_matched_by_what_they_return(kind: str, tmp_path: Path) -> None:
    """In the second, a layer has scales (24, 1, 1) of its own, which do not make it a convolution."""
    model, given = twins.build(kind)
    model.save_pretrained(tmp_path)
    checkpoint = Folder(tmp_path)
    signature = checkpoint.signature
    groups = acting_groups(signature, "permutation")
    planted = random_alignment(signature, groups, seed=5)
    anchor = loaded_model(checkpoint, dtype=torch.float64)
    source = loaded_model(Rewritten(checkpoint, planted, torch.float64), dtype=torch.float64)
    found = match_activations(signature, anchor, source, [given], groups).after(planted)
    for role in signature.tensors:
        tensor = checkpoint.read(role, torch.float64)
        assert torch.allclose(found.apply(signature, role, tensor), tensor, atol=1e-6), role


def test_norms_over_all_heads_at_once_take_texts_of_any_lengths(tmp_path: Path) -> None:
    """They were taken for images, with channels before positions."""
    model = CASES["Olmo2ForCausalLM"]().double()
    stock = loaded_model(Folder(save(model, tmp_path / "model")), dtype=torch.float64, attention="eager")
    whole = inputs(model)
    shorter = {name: value[:, :5] for name, value in whole.items()}
    groups = acting_groups(stock.signature, "permutation")
    found = match_activations(stock.signature, stock, stock, [whole, shorter], groups)
    assert set(found.elements) == set(groups)
    assert all(torch.equal(one.index, one.index.sort(-1).values) for one in found.elements.values())


def test_maps_of_attention_are_those_of_the_heads_of_their_layer(tmp_path: Path) -> None:
    """A table that lists layers by name has a space of heads for each; beside an image tower, maps are of the text; a
    layer that takes the patches of several images as one sequence returns a list of maps."""
    for kind in ("dots3_note", "inkling2_vision", "llava"):
        model, given = twins.build(kind)
        model.save_pretrained(tmp_path / kind)
        checkpoint = Folder(tmp_path / kind)
        checkpoint.read_by(table_of(checkpoint.raw_config))
        stock = loaded_model(checkpoint, dtype=torch.float64, attention="eager")
        meter = _Meter(stock.signature, stock, stock, given)
        meter.measure(given)
        assert len(meter.maps) == (0 if kind == "llava" else model.config.num_hidden_layers)


def test_classes_that_fail_where_they_are_asked_for_maps_are_matched_without(tmp_path: Path) -> None:
    model, given = twins.build("maskformer-swin")
    model.save_pretrained(tmp_path)
    stock = loaded_model(Folder(tmp_path), dtype=torch.float64, attention="eager")
    with pytest.raises(TypeError):
        run(stock, given, output_attentions=True)
    groups = acting_groups(stock.signature, "permutation")
    found = match_activations(stock.signature, stock, stock, [given], groups)
    assert len(found.elements) > 10
    for role in stock.signature.tensors:
        tensor = stock.tensor(role)
        assert torch.allclose(found.apply(stock.signature, role, tensor), tensor), role


def test_no_data_is_one_clear_sentence(tmp_path: Path) -> None:
    stock = loaded_model(Folder(save(CASES["GPT2LMHeadModel"](), tmp_path / "model")))
    with pytest.raises(ValueError, match="needs calibration data"):
        match_activations(stock.signature, stock, stock, [], {})


def test_what_stays_is_not_measured(tmp_path: Path) -> None:
    """Moments of a vocabulary's logits could fill the memory."""
    model = CASES["WhisperForConditionalGeneration"]()
    stock = loaded_model(Folder(save(model, tmp_path / "model")))
    meter = _Meter(stock.signature, stock, stock, inputs(model))
    meter.measure(inputs(model))
    written = {root for _, sites in meter.outputs.values() for site in sites for root in meter._roots(site)}
    assert {"stream", "decoder.layers.0.ffn"} <= written and "vocab" not in written


def test_heads_that_a_single_output_reads(tmp_path: Path) -> None:
    """Of a video classifier's pooler: one query for all, so a vector reads the heads' values."""
    model = twins.build("vjepa2")[0]
    for seed in (0, 1):
        twins.random_model(model.config, type(model), seed).float().save_pretrained(tmp_path / str(seed))
    found = onebasin.match(
        tmp_path / "1",
        tmp_path / "0",
        tmp_path / "out",
        match="full",
        match_with="activations",
        data="self",
        samples=12,
    )
    assert found["max_output_difference"] is not None and found["distance_after"] < found["distance_before"]
