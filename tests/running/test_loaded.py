# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zoo import CASES, build, inputs, named_outputs, save

from onebasin.data.teaching import forward_of, predictions
from onebasin.models import Canonical, Folder, ModelError
from onebasin.running import twins
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import linear_calls, routed, run

FAMILIES = [
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "ViTForImageClassification",
    "AlbertForMaskedLM",
    "ElectraForMaskedLM",
    "DebertaV2ForTokenClassification",
    "DistilBertForMaskedLM",
    "RobertaModel",
    "LlamaForCausalLM",
]


@pytest.mark.parametrize("case", [*FAMILIES, "OPTForCausalLM-weightless-norms"])
def test_the_filled_model_computes_what_the_folder_computes(case: str, tmp_path: Path) -> None:
    model = CASES[case]().double()
    checkpoint = Folder(save(model, tmp_path / "model"))
    given = inputs(model)
    wanted = named_outputs(model, given)
    for form in (checkpoint, Canonical(checkpoint, torch.float64)):
        got = named_outputs(loaded_model(form, dtype=torch.float64).model, given)
        for name, value in wanted.items():
            assert torch.allclose(got[name], value, atol=1e-9), name


@pytest.mark.parametrize("kind", ["nomic_bert", "sapiens2", "kimi_k25", "marian", "dinov3_vit", "chinese_clip"])
def test_what_a_class_divides_or_computes_is_no_hindrance(kind: str, tmp_path: Path) -> None:
    """Fused projections of queries, keys and values (Kimi K2.5's with their rows in another order), or of gates, which
    are put together again; fixed positions; no register at all; a row of padding that is set to zero."""
    model, given = twins.build(kind)
    model.save_pretrained(tmp_path)
    checkpoint = Folder(tmp_path)
    stock = loaded_model(checkpoint, dtype=torch.float64)
    assert bool(stock.pieces) == (kind in ("nomic_bert", "sapiens2", "kimi_k25")) and stock.roles == list(
        dict.fromkeys(stock.roles)
    )
    assert {*stock.roles, *stock.buffer} == {role for role, entry in stock.signature.tensors.items() if entry.stored}
    for role in stock.roles:
        assert torch.equal(stock.tensor(role), checkpoint.read(role, torch.float64)), role
    other = {role: tensor + 0.1 * torch.rand_like(tensor) for role, tensor in stock.tensors.items()}
    wanted = forward_of(stock)(other, given)
    stock.fill(other.__getitem__)
    for name, value in predictions(run(stock, given)).items():
        assert torch.allclose(value, wanted[name], atol=1e-9), name


def test_a_tensor_that_a_class_divides_is_refused_in_a_sentence_where_layers_are_followed(tmp_path: Path) -> None:
    model = CASES["Dinov2ForImageClassification-swiglu"]()
    if any("weights_in" in name for name, _ in model.named_parameters()):
        pytest.skip("this version of transformers keeps it whole")
    with pytest.raises(ModelError, match="in another form than the folder"):
        loaded_model(Folder(save(model, tmp_path)), experts=False)


@pytest.mark.parametrize("case", ["HubertForCTC-batch-norm", "DeepseekV3ForCausalLM"])
def test_what_a_class_keeps_as_a_buffer_is_filled_too(case: str, tmp_path: Path) -> None:
    """Running statistics, and the corrections that choose experts."""
    model = CASES[case]().double()
    stock = loaded_model(Folder(save(model, tmp_path / "model")), dtype=torch.float64)
    assert stock.buffer
    given = inputs(model)
    got = named_outputs(stock.model, given)
    for name, value in named_outputs(model, given).items():
        assert torch.allclose(got[name], value, atol=1e-9), name


