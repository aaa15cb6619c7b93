# SPDX-License-Identifier: Apache-2.0
"""Verification sees every parameter that matters, forgives rounding, and runs no code from a folder."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from damage import edit_config, edit_weights, to_pickle

import onebasin
from onebasin.data.models import load_model
from onebasin.models import Canonical, Folder, ModelError, write_model
from onebasin.running import compare, compare_models, compare_rewritten, pretrained, twins
from onebasin.running.classes import without_cache
from onebasin.running.verification import tolerance_of
from onebasin.symmetry import Alignment, acting_groups

# Every kind of input and of head once.
THOROUGH = [
    "BertModel",
    "BertForPreTraining",
    "BertForTokenClassification",
    "ErnieForPreTraining",
    "RobertaForSequenceClassification",
    "RobertaForMultipleChoice",
    "ElectraForMaskedLM",
    "DistilBertForQuestionAnswering",
    "AlbertForPreTraining",
    "DebertaV2ForSequenceClassification",
    "DebertaForMaskedLM",
    "GPT2DoubleHeadsModel",
    "GPT2ForSequenceClassification",
    "ViTModel",
    "ViTForMaskedImageModeling",
    "DeiTForImageClassificationWithTeacher",
]
SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
SEQ2SEQ = dict(
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    vocab_size=40,
)
T5 = dict(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
MIXED = dict(
    text_config=dict(vocab_size=40, max_position_embeddings=20, eos_token_id=2, bos_token_id=1, **SMALL),
    vision_config=dict(image_size=8, patch_size=4, **SMALL),
)
OTHERS = {
    "T5ForConditionalGeneration": T5,
    "T5ForSequenceClassification": T5,
    "BartForSequenceClassification": dict(max_position_embeddings=20, **SEQ2SEQ),
    "WhisperForConditionalGeneration": dict(
        SEQ2SEQ, vocab_size=60_000, num_mel_bins=8, max_source_positions=20, max_target_positions=20
    ),
    "CLIPModel": MIXED,
    "SiglipModel": MIXED,
    "Wav2Vec2Model": dict(
        conv_dim=(8, 8),
        conv_stride=(5, 5),
        conv_kernel=(5, 5),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        **SMALL,
    ),
    "ASTForAudioClassification": dict(max_length=40, num_mel_bins=20, patch_size=8, **SMALL),
    "LlamaForCausalLM": dict(vocab_size=40, **SMALL),
    "ViTMAEForPreTraining": dict(
        image_size=8,
        patch_size=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
        **SMALL,
    ),
    "GPT2ForSequenceClassification": dict(n_embd=12, n_layer=1, n_head=2, vocab_size=40),  # no padding token
}


@pytest.mark.parametrize("case", zoo.one_of_each_class())
def test_a_model_is_the_same_as_itself(case: str) -> None:
    model = zoo.CASES[case]()
    found = compare_models(model, copy.deepcopy(model))
    assert found.same and found.max_difference == 0 and found.outputs


@pytest.mark.parametrize("case", THOROUGH)
def test_every_parameter_matters(case: str) -> None:
    """A change of any tensor that the outputs depend on is seen: the inputs reach every part of the model."""
    model = zoo.CASES[case]().double()
    changed = copy.deepcopy(model)
    # A key bias adds one number to a row of logits under softmax.
    unseen = ("key.bias", "k_lin.bias", "key_proj.bias", "k_proj.bias")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in changed.named_parameters():
        if name.endswith(unseen) or (".0." in name and "embeddings" not in name):  # the second layer speaks for both
            continue
        old = parameter.detach().clone()
        with torch.no_grad():
            parameter += torch.randn(parameter.shape, generator=generator)
        assert not compare_models(model, changed).same, name
        with torch.no_grad():
            parameter.copy_(old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["OlmoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_that_grouped_products_do_not_take(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Six neurons are 24 bytes; torch's grouped products want multiples of 16, and no float64."""
    folder = zoo.save(zoo.CASES[case](), tmp_path / "model")
    assert compare(folder, folder, dtype=dtype).same
    assert onebasin.match(folder, folder, tmp_path / "moved", symmetry="paper")["max_output_difference"] < 1e-4
    given = torch.arange(6).view(1, 6)
    assert bool(onebasin.data.load_model(folder, "causal-lm")(input_ids=given).logits.isfinite().all())


