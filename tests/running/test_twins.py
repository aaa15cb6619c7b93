# SPDX-License-Identifier: Apache-2.0
"""Tiny twins of model types: they run, all of them in float64, and keep what is no size."""

from __future__ import annotations

import re
from datetime import date
from random import Random
from typing import Any

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from onebasin.models import ModelError
from onebasin.running import small_settings, twins
from onebasin.running.configuration import configs, default_config
from onebasin.running.float64 import OnlyFloat64
from onebasin.running.made_inputs import LENGTH
from onebasin.running.shrinking import Scale

DRAFTS = {"gemma4_assistant", "gemma4_unified_assistant"}  # they read the keys and values of another model
TEXTS = sorted({
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
} - DRAFTS)  # fmt: skip
TODAY = Random(date.today().toordinal()).sample(TEXTS, 3)
ALWAYS = ["qwen3_next", "deepseek_v3", "mpnet", "marian", "convnext"]


@pytest.mark.parametrize("kind", [*TODAY, *ALWAYS])
def test_a_twin_is_small_and_runs(kind: str) -> None:
    try:
        model, inputs = twins.build(kind)
    except ModelError as error:
        assert re.search("requires the .* library", str(error)), str(error)
        pytest.skip(str(error))
    first, again = (twins.outputs(model, inputs) for _ in range(2))
    assert first and all(bool(value.isfinite().all()) for value in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert sum(parameter.numel() for parameter in model.parameters()) <= twins.LARGEST
    assert all(float(parameter.detach().std()) > 0 for parameter in model.parameters() if parameter.numel() > 1)


class Narrow(TorchDispatchMode):
    """Remember operations that give less than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        narrow = (torch.float32, torch.float16, torch.bfloat16)
        if any(isinstance(each, torch.Tensor) and each.dtype in narrow for each in tree_leaves(found)):
            self.seen.add(str(func))
        return found


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "t5", "mamba2", "xlnet"])
def test_nothing_is_computed_in_less_than_float64(kind: str) -> None:
    """Norms, rotary tables, softmaxes and scans are, in the stock classes; a table may be made narrow and then cast."""
    model, inputs = twins.build(kind)
    with Narrow() as mode:
        found = twins.outputs(model, inputs)
    assert all(value.dtype == torch.float64 for value in found)
    assert not [name for name in mode.seen if re.search(r"mm|softmax|rsqrt|mean|sum|exp|mul|cos|sin", name)]


@pytest.mark.parametrize("case", zoo.one_of_each_family())
def test_the_small_models_of_the_tests_have_twins(case: str) -> None:
    builder = zoo.CASES[case]
    given = builder()
    model, inputs = twins.build(given.config, builder.args[0])
    assert type(model).__name__ == type(given).__name__
    assert twins.outputs(model, inputs)


def test_ratios_stay() -> None:
    given = CONFIG_MAPPING["qwen3_next"]()
    small = twins.twin_config(given)
    assert small.num_attention_heads > small.num_key_value_heads > 1
    assert small.linear_num_value_heads == 2 * small.linear_num_key_heads
    assert small.linear_num_key_heads % 2 == 0
    assert small.num_experts > small.num_experts_per_tok > 1
    assert small.layer_types.count("full_attention") == small.layer_types.count("linear_attention") == 2
    assert len({small.hidden_size, small.intermediate_size, small.head_dim, small.vocab_size}) == 4


@pytest.mark.parametrize(("given", "expected"), [
    (dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128), (4, 2)),
    (dict(num_attention_heads=12, num_key_value_heads=12), (4, 4)),
    (dict(num_attention_heads=71, num_key_value_heads=1), (2, 1)),
    (dict(num_attention_heads=1, num_key_value_heads=1), (1, 1)),
])  # fmt: skip
def test_heads(given: dict[str, Any], expected: tuple[int, int]) -> None:
    small = twins.twin_config(CONFIG_MAPPING["llama"](**given, hidden_size=128 * given["num_attention_heads"]))
    assert (small.num_attention_heads, small.num_key_value_heads) == expected
    assert small.num_attention_heads * small.head_dim == small.hidden_size


def test_a_head_has_room_for_its_rotary_share() -> None:
    small = twins.twin_config("gpt_neox")  # a quarter of each head turns
    assert small.hidden_size // small.num_attention_heads % 8 == 0


def test_every_kind_of_layer_is_there() -> None:
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)]
    small = twins.twin_config(CONFIG_MAPPING["gemma3_text"](num_hidden_layers=26, layer_types=kinds))
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2


def test_what_a_class_reads_without_declaring_it_stays() -> None:
    assert twins.twin_config(CONFIG_MAPPING["deberta"](talking_head=True)).talking_head is True


@pytest.mark.parametrize("kind", ["mistral4", "ministral3"])
def test_the_scaling_of_positions_that_a_class_needs_stays(kind: str) -> None:
    stated = twins.twin_config(kind)  # as in a file; what a class has by default was left to it
    assert twins.twin_config(stated).rope_parameters["rope_type"] == stated.rope_parameters["rope_type"] == "yarn"
    assert twins.build(stated)


def test_products_and_sums_stay() -> None:
    mamba = twins.twin_config("mamba2")
    assert mamba.num_heads * mamba.head_dim == mamba.expand * mamba.hidden_size
    latent = twins.twin_config("deepseek_v3")
    assert latent.qk_head_dim == latent.qk_rope_head_dim + latent.qk_nope_head_dim
    seen = twins.twin_config("qwen2_vl")
    assert seen.vision_config.hidden_size == seen.text_config.hidden_size
    layout = twins.twin_config("layoutlmv3", Scale(divisor=8))
    assert layout.hidden_size == 4 * layout.coordinate_size + 2 * layout.shape_size
    sound = twins.twin_config("clap").audio_config
    assert sound.hidden_size == sound.patch_embeds_hidden_size * 2 ** (len(sound.depths) - 1) < 768


@pytest.mark.parametrize("kind", ["superglue", "lightglue"])
def test_a_twin_of_a_small_model_has_heads_of_more_than_one_number(kind: str) -> None:
    """Heads of one number can be permuted like neurons; its table would mix heads that are larger."""
    small = twins.twin_config(kind, Scale(divisor=8))
    for _ in range(2):
        size = small.hidden_size // small.num_attention_heads
        small = twins.twin_config(small, Scale(divisor=8))
        assert size >= 2 and small.hidden_size // small.num_attention_heads >= 2


@pytest.mark.parametrize("kind", ["llama", "t5", "clip", "qwen3_vl", "bart", "gpt_oss"])
def test_no_dropout_no_cache_and_tokens_within_the_vocabulary(kind: str) -> None:
    small = twins.twin_config(kind)
    for config in configs(small):
        held = vars(config)
        assert not held.get("use_cache") and config._attn_implementation == "eager"
        assert not any(value for name, value in held.items() if name.endswith("dropout"))
        tokens = [value for name, value in held.items() if name.endswith("_token_id") and isinstance(value, int)]
        assert all(token < small.get_text_config().vocab_size for token in tokens)


def test_maps_of_features_shrink_like_the_image() -> None:
    """SAM 2 states the sizes of the maps that it makes of an image."""
    large, small = default_config("sam2").vision_config, twins.twin_config("sam2").vision_config
    zoom = large.backbone_config.image_size[0] // small.backbone_config.image_size[0]
    assert zoom > 1
    assert small.backbone_feature_sizes == [[n // zoom for n in sizes] for sizes in large.backbone_feature_sizes]


def unused(model: PreTrainedModel, inputs: dict[str, Any]) -> list[str]:
    """The names of the parameters on which no output depends, by their gradients."""
    with OnlyFloat64():
        found = twins.floats_of(model(**inputs))
    torch.stack([(value**2).sum() for value in found if value.requires_grad]).sum().backward()
    return [name for name, each in model.named_parameters() if each.grad is None or not bool(each.grad.any())]


def test_every_parameter_reaches_an_output() -> None:
    """CLIP's classifier averages patches, and leaves out the norm of the class token."""
    model, inputs = twins.build("clip")
    assert unused(model, inputs) == ["vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"]
    assert not unused(*twins.build("qwen3_next"))


@pytest.mark.parametrize(("kind", "cls"), [
    *((kind, None) for kind in ("llava", "qwen3_vl", "voxtral", "granite_docling", "deepseek_vl_hybrid", "qwen3_asr",
                                "llava_onevision", "musicflamingo", "qwen2_audio", "colpali", "video_llama_3",
                                "idefics", "qwen3_omni_moe_thinker", "kosmos-2")),
    ("mllama", "MllamaForConditionalGeneration"),
])  # fmt: skip
def test_images_and_sounds_reach_the_output(kind: str, cls: str | None) -> None:
    """Also in tiles with a mask, beside images of a higher resolution, from a tower whose defaults are wider than the
    text, in both kinds at once, and where only the model says how many placeholders a text needs."""
    model, inputs = twins.build(kind, cls)
    first = twins.outputs(model, inputs)[0]
    assert set() < twins.senses(model) <= inputs.keys()
    for sense in twins.senses(model):
        other = twins.outputs(model, {**inputs, sense: torch.rand_like(inputs[sense])})[0]
        assert not torch.allclose(first, other)


def test_a_size_that_is_held_under_another_name_is_a_size() -> None:
    given = CONFIG_MAPPING["qwen3_moe"](num_experts=16)
    assert "num_experts" not in vars(given)
    assert twins.twin_config(given).num_experts == 8


def test_sizes_that_a_class_makes_of_nothing_are_small() -> None:
    """Its defaults would come back where they are left to it; what follows from other sizes is."""
    text = twins.twin_config("ernie4_5_vl_moe").text_config
    assert len(text.moe_intermediate_size) == 2 and max(text.moe_intermediate_size) < 64


def test_what_goes_from_one_tower_to_another_is_as_wide_in_both() -> None:
    small = twins.twin_config("fastspeech2_conformer_with_hifigan")
    assert small.model_config.num_mel_bins == small.vocoder_config.model_in_dim


@pytest.mark.parametrize(("parts", "expected"), [
    ([22, 22, 20], [2, 2, 4]), ([16, 24, 24], [2, 3, 3]), ([1, 1, 1], [2, 2, 4]),
])  # fmt: skip
def test_axes_of_a_picture_that_turn_alike_do(parts: list[int], expected: list[int]) -> None:
    assert small_settings._shared_out(8, parts) == expected


def test_chunks_and_spectrograms_are_short() -> None:
    """A text is longer than a chunk, so that what goes from one to the next counts."""
    assert twins.twin_config("mamba2").chunk_size < LENGTH
    assert twins.twin_config("audio-spectrogram-transformer").max_length <= 40


@pytest.mark.parametrize("kind", ["detr", "cpmant", "ctrl", "longformer"])
def test_sizes_of_backbones_feedforward_layers_and_windows_are_small(kind: str) -> None:
    """A ResNet instead of one from timm, sizes with names of their own, and windows to which a text is padded."""
    model, given = twins.build(kind)
    assert max(parameter.numel() for parameter in model.parameters()) < 50_000
    windows = getattr(model.config, "attention_window", [])
    assert all(window < given["input_ids"].shape[1] for window in windows)


def test_a_film_is_short() -> None:
    assert twins.twin_config("vjepa2").frames_per_clip == 4


def test_lists_are_as_in_a_file() -> None:
    given = CONFIG_MAPPING["vitmatte"](fusion_hidden_sizes=(256, 128))
    assert isinstance(twins.twin_config(given).fusion_hidden_sizes, list)


@pytest.mark.parametrize("layers", [2, 4])
def test_heads_are_as_large_as_a_class_needs(layers: int) -> None:
    """A smaller head than that of the twin that ran does not do, however many layers there are."""
    twins.build("data2vec-audio")
    deeper, _ = twins.build("data2vec-audio", scale=Scale(layers=layers))
    wider, _ = twins.build("data2vec-audio", scale=Scale(14, layers))
    assert wider.config.hidden_size != deeper.config.hidden_size


def test_a_parameter_without_entries_stays() -> None:
    assert twins._random(torch.nn.Module(), "weight", torch.empty(0)).numel() == 0


@pytest.mark.parametrize("kind", [
    "voxtral_realtime", "speech-encoder-decoder", "kyutai_speech_to_text", "dia", "pix2struct", "inkling2_vision",
    "fun_asr_nano_encoder", "gemma3n_audio", "sam3_vision_model", "t5gemma2_encoder",
])  # fmt: skip
def test_inputs_are_as_a_class_takes_them(kind: str) -> None:
    """As many tokens as frames, a sound beside no text, a code more, tokens side by side, patches with their places,
    merged and stacked ones, a size that is read off a tower, a setting that its class forgot."""
    model, inputs = twins.build(kind)
    assert twins.outputs(model, inputs)


@pytest.mark.parametrize("kind", ["muse_spark_audio", "muse_glimmer_vision", "detr"])
def test_inputs_and_backbones_that_nothing_names_are_found(kind: str) -> None:
    """A wave as long as whole frames of any model, patches as wide as the model says, a backbone that is here."""
    model, inputs = twins.build(kind)
    assert twins.outputs(model, inputs)


def test_a_window_holds_what_is_made_of_it() -> None:
    small = twins.twin_config("granite_speech")
    assert small.window_size >= small.downsample_rate and small.window_size % small.downsample_rate == 0


def test_a_twin_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, given = twins.build("clip")
    monkeypatch.setattr(twins, "made_inputs", lambda *_: pytest.fail("looked for again"))
    again, same = twins.build("clip", seed=1)
    assert given.keys() == same.keys()
    assert {name: p.shape for name, p in first.named_parameters()} == {
        name: p.shape for name, p in again.named_parameters()
    }


def test_a_twin_that_puts_out_nothing_but_0_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose last ReLU no number passes: nothing could be proven on it."""
    sizes = []

    def outputs(model: PreTrainedModel, inputs: dict[str, Any], seed: int = 0) -> list[torch.Tensor]:
        sizes.append(model.config.hidden_size)
        return [found * (len(sizes) > 1) for found in real(model, inputs, seed)]

    twins.build("vit")
    real = twins.outputs
    monkeypatch.setattr(twins, "outputs", outputs)
    model, _ = twins.build("vit", None, 1, Scale(head=16))
    assert model.config.hidden_size != sizes[0]


def test_ties_stay() -> None:
    model, _ = twins.build("gemma3_text")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_class_that_tells_most_comes_first() -> None:
    assert twins.classes("bert")[0] == "BertLMHeadModel"
    assert twins.classes("mpnet")[0] == "MPNetForMaskedLM"
    assert twins.classes("vit")[0] == "ViTForImageClassification"
    assert "MPNetModel" in twins.classes("mpnet") and twins.classes("nothing") == []


def test_a_twin_is_as_small_as_asked_after_a_larger_one() -> None:
    twins.build("granite")
    small, _ = twins.build("granite", None, 0, Scale(head=4, heads=1, most={"vocabulary": 23}))
    assert small.config.vocab_size == 23 and small.config.num_attention_heads == 2


@pytest.mark.parametrize(("kind", "length"), [("helium", 6), ("roberta", 4)])
def test_a_text_is_as_long_as_a_table_of_positions_allows(kind: str, length: int) -> None:
    """RoBERTa counts its positions from the token that pads on; Helium pads, and has no such table."""
    _, inputs = twins.build(kind, scale=Scale(most=dict(positions=6)))
    assert inputs["input_ids"].shape == (3, length)