@pytest.mark.parametrize("kind", ["hy_v4", "bailing_hybrid"])
def test_tensors_that_a_class_stacks_or_joins_are_put_in_again(kind: str, tmp_path: Path) -> None:
    """Experts whose rows torch's grouped products do not accept, and the convolutions of queries, keys and values."""
    model, given = twins.build(kind)
    model.float().save_pretrained(tmp_path)
    given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    stock = loaded_model(Folder(tmp_path))
    wanted = run(stock, given).logits
    assert torch.allclose(wanted, model(**given).logits, atol=1e-4)
    assert torch.allclose(forward_of(stock)(stock.tensors, given)["logits"], wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_more_tensors_than_sixteen_bits_tell_apart(dtype: torch.dtype, tmp_path: Path) -> None:
    """bfloat16 has the integers up to 256, float16 those up to 2,048; the marks of a model with more stay apart."""
    layers = 35 if dtype == torch.bfloat16 else 235
    model = build("LlamaForCausalLM", vocab_size=5, hidden_size=4, num_hidden_layers=layers, num_attention_heads=2,
                  num_key_value_heads=1, intermediate_size=3, max_position_embeddings=8).to(dtype)  # fmt: skip
    stock = loaded_model(Folder(save(model, tmp_path / "model")))
    assert len(stock.parameter) == 9 * layers + 3 > 2 / torch.finfo(dtype).eps
    held = dict(model.named_parameters())
    for role, parameter in stock.parameter.items():
        name = stock.signature.tensors[role].name
        assert stock.owner[role] == name.rpartition(".")[0]
        assert torch.equal(parameter, held[name].float()), name


@pytest.mark.parametrize("case", FAMILIES)
def test_every_matrix_of_a_layer_is_found_where_it_works(case: str, tmp_path: Path) -> None:
    model = CASES[case]().double()
    stock = loaded_model(Folder(save(model, tmp_path / "model")), dtype=torch.float64)
    calls = linear_calls(stock, inputs(model))
    matrices = {
        role for role, entry in stock.signature.tensors.items() if len(entry.axes) == 2 and entry.layer is not None
    }
    assert matrices <= {call.weight for call in calls}
    written = {call.weight for call in calls if call.norm}
    assert len(written) == 2 * len(stock.signature.layers)  # attention's and the FFN's output
    for call in calls:
        into, out = call.axes(stock)
        assert {into, out} == set(stock.signature.tensors[call.weight].axes)


@pytest.mark.parametrize("kind", ["convnext", "gemma3n_audio"])
def test_layers_are_followed_by_themselves_where_a_class_keeps_copies_of_its_stream(kind: str, tmp_path: Path) -> None:
    """A change at the input of a norm does not reach what is added behind it."""
    model, given = twins.build(kind)
    model.save_pretrained(tmp_path)
    stock = loaded_model(Folder(tmp_path), dtype=torch.float64)
    calls = linear_calls(stock, given)
    layers = {name for name, each in stock.model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert {call.module for call in calls} == layers


def test_layers_that_get_no_token_are_left_out(tmp_path: Path) -> None:
    """Text has no token for Higgs Audio's layers of sounds: they run on nothing."""
    model, _ = twins.build("higgs_audio_v2")
    model.save_pretrained(tmp_path)
    stock = loaded_model(Folder(tmp_path), dtype=torch.float64)
    called = {call.module for call in linear_calls(stock, {"input_ids": torch.arange(10, 14)[None]})}
    assert called and not any("audio_mlp" in module for module in called)


class Speaks(torch.nn.Module):
    """A convolution over as many frames as a model predicts."""

    config, device, dtype = SimpleNamespace(), torch.device("cpu"), torch.float32

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames, self.conv = frames, torch.nn.Conv1d(2, 2, 1)

    def forward(self, input_ids: torch.Tensor, return_dict: bool = True) -> torch.Tensor:
        return self.conv(input_ids[:, :, None].float().expand(-1, -1, self.frames))


def test_a_convolution_over_other_numbers_of_frames_is_not_compared() -> None:
    several = [SimpleNamespace(model=Speaks(frames)) for frames in (3, 3, 4)]
    given = {"input_ids": torch.ones(2, 2, dtype=torch.long)}
    assert routed(several[:2], given, ["conv"]) == set() and routed(several, given, ["conv"]) == {"conv"}


def test_what_a_class_draws_is_the_same_in_every_run(tmp_path: Path) -> None:
    model, given = twins.build("vit_mae")
    model.save_pretrained(tmp_path)
    stock = loaded_model(Folder(tmp_path), dtype=torch.float64)
    before = torch.random.get_rng_state()
    first, second = (predictions(run(stock, given)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert any(call.norm for call in linear_calls(stock, given))


def test_tied_parameters_are_known(tmp_path: Path) -> None:
    stock = loaded_model(Folder(save(CASES["GPT2LMHeadModel"](), tmp_path / "model")))
    assert stock.shared("wte.weight")
    assert not stock.shared("h.0.mlp.c_fc.weight")