@pytest.mark.parametrize("kind", ["vjepa2", "mgp-str", "speech-encoder-decoder", "voxtral_realtime"])
def test_types_with_inputs_or_outputs_of_their_own(tmp_path: Path, kind: str) -> None:
    """Videos go in under a name of their own, several heads come out as one tuple, sounds go in by one name of two,
    beside what the decoder reads: only the 35th recipe; and a text is as long as the sound beside it."""
    model = twins.build(kind)[0].float()
    assert compare_models(model, model).same
    changed = twins.random_model(model.config, type(model), seed=1).float()
    assert not compare_models(model, changed).same
    model.save_pretrained(tmp_path / "model")
    found = onebasin.match(tmp_path / "model", tmp_path / "model", tmp_path / "moved", match="full")
    assert found["max_output_difference"] < 1e-4


@pytest.mark.parametrize("kind", ["mimi_encoder", "pocket_tts_audio_tokenizer", "muse_glimmer_vision"])
def test_what_a_class_says_of_a_cache_or_of_widths_is_heeded(kind: str) -> None:
    """The first two say themselves what is cached, the second by a module inside; the third names a width."""
    model = twins.build(kind)[0].float()
    assert compare_models(model, model).same


def test_a_class_may_have_no_source() -> None:
    """One that was typed into an interpreter."""
    scope: dict[str, Any] = {"Module": torch.nn.Module}
    exec("class Typed(Module):\n    class config: use_cache = True\n    def forward(self, **how): ...", scope)
    assert without_cache(scope["Typed"]()) == {"use_cache": False}


def test_a_model_that_accepts_no_inputs_says_why_for_the_usual_ones() -> None:
    model = zoo.CASES["BertModel"]()
    model.forward = lambda input_ids, attention_mask=None, **_: 1 / 0
    with pytest.raises(ModelError, match="cannot be run on random inputs: division by zero"):
        compare_models(model, model)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_model_get_inputs_that_fit(tmp_path: Path, kind: str) -> None:
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**OTHERS[kind])).eval()
    folder = zoo.save(model, tmp_path / kind)
    found = compare(folder, folder)
    assert found.same and found.max_difference == 0 and found.outputs
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    assert not compare_models(model, changed).same


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "ViTForImageClassification", "GPT2LMHeadModel"])
def test_rotated_and_rounded_is_same_and_wrong_is_not(make, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Six layers, rotated and rounded to `dtype` again; then with one tensor forgotten."""
    depth = {"n_layer" if "GPT2" in kind else "num_hidden_layers": 6}
    model = Folder(make(kind, dtype=dtype, **depth))
    signature = model.signature
    maths = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    groups = acting_groups(signature, "paper")
    batch = {key: signature.spaces[key].batch for key in groups}
    elements = {
        key: group.random(signature.sizes[key], tuple(signature.sizes[outer] for outer in batch[key]), generator)
        for key, group in groups.items()
    }
    g = Alignment(elements, batch)

    def rewrite(name: str, skip: str = "") -> Path:
        tensors = (
            (entry.name, tensor if role == skip else g.apply(signature, role, tensor))
            for role, entry in signature.tensors.items()
            for tensor in [model.read(role, maths)]
        )
        write_model(tmp_path / name, tensors, model)
        return tmp_path / name

    right = compare(model.folder, rewrite("right"), dtype=maths)
    assert right.same, right
    assert right.max_difference > 0
    writes = next(
        role for role, entry in signature.tensors.items() if signature.part(entry) == "ffn" and len(entry.shape) == 2
    )
    wrong = compare(model.folder, rewrite("wrong", skip=writes), dtype=maths)
    assert not wrong.same and wrong.relative_difference > 3 * wrong.tolerance


def test_tolerance_is_that_of_the_coarsest(make) -> None:
    a, b = make(dtype=torch.float32), make(name="b", dtype=torch.bfloat16)
    assert compare(a, a).tolerance == tolerance_of(torch.float32)
    assert compare(a, b).tolerance == compare(b, a).tolerance == tolerance_of(torch.bfloat16)
    c = make(name="c", dtype=torch.float64)
    assert compare(c, c).tolerance == tolerance_of(torch.float32)  # the forward pass is the coarser of the two
    assert compare(c, c, dtype=torch.float64).tolerance == tolerance_of(torch.float64)
    assert compare(a, b, tolerance=0.5).tolerance == 0.5


def test_what_stands_at_padding_is_not_compared(tmp_path: Path) -> None:
    """ModernBERT's window leaves padded queries without a key: value biases pass through no softmax there."""
    folder = Folder(zoo.save(zoo.CASES["ModernBertForMaskedLM-biases"]().double(), tmp_path))
    form = Canonical(folder, torch.float64)
    assert compare_rewritten(folder, form, dtype=torch.float64).same


def test_the_figures(make) -> None:
    """A bias of the output layer moved by 1: the difference is 1, relative to the largest logit."""
    a, b = make(), make(name="b")
    edit_weights(b, lambda t: t["classifier.bias"].add_(torch.tensor([0, 1.0, 0])))
    found = compare(a, b)
    assert found.max_difference == pytest.approx(1, rel=1e-5)
    assert not found.same
    doubled = make(name="doubled")
    edit_weights(doubled, lambda t: [t[f"classifier.{of}"].mul_(2) for of in ("weight", "bias")])
    assert compare(a, doubled).relative_difference == pytest.approx(1, rel=1e-5)
    assert compare(doubled, a).relative_difference == pytest.approx(0.5, rel=1e-5)


def test_outputs_that_are_not_finite_are_not_the_same(make) -> None:
    a, b = make(), make(name="b")
    edit_weights(b, lambda t: t["classifier.bias"].fill_(math.nan))
    found = compare(a, b)
    assert not found.same and found.relative_difference == math.inf


def test_a_model_whose_own_outputs_are_nan_is_told_so(make) -> None:
    """It is not the copy that differs by infinity."""
    folder, other = make(name="a"), make(name="b")
    edit_weights(folder, lambda t: t["bert.embeddings.LayerNorm.weight"].fill_(3e38))
    for b in (folder, other):
        with pytest.raises(ModelError, match="'logits' of the first model is NaN on random inputs in float32"):
            compare(folder, b)
    assert not compare(other, folder).same  # in float64, where its outputs are finite


def test_pickled_weights_are_compared_too(make) -> None:
    a, b = make(), make(name="b")
    to_pickle(b)
    assert compare(a, b).max_difference == 0


# --- what cannot be compared -----------------------------------------------------------------------


def test_base_and_head_model_have_no_output_in_common(make) -> None:
    with pytest.raises(ModelError, match="no output in common: BertModel returns last_hidden_state"):
        compare(make("BertModel"), make("BertForTokenClassification"))


def test_a_model_without_its_pooler(make) -> None:
    a, b = make("BertModel"), make("BertModel", "b")
    edit_weights(b, lambda t: [t.pop("pooler.dense.weight"), t.pop("pooler.dense.bias")])
    assert compare(a, b).outputs == ("last_hidden_state",) and compare(a, b).same


def test_class_counts_that_differ(make) -> None:
    with pytest.raises(ModelError, match=r"shape of 'logits': \(4, 3\) and \(4, 5\)"):
        compare(make(), make(name="five", num_labels=5))


def test_missing_weights_are_named(make) -> None:
    a, b = make(), make(name="b")
    edit_weights(b, lambda t: t.pop("classifier.weight"))
    with pytest.raises(ModelError, match=r"needs 'classifier.weight', which the weights lack"):
        compare(a, b)


def test_weights_that_one_model_alone_has_are_named(make) -> None:
    a, b = make(), make(name="b")
    edit_weights(b, lambda t: t.update({"adapter.weight": torch.ones(2)}))
    for pair in ((a, b), (b, a)):
        with pytest.raises(ModelError, match=r"does not use 'adapter.weight'"):
            compare(*pair)


def test_weights_that_neither_uses_are_reported(make) -> None:
    """Released models often name a class that leaves out a head they also hold."""
    a, b = make("BertForPreTraining"), make("BertForPreTraining", "b")
    for folder in (a, b):
        edit_config(folder, architectures=["BertForMaskedLM"])
    found = compare(a, b)
    assert found.same
    assert "cls.seq_relationship.weight" in found.unused and "bert.pooler.dense.weight" in found.unused


def test_weights_of_a_wrong_shape(make) -> None:
    a, b = make(), make(name="b")
    edit_weights(b, lambda t: t.update({"classifier.weight": torch.ones(3, 5)}))
    with pytest.raises(ModelError) as caught:
        compare(a, b)
    assert "'classifier.weight' has shape (3, 5)" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_sizes_that_would_take_all_memory_are_refused_before_anything_is_made(
    make, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class would be filled with random numbers first."""
    a, b = make(), make(name="b")
    edit_config(b, **{key: 10**8})
    monkeypatch.setattr(
        transformers.BertForSequenceClassification, "from_pretrained", lambda *_, **__: pytest.fail("made")
    )
    for load in (lambda: compare(b, a), lambda: pretrained(b), lambda: load_model(b, "text-classification")):
        with pytest.raises(
            ModelError, match=r"has shape \(\d+, 12\), and BertForSequenceClassification needs \(100000000, "
        ):
            load()


def test_a_token_id_that_no_class_checks_is_none(make) -> None:
    folder = make()
    edit_config(folder, decoder_start_token_id=1.5)
    assert compare(folder, folder).same


def test_damaged_folders(make) -> None:
    a, b = make(), make(name="b")
    file = b / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ModelError):
        compare(a, b)
    (b / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        compare(a, b)


def test_no_code_from_a_folder_is_run(make, tmp_path: Path) -> None:
    folder, marker = make(), tmp_path / "marker"
    for file in ("modeling_evil.py", "configuration_evil.py"):
        (folder / file).write_text(f"open({str(marker)!r}, 'w').write('ran')\nclass Evil: pass\n")
    names = {"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    edit_config(folder, auto_map={**names, "AutoModelForSequenceClassification": "modeling_evil.Evil"})
    assert compare(folder, folder).same
    edit_config(folder, architectures=["Evil"])
    with pytest.raises(ModelError, match=r"code of its own for it .*, which is never run"):
        compare(folder, make(name="whole"))
    edit_config(folder, model_type="evil")
    with pytest.raises(ModelError):
        compare(folder, folder)
    assert not marker.exists()


def test_an_architecture_that_is_no_model(make) -> None:
    folder = make("BertModel")
    for name in ("pipeline", "BertConfig", "no_such_name"):
        edit_config(folder, architectures=[name])
        assert compare(folder, folder).outputs == ("last_hidden_state", "pooler_output")


# --- manners ---------------------------------------------------------------------------------------


def test_nothing_global_changes(make, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make()
    transformers.logging.enable_progress_bar()
    capfd.readouterr()
    state = torch.random.get_rng_state()
    level = transformers.logging.get_verbosity()
    try:
        compare(folder, folder)
        assert transformers.utils.logging.is_progress_bar_enabled()
    finally:
        transformers.logging.disable_progress_bar()
    assert transformers.logging.get_verbosity() == level
    assert torch.equal(state, torch.random.get_rng_state())
    assert capfd.readouterr() == ("", "")


def test_models_are_left_in_their_mode(make) -> None:
    model = pretrained(make())
    model.train()
    assert compare_models(model, model).max_difference == 0
    assert model.training


def test_pretrained_keeps_the_stored_dtype(make) -> None:
    folder = make(dtype=torch.float16)
    assert pretrained(folder).dtype == torch.float16
    assert pretrained(folder, torch.float64).dtype == torch.float64
    assert type(pretrained(folder)).__name__ == "BertForSequenceClassification"


def test_a_counter_is_verified_and_written_as_it_is(tmp_path: Path) -> None:
    model = zoo.CASES["HubertForCTC-batch-norm"]()
    (counter,) = (buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked"))
    counter.fill_(7)
    a, b = zoo.save(model, tmp_path / "a"), zoo.save(zoo.CASES["HubertForCTC-batch-norm"](), tmp_path / "b")
    onebasin.match(a, b, tmp_path / "out", symmetry="permutation")  # verifies the rewritten tensors before it writes
    written = pretrained(tmp_path / "out")
    assert [int(buffer) for name, buffer in written.named_buffers() if name.endswith("num_batches_tracked")] == [7]
    assert compare(a, tmp_path / "out").same
