# SPDX-License-Identifier: Apache-2.0
"""Tiny stock models of every family, head and configuration that changes a table; every parameter is random.

`CASES` maps a name (the class, and the variant after a dash) to a builder. Biases and norms are random too: a
table that forgets a bias is right about a freshly initialised model, whose biases are zero.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from onebasin.families import table_for, tables
from onebasin.running.expert_layout import running_experts
from onebasin.running.float64 import throughout

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, POSITIONS, LENGTH, BATCH, LABELS = 23, 12, 7, 2, 3

TEXT = dict(
    vocab_size=VOCAB, max_position_embeddings=POSITIONS, hidden_size=12, num_hidden_layers=2,
    num_attention_heads=3, intermediate_size=10, type_vocab_size=2, num_labels=LABELS, pad_token_id=0,
)  # fmt: skip
DISTIL = dict(
    vocab_size=VOCAB, max_position_embeddings=POSITIONS, dim=12, n_layers=2, n_heads=3, hidden_dim=10,
    num_labels=LABELS, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(
    vocab_size=VOCAB, n_positions=POSITIONS, n_embd=12, n_layer=2, n_head=3, n_inner=10,
    num_labels=LABELS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IMAGE = dict(
    image_size=6, patch_size=3, num_channels=2, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
    intermediate_size=10, num_labels=LABELS,
)  # fmt: skip
# Four query heads on two key and value heads; a head is wider than hidden_size / heads where the config allows it.
ROTARY = dict(
    vocab_size=VOCAB, max_position_embeddings=POSITIONS, hidden_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=10, num_labels=LABELS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    head_dim=6,
)  # fmt: skip
DISENTANGLED = dict(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False)

CASES: dict[str, partial[PreTrainedModel]] = {}


def build(kind: str, **config: Any) -> PreTrainedModel:
    """The stock model `kind` in eval mode, its parameters drawn from a seed that depends on `kind` alone."""
    cls = getattr(transformers, kind)
    options = _options(config)
    if "QuestionAnswering" in kind:
        config["num_labels"] = 2  # start and end
    values = {key: value for key, value in config.items() if not key.startswith("_")}
    model: PreTrainedModel = cls(cls.config_class(**values), **options).eval()
    generator = torch.Generator().manual_seed(crc32(kind.encode()))
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                centre = float(name == "weight" and is_norm(module) and "Gemma" not in type(module).__name__)
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
            if hasattr(module, "e_score_correction_bias"):  # learned by other means than gradients
                module.e_score_correction_bias.normal_(generator=generator)
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_(generator=generator)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2, generator=generator)  # type: ignore[union-attr]
    return model


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """What a model class takes besides its config: keys with an underscore before them."""
    return {key[1:]: value for key, value in config.items() if key.startswith("_")}


def load(case: str, folder: str | Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of a case read from a folder, every tensor of it found there and held in `dtype`.

    DeBERTa declares two of its biases float32, and loading rounds them to that; they are read once more.
    """
    builder = CASES[case]
    cls = getattr(transformers, builder.args[0])
    options = _options(builder.keywords)
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        for name, parameter in model.named_parameters():
            if parameter.dtype != dtype:
                parameter.data = file.get_tensor(name).to(dtype)
    loaded: PreTrainedModel = model.eval().to(dtype)  # buffers, too: rotary frequencies are float32 where they are made
    return loaded


def _add(kinds: str, variant: str = "", **config: Any) -> None:
    for kind in kinds.split():
        CASES[f"{kind}-{variant}" if variant else kind] = partial(build, kind, **config)


_BERT_HEADS = (
    "MaskedLM MultipleChoice NextSentencePrediction PreTraining QuestionAnswering SequenceClassification "
    "TokenClassification"
)
_TEXT_HEADS = "CausalLM MaskedLM MultipleChoice QuestionAnswering SequenceClassification TokenClassification"
_DECODER = dict(is_decoder=True, add_cross_attention=True)


def _heads(prefix: str, heads: str) -> str:
    return " ".join(f"{prefix}For{head}" for head in heads.split())


_add("BertModel BertLMHeadModel " + _heads("Bert", _BERT_HEADS), **TEXT)
_add("BertModel", "no-pooler", **TEXT, _add_pooling_layer=False)
_add("BertForPreTraining BertLMHeadModel", "untied", **TEXT, tie_word_embeddings=False)
_add("BertForMaskedLM", "relu", **TEXT, hidden_act="relu")
_add("BertLMHeadModel", "cross", **TEXT, **_DECODER)
_add("ErnieForPreTraining ErnieForTokenClassification", **TEXT, use_task_id=True)

_add("RobertaModel " + _heads("Roberta", _TEXT_HEADS), **TEXT)
_add("RobertaForMaskedLM", "untied", **TEXT, tie_word_embeddings=False)
_add("RobertaForCausalLM", "cross", **TEXT, **_DECODER)
_add("XLMRobertaForSequenceClassification CamembertForMaskedLM Data2VecTextForMaskedLM", **TEXT)

_add("ElectraModel ElectraForPreTraining " + _heads("Electra", _TEXT_HEADS), **TEXT, embedding_size=8)
_add("ElectraForMaskedLM", "wide", **TEXT, embedding_size=12)
_add("ElectraForMaskedLM", "untied", **TEXT, embedding_size=8, tie_word_embeddings=False)
_add("ElectraForMultipleChoice", "no-summary", **TEXT, embedding_size=8, summary_use_proj=False)

_add("DistilBertModel " + _heads("DistilBert", _TEXT_HEADS.removeprefix("CausalLM")), **DISTIL)
_add("DistilBertForMaskedLM", "relu", **DISTIL, activation="relu")
_add("DistilBertForMaskedLM", "untied", **DISTIL, tie_word_embeddings=False)

_add("AlbertModel AlbertForPreTraining " + _heads("Albert", _TEXT_HEADS.removeprefix("CausalLM")),
     **TEXT, embedding_size=8)  # fmt: skip
_add("AlbertModel", "no-pooler", **TEXT, embedding_size=8, _add_pooling_layer=False)
_add("AlbertForMaskedLM", "groups", **TEXT, embedding_size=8, num_hidden_groups=2, inner_group_num=2)
_add("AlbertForMaskedLM", "untied", **TEXT, embedding_size=8, tie_word_embeddings=False)

_V3 = dict(DISENTANGLED, share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm")
_add("DebertaV2Model " + _heads("DebertaV2", _TEXT_HEADS.removeprefix("CausalLM")), **_V3)
_add("DebertaV2ForMaskedLM", "new-head", **_V3, legacy=False)
_add("DebertaV2ForMaskedLM", "untied", **_V3, tie_word_embeddings=False)
_add("DebertaV2ForTokenClassification", "conv", **_V3, conv_kernel_size=3, conv_act="gelu")
_add("DebertaV2ForTokenClassification", "own-keys", **DISENTANGLED)
_add("DebertaV2ForTokenClassification", "own-keys-conv", **DISENTANGLED, conv_kernel_size=3, conv_act="gelu")
_add("DebertaV2ForTokenClassification", "own-keys-norm", **DISENTANGLED, norm_rel_ebd="layer_norm")
_add("DebertaV2ForTokenClassification", "c2p", **{**_V3, "pos_att_type": ["c2p"]})
_add("DebertaV2ForTokenClassification", "plain", **TEXT)
_add("DebertaV2ForTokenClassification", "plain-norm", **TEXT, norm_rel_ebd="layer_norm")
_add("DebertaV2ForTokenClassification", "narrow", **_V3, embedding_size=8)
_add("DebertaV2ForMaskedLM", "narrow", **{**_V3, "position_biased_input": True}, embedding_size=8)
_add("DebertaForMaskedLM DebertaModel DebertaForTokenClassification DebertaForSequenceClassification "
     "DebertaForQuestionAnswering", **DISENTANGLED)  # fmt: skip
_add("DebertaForMaskedLM", "new-head", **DISENTANGLED, legacy=False)
_add("DebertaForTokenClassification", "talking", **DISENTANGLED, talking_head=True)
_add("DebertaForTokenClassification", "c2p", **{**DISENTANGLED, "pos_att_type": ["c2p"]})
_add("DebertaForTokenClassification", "narrow", **DISENTANGLED, embedding_size=8)
_add("DebertaForTokenClassification", "plain", **TEXT)

_add("GPT2Model GPT2LMHeadModel GPT2DoubleHeadsModel", **GPT2)
_add(_heads("GPT2", "SequenceClassification TokenClassification QuestionAnswering"), **GPT2)
_add("GPT2DoubleHeadsModel", "no-summary", **GPT2, summary_use_proj=False)
_add("GPT2LMHeadModel", "untied", **GPT2, tie_word_embeddings=False)
_add("GPT2LMHeadModel", "relu", **GPT2, activation_function="relu")
_add("GPT2LMHeadModel", "cross", **GPT2, add_cross_attention=True)

_add("ViTModel ViTForImageClassification", **IMAGE)
_add("ViTModel", "no-pooler", **IMAGE, _add_pooling_layer=False)
_add("ViTForImageClassification", "no-bias", **IMAGE, qkv_bias=False)
_add("ViTForImageClassification", "relu", **IMAGE, hidden_act="relu")
_add("DeiTModel DeiTForImageClassification DeiTForImageClassificationWithTeacher", **IMAGE)
_add("ViTForMaskedImageModeling DeiTForMaskedImageModeling", **IMAGE, encoder_stride=3)

_add("LlamaForCausalLM LlamaModel LlamaForSequenceClassification LlamaForTokenClassification "
     "LlamaForQuestionAnswering", **ROTARY)  # fmt: skip
_add("LlamaForCausalLM", "tied", **ROTARY, tie_word_embeddings=True)
_add("LlamaForCausalLM", "biases", **ROTARY, attention_bias=True, mlp_bias=True)
_add("LlamaForCausalLM", "mha", **{**ROTARY, "num_key_value_heads": 4})
_add("LlamaForCausalLM", "mqa", **{**ROTARY, "num_key_value_heads": 1})
_add("MistralForCausalLM", "sliding", **ROTARY, sliding_window=3)
_add("Qwen2ForCausalLM Qwen2ForSequenceClassification", **{**ROTARY, "hidden_size": 16})
_add("Qwen2ForCausalLM", "tied", **{**ROTARY, "hidden_size": 16}, tie_word_embeddings=True)
_add("Qwen3ForCausalLM Qwen3ForTokenClassification", **ROTARY)
_add("Qwen3ForCausalLM", "tied", **ROTARY, tie_word_embeddings=True)
_add("Qwen3ForCausalLM", "mha-biases", **{**ROTARY, "num_key_value_heads": 4}, attention_bias=True)

_SIXTEEN = {key: value for key, value in {**ROTARY, "hidden_size": 16}.items() if key != "head_dim"}
_HALF = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
_add("Phi3ForCausalLM Phi3ForSequenceClassification", **_SIXTEEN)
_add("Phi3ForCausalLM", "partial", **_SIXTEEN, **_HALF)
_add("Phi3ForCausalLM", "mha-tied", **{**_SIXTEEN, "num_key_value_heads": 4}, tie_word_embeddings=True)
_add("GemmaForCausalLM GemmaForSequenceClassification", **ROTARY)
_add("GemmaForCausalLM", "mqa", **{**ROTARY, "num_key_value_heads": 1})
_add("GemmaForCausalLM", "untied", **ROTARY, tie_word_embeddings=False)
_add("GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Olmo2ForCausalLM", "biases", **ROTARY, attention_bias=True)
_add("Gemma2ForCausalLM Gemma2ForSequenceClassification", **ROTARY)
_add("Gemma2ForCausalLM", "untied", **ROTARY, tie_word_embeddings=False)
_add("Gemma3ForCausalLM", **ROTARY)
_add("Gemma3ForCausalLM", "mqa-untied", **{**ROTARY, "num_key_value_heads": 1}, tie_word_embeddings=False)
_add("Olmo2ForCausalLM Olmo2Model", **_SIXTEEN)
_add("Olmo2ForCausalLM", "mha-tied", **{**_SIXTEEN, "num_key_value_heads": 4}, tie_word_embeddings=True)
_add("GPTNeoXForCausalLM GPTNeoXForSequenceClassification GPTNeoXForQuestionAnswering", **_SIXTEEN, **_HALF)
_add("GPTNeoXForCausalLM", "odd-rotary", **{**_SIXTEEN, "hidden_size": 24}, **_HALF)  # 3 of 6: they turn with a fourth
_add("GPTNeoXForCausalLM", "serial", **_SIXTEEN, **_HALF, use_parallel_residual=False)
_add("GPTNeoXForCausalLM", "no-bias", **_SIXTEEN, **_HALF, attention_bias=False)
_add("GPTNeoXForCausalLM", "serial-no-bias", **_SIXTEEN, **_HALF, attention_bias=False, use_parallel_residual=False)
_add("GPTNeoXForCausalLM", "tied-relu", **_SIXTEEN, **_HALF, tie_word_embeddings=True, hidden_act="relu")
_add("GPTNeoXForCausalLM", "full-rotary", **_SIXTEEN,
     rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0))  # fmt: skip
_GPTJ = dict(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=4, n_inner=10,
             num_labels=LABELS, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
_add("GPTJForCausalLM GPTJForSequenceClassification GPTJForQuestionAnswering", **_GPTJ, rotary_dim=2)
_add("GPTJForCausalLM", "full-rotary", **_GPTJ, rotary_dim=4)
_FALCON = dict(vocab_size=VOCAB, max_position_embeddings=POSITIONS, hidden_size=16, num_hidden_layers=2,
               num_attention_heads=4, ffn_hidden_size=10, num_labels=LABELS, pad_token_id=0, bos_token_id=1,
               eos_token_id=2)  # fmt: skip
_add("FalconForCausalLM FalconForSequenceClassification FalconForTokenClassification FalconForQuestionAnswering",
     **_FALCON, multi_query=True)  # fmt: skip
_add("FalconForCausalLM", "groups", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True)
_add("FalconForCausalLM", "one-norm", **_FALCON, new_decoder_architecture=True, num_kv_heads=2,
     num_ln_in_parallel_attn=1)  # fmt: skip
_add("FalconForCausalLM", "alibi", **_FALCON, multi_query=False, alibi=True, bias=True, parallel_attn=False)
_add("FalconForCausalLM", "alibi-mqa", **_FALCON, multi_query=True, alibi=True, bias=True)
_add("FalconForCausalLM", "alibi-groups", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, alibi=True)
_add("FalconForCausalLM", "mha-untied", **_FALCON, multi_query=False, tie_word_embeddings=False)
_add("FalconForCausalLM", "mqa-serial-biases", **_FALCON, multi_query=True, parallel_attn=False, bias=True)
_add("StableLmForCausalLM StableLmForSequenceClassification StableLmForTokenClassification", **_SIXTEEN, **_HALF)
_add("StableLmForCausalLM", "biases", **_SIXTEEN, **_HALF, use_qkv_bias=True, tie_word_embeddings=True)
_add("StableLmForCausalLM", "parallel", **_SIXTEEN, **_HALF, use_parallel_residual=True)
_add("StableLmForCausalLM", "mha", **{**_SIXTEEN, "num_key_value_heads": 4}, **_HALF)
_add("StableLmForCausalLM", "qk-layernorm", **_SIXTEEN, **_HALF, qk_layernorm=True)
_add("StableLmForCausalLM", "qk-layernorm-biases", **_SIXTEEN, **_HALF, qk_layernorm=True, use_qkv_bias=True)
_add("Starcoder2ForCausalLM CohereForCausalLM", "mha", **{**_SIXTEEN, "num_key_value_heads": 4})
_add("Starcoder2ForCausalLM Starcoder2ForSequenceClassification", **_SIXTEEN)
_add("Starcoder2ForCausalLM", "no-bias-untied", **_SIXTEEN, use_bias=False, tie_word_embeddings=False)
_add("Starcoder2ForCausalLM", "relu", **_SIXTEEN, hidden_act="relu")
_add("CohereForCausalLM CohereModel", **_SIXTEEN)
_add("CohereForCausalLM", "qk-norm", **_SIXTEEN, use_qk_norm=True, attention_bias=True)
_add("CohereForCausalLM", "untied", **_SIXTEEN, tie_word_embeddings=False)
_OPT = dict(vocab_size=VOCAB, max_position_embeddings=POSITIONS, hidden_size=12, word_embed_proj_dim=12, ffn_dim=10,
            num_hidden_layers=2, num_attention_heads=3, num_labels=LABELS, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)  # fmt: skip
_add("OPTForCausalLM OPTForSequenceClassification OPTForQuestionAnswering OPTModel", **_OPT)
_add("OPTForCausalLM", "narrow", **{**_OPT, "word_embed_proj_dim": 8}, do_layer_norm_before=False)
_add("OPTForCausalLM", "narrow-pre", **{**_OPT, "word_embed_proj_dim": 8})
_add("OPTForCausalLM", "gelu-no-bias", **_OPT, activation_function="gelu", enable_bias=False)
_add("OPTForCausalLM", "untied", **_OPT, tie_word_embeddings=False)
_add("OPTForCausalLM", "weightless-norms", **_OPT, layer_norm_elementwise_affine=False)
_add("OPTForCausalLM", "weightless-norms-untied", **_OPT, layer_norm_elementwise_affine=False,
     tie_word_embeddings=False)  # fmt: skip
_add("OPTForCausalLM", "post-untied", **_OPT, do_layer_norm_before=False, tie_word_embeddings=False)
_add("OPTForCausalLM", "post", **_OPT, do_layer_norm_before=False)
_add("OPTForCausalLM", "weightless-norms-narrow", **{**_OPT, "word_embed_proj_dim": 8}, do_layer_norm_before=False,
     layer_norm_elementwise_affine=False)  # fmt: skip
_BLOOM = dict(vocab_size=VOCAB, hidden_size=12, n_layer=2, n_head=3, num_labels=LABELS, pad_token_id=0)
_add("BloomForCausalLM BloomForSequenceClassification BloomForTokenClassification BloomForQuestionAnswering", **_BLOOM)
_add("BloomForCausalLM", "untied", **_BLOOM, tie_word_embeddings=False)
_add("BloomForCausalLM", "normed-residual", **_BLOOM, apply_residual_connection_post_layernorm=True)
_MPT = dict(vocab_size=VOCAB, d_model=12, n_layers=2, n_heads=3, expansion_ratio=2, max_seq_len=POSITIONS,
            num_labels=LABELS, pad_token_id=0)  # fmt: skip
_add("MptForCausalLM MptForSequenceClassification MptForTokenClassification MptForQuestionAnswering", **_MPT)
_add("MptForCausalLM", "clipped", **_MPT, attn_config=dict(clip_qkv=0.5))
_add("MptForCausalLM", "untied", **_MPT, tie_word_embeddings=False)
_add("MixtralForCausalLM MixtralForSequenceClassification", **_SIXTEEN, num_local_experts=3)
_add(
    "MixtralForCausalLM",
    "mha-tied",
    **{**_SIXTEEN, "num_key_value_heads": 4},
    num_local_experts=3,
    tie_word_embeddings=True,
)
_MOE = dict(**_SIXTEEN, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6)
_add("Qwen2MoeForCausalLM", **_MOE, shared_expert_intermediate_size=7)
_add("Qwen3MoeForCausalLM", **_MOE)
_add("OlmoeForCausalLM", **_MOE)
_add("OlmoeForCausalLM Qwen3MoeForCausalLM", "biases-tied", **_MOE, attention_bias=True, tie_word_embeddings=True)
_add("OlmoeForCausalLM", "clipped", **_MOE, attention_bias=True, clip_qkv=0.5)
_add("Qwen2MoeForCausalLM Qwen3MoeForCausalLM", "first-dense", **_MOE, mlp_only_layers=[0])
_add("Qwen2MoeForCausalLM", "dense-between", **{**_MOE, "num_hidden_layers": 3}, decoder_sparse_step=2,
     shared_expert_intermediate_size=7)  # fmt: skip

_T5 = dict(vocab_size=VOCAB, d_model=12, d_kv=5, d_ff=10, num_layers=2, num_decoder_layers=2, num_heads=3,
           relative_attention_num_buckets=8, relative_attention_max_distance=6, num_labels=LABELS, pad_token_id=0,
           eos_token_id=1, decoder_start_token_id=0)  # fmt: skip
_add("T5ForConditionalGeneration T5Model T5EncoderModel T5ForSequenceClassification T5ForTokenClassification "
     "T5ForQuestionAnswering", **_T5)  # fmt: skip
_add("T5ForConditionalGeneration T5EncoderModel", "gated", **_T5, feed_forward_proj="gated-gelu")
_add("T5ForConditionalGeneration", "gated-relu", **_T5, feed_forward_proj="gated-relu")
_add("T5ForConditionalGeneration", "untied", **_T5, tie_word_embeddings=False)
_add("MT5ForConditionalGeneration", **_T5, feed_forward_proj="gated-gelu")
_BART = dict(vocab_size=VOCAB, max_position_embeddings=POSITIONS, d_model=12, encoder_layers=2, decoder_layers=2,
             encoder_attention_heads=3, decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=9,
             num_labels=LABELS, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip
_add("BartForConditionalGeneration BartModel BartForSequenceClassification BartForQuestionAnswering", **_BART)
_add("BartForConditionalGeneration", "relu", **_BART, activation_function="relu", scale_embedding=True)
_add("MBartForConditionalGeneration MBartModel MBartForSequenceClassification MBartForQuestionAnswering", **_BART)
_add("MBartForConditionalGeneration", "relu", **_BART, activation_function="relu", scale_embedding=True)
_add("BartForConditionalGeneration MBartForConditionalGeneration", "untied", **_BART, tie_word_embeddings=False)
_add("BartForConditionalGeneration MBartForConditionalGeneration", "untied-scaled", **_BART, tie_word_embeddings=False,
     scale_embedding=True)  # fmt: skip
_add("BartForCausalLM MBartForCausalLM", **{**_BART, "encoder_layers": 1}, add_cross_attention=True)
_add("BartForCausalLM", "untied", **_BART, tie_word_embeddings=False, add_cross_attention=True)
_add("BartForCausalLM MBartForCausalLM", "alone", **_BART)
_WHISPER = dict({key: value for key, value in _BART.items() if key != "max_position_embeddings"}, num_mel_bins=4,
                max_source_positions=6, max_target_positions=POSITIONS, classifier_proj_size=8)  # fmt: skip
_add("WhisperForConditionalGeneration WhisperModel WhisperForAudioClassification", **_WHISPER)
_add("WhisperForAudioClassification", "layer-sum", **_WHISPER, use_weighted_layer_sum=True)
_add("WhisperForCausalLM", **{**_WHISPER, "encoder_layers": 1}, add_cross_attention=True)
_add("WhisperForConditionalGeneration", "relu", **_WHISPER, activation_function="relu")
_add("WhisperForConditionalGeneration", "untied", **_WHISPER, tie_word_embeddings=False)
_MODERN = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3,
               max_position_embeddings=POSITIONS, num_labels=LABELS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
               cls_token_id=1, sep_token_id=2, local_attention=4,
               layer_types=["full_attention", "sliding_attention"])  # fmt: skip
_add("ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification ModernBertForTokenClassification "
     "ModernBertForQuestionAnswering", **_MODERN)  # fmt: skip
_add("ModernBertForMaskedLM", "biases", **_MODERN, attention_bias=True, mlp_bias=True, norm_bias=True,
     classifier_bias=True)  # fmt: skip
_add("ModernBertForMaskedLM", "untied", **_MODERN, tie_word_embeddings=False)
_add("ModernBertForMaskedLM", "norm-biases", **_MODERN, norm_bias=True)
_SPEECH = dict(
    vocab_size=VOCAB,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=10,
    conv_dim=(6, 5, 6, 5, 6, 5, 6),
    conv_stride=(2, 2, 1, 1, 1, 1, 1),
    conv_kernel=(3, 2, 2, 2, 2, 2, 2),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    num_labels=LABELS,
    pad_token_id=0,
    classifier_proj_size=8,
    codevector_dim=8,
    proj_codevector_dim=8,
    num_codevectors_per_group=4,
)
_add("Wav2Vec2ForCTC Wav2Vec2Model Wav2Vec2ForSequenceClassification Wav2Vec2ForPreTraining HubertForCTC", **_SPEECH)
_add("Wav2Vec2ForCTC HubertForCTC Wav2Vec2ForPreTraining", "stable", **_SPEECH, do_stable_layer_norm=True,
     feat_extract_norm="layer", conv_bias=True)  # fmt: skip
_add("Wav2Vec2ForCTC", "group-biases", **_SPEECH, conv_bias=True)
_add("Wav2Vec2ForCTC", "layer", **_SPEECH, feat_extract_norm="layer")
_add("Wav2Vec2ForCTC", "stable-group", **_SPEECH, do_stable_layer_norm=True)
_add("HubertForCTC", "raw-features", **_SPEECH, feat_proj_layer_norm=False)
_add("HubertForCTC", "batch-norm", **_SPEECH, conv_pos_batch_norm=True)
_add("Wav2Vec2ForCTC", "adapter", **_SPEECH, add_adapter=True, num_adapter_layers=2, adapter_stride=1)
_add("Wav2Vec2ForCTC Wav2Vec2Model", "narrow-adapter", **_SPEECH, add_adapter=True, num_adapter_layers=1,
     output_hidden_size=8, do_stable_layer_norm=True, feat_extract_norm="layer")  # fmt: skip
_add("Wav2Vec2ForCTC", "layer-adapters", **_SPEECH, adapter_attn_dim=4, do_stable_layer_norm=True,
     feat_extract_norm="layer")  # fmt: skip
_add("Wav2Vec2ForAudioFrameClassification", **_SPEECH)
_SUM = "Wav2Vec2ForSequenceClassification Wav2Vec2ForAudioFrameClassification HubertForSequenceClassification"
_add(_SUM, "layer-sum", **_SPEECH, use_weighted_layer_sum=True)
_add(_SUM, "stable-layer-sum", **_SPEECH, use_weighted_layer_sum=True, do_stable_layer_norm=True,
     feat_extract_norm="layer")  # fmt: skip
_TOWER = dict(hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3)
_SIGHT = dict(**_TOWER, image_size=6, patch_size=3, num_channels=2)
_WORDS = dict(**{**_TOWER, "hidden_size": 16, "num_attention_heads": 4}, vocab_size=VOCAB, pad_token_id=0,
              bos_token_id=1, eos_token_id=2, max_position_embeddings=POSITIONS)  # fmt: skip
_add("CLIPModel CLIPForImageClassification", text_config=_WORDS, vision_config=_SIGHT, projection_dim=8,
     num_labels=LABELS)  # fmt: skip
_add("Dinov2Model Dinov2ForImageClassification", **IMAGE, mlp_ratio=1)
_add("Dinov2ForImageClassification", "swiglu", **IMAGE, mlp_ratio=1, use_swiglu_ffn=True)
_add("Dinov2ForImageClassification", "no-bias", **IMAGE, mlp_ratio=1, qkv_bias=False, use_mask_token=False)
_add("Dinov2WithRegistersForImageClassification", **IMAGE, mlp_ratio=1, num_register_tokens=2)
_add("Dinov2WithRegistersForImageClassification", "swiglu-no-bias", **IMAGE, mlp_ratio=1, num_register_tokens=2,
     use_swiglu_ffn=True, qkv_bias=False)  # fmt: skip
_BEIT = dict(**IMAGE, vocab_size=VOCAB)
_add("BeitModel BeitForImageClassification", **_BEIT)
_add("BeitForMaskedImageModeling", **_BEIT, use_mask_token=True)
_add("BeitModel BeitForImageClassification", "class-token", **_BEIT, use_mean_pooling=False,
     use_relative_position_bias=True)  # fmt: skip
_add("BeitForImageClassification", "relative", **_BEIT, use_relative_position_bias=True)
_add("BeitForImageClassification", "shared-positions", **_BEIT, use_shared_relative_position_bias=True,
     use_absolute_position_embeddings=True)  # fmt: skip
_add("BeitForMaskedImageModeling", "shared", **_BEIT, use_shared_relative_position_bias=True, use_mask_token=True,
     use_absolute_position_embeddings=True)  # fmt: skip
_add("SiglipModel SiglipForImageClassification", text_config={**_WORDS, "hidden_size": 12}, vision_config=_SIGHT,
     num_labels=LABELS)  # fmt: skip
_add("SiglipForImageClassification", "no-head", text_config={**_WORDS, "hidden_size": 12},
     vision_config={**_SIGHT, "vision_use_head": False}, num_labels=LABELS)  # fmt: skip
# Five patches a side: the windows of two, and the groups of four, are padded.
_SWIN = dict(image_size=10, patch_size=2, num_channels=2, embed_dim=6, depths=[2, 1], num_heads=[2, 3], window_size=2,
             mlp_ratio=1.5, num_labels=LABELS, encoder_stride=4, drop_path_rate=0.0)  # fmt: skip
_add("SwinModel SwinForImageClassification", **_SWIN)
_add("SwinForMaskedImageModeling", **{**_SWIN, "image_size": 8})
_add("SwinForImageClassification", "positions", **_SWIN, use_absolute_embeddings=True)
_add("SwinForImageClassification", "no-bias", **_SWIN, qkv_bias=False)
_add("SwinForImageClassification", "three", **{**_SWIN, "depths": [1, 2, 1], "num_heads": [2, 2, 3]}, hidden_act="relu")
_add("CLIPTextModel CLIPTextModelWithProjection", **_WORDS, projection_dim=8)
_XLNET = dict(vocab_size=VOCAB, d_model=12, n_layer=2, n_head=3, d_inner=10, num_labels=LABELS, pad_token_id=0)
_add("XLNetModel XLNetLMHeadModel XLNetForSequenceClassification XLNetForTokenClassification "
     "XLNetForQuestionAnsweringSimple", **_XLNET)  # fmt: skip
_add("XLNetForSequenceClassification XLNetForMultipleChoice", "no-summary", **_XLNET, summary_use_proj=False)
_add("XLNetLMHeadModel", "relu-untied", **_XLNET, ff_activation="relu", tie_word_embeddings=False)
_LATENT = dict(
    **{key: value for key, value in _SIXTEEN.items() if key != "num_key_value_heads"}, num_key_value_heads=4,
    q_lora_rank=7, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=5, moe_intermediate_size=6,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
)  # fmt: skip
_add("DeepseekV3ForCausalLM DeepseekV3ForTokenClassification", **_LATENT)
_add("DeepseekV3ForCausalLM", "relu", **_LATENT, hidden_act="relu")
_add("DeepseekV3ForCausalLM", "half-biases", **_LATENT, rope_interleave=False, attention_bias=True)
_add("DeepseekV3ForCausalLM", "groups", **{**_LATENT, "n_group": 2, "q_lora_rank": None})
_LATENT["qk_nope_head_dim"] = 6  # DeepSeek-V2 turns pairs in place: a query's length must be even
_add("DeepseekV2ForCausalLM", **_LATENT, topk_method="greedy")
_add("DeepseekV2ForCausalLM", "groups", **{**_LATENT, "n_group": 2, "q_lora_rank": None},
     topk_method="group_limited_greedy")  # fmt: skip
_add("CLIPVisionModel CLIPVisionModelWithProjection", **_SIGHT, projection_dim=8)


def one_of_each_family() -> list[str]:
    """The first case of every table."""
    first: dict[str, str] = {}
    for case, builder in CASES.items():
        first.setdefault(table_for(getattr(transformers, builder.args[0]).config_class.model_type).family, case)
    assert first.keys() == tables().keys()
    return list(first.values())


def one_of_each_class() -> list[str]:
    """The first case of every model class."""
    first = {builder.args[0]: case for case, builder in reversed(CASES.items())}
    return [case for case in CASES if case in first.values()]


def save(model: PreTrainedModel, folder: str | Path) -> Path:
    """Write the model as an ordinary folder."""
    model.save_pretrained(folder)
    return Path(folder)


def inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Random valid inputs in the model's dtype: two rows, the second padded where the model takes a mask."""
    generator = torch.Generator().manual_seed(seed)
    config, name = model.config, type(model).__name__
    if hasattr(config, "vision_config") and "Image" not in name:  # an image and a text, compared
        picture = torch.randn(BATCH, 2, 6, 6, generator=generator).to(model.dtype)
        words = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
        words[:, -1] = config.text_config.eos_token_id or 0
        return {"pixel_values": picture, "input_ids": words}
    if model.main_input_name == "pixel_values":
        config = getattr(config, "vision_config", config)
        shape = (BATCH, config.num_channels, config.image_size, config.image_size)
        given = {"pixel_values": torch.randn(shape, generator=generator).to(model.dtype)}
        if "MaskedImage" in name:
            patches = (config.image_size // config.patch_size) ** 2
            given["bool_masked_pos"] = torch.arange(BATCH * patches).reshape(BATCH, patches) % 3 == 0
        return given
    if model.main_input_name == "input_features":  # a spectrogram, two frames for every position
        shape = (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        given = {"input_features": torch.randn(shape, generator=generator).to(model.dtype)}
        if "Classification" not in name:
            given["decoder_input_ids"] = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
        return given
    if model.main_input_name == "input_values":  # a sound wave
        return {"input_values": torch.randn(BATCH, 60, generator=generator).to(model.dtype)}
    shape = (BATCH, LENGTH)
    ids = torch.randint(3, VOCAB, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.long)
    ids[1, -2:], mask[1, -2:] = config.pad_token_id, 0
    given = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = torch.randint(3, VOCAB, shape, generator=generator)
        if "SequenceClassification" in name:  # reads the last end token, of which all rows have equally many
            given["input_ids"] = torch.where(torch.arange(LENGTH) == 4, config.eos_token_id, ids)
            del given["decoder_input_ids"]
    # GPT-2 has a type vocabulary of none: it would look token types up in its token table, which would be summed twice.
    if getattr(config, "type_vocab_size", 0) and config.model_type not in ("deberta", "deberta-v2"):
        given["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
    if config.model_type == "xlnet":  # two segments; the language model also asks from masks (its second stream)
        given["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
        if "LMHead" in name:
            given["perm_mask"] = torch.zeros(BATCH, LENGTH, LENGTH, dtype=model.dtype)
            given["perm_mask"][:, :, 3] = 1
            given["target_mapping"] = torch.zeros(BATCH, 1, LENGTH, dtype=model.dtype)
            given["target_mapping"][:, :, 3] = 1
    if "MultipleChoice" in name or "DoubleHeads" in name:
        given = {key: torch.stack([value, value.flip(0)], 1) for key, value in given.items()}
    if "DoubleHeads" in name:
        given["mc_token_ids"] = torch.tensor([[LENGTH - 1, 3], [2, 1]])
    if getattr(config, "add_cross_attention", False):
        encoder = torch.randn(BATCH, 5, config.hidden_size, generator=generator)
        given["encoder_outputs" if "Whisper" in name else "encoder_hidden_states"] = encoder.to(model.dtype)
    return given


@torch.no_grad()
def named_outputs(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """All floating-point tensors of the output, by name; no cache."""
    cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with running_experts(model), throughout(model.dtype):
        found = model(**given, **cache, return_dict=True)
    # What goes from a tower into the stream is not put out, nor are embeddings that are only compared.
    inner = ("hidden_states", "_embeds") if "logits_per_image" in found else ("hidden_states",)
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor) and not key.endswith(inner)}
    if getattr(model.config, "is_encoder_decoder", False):
        tensors.pop("encoder_last_hidden_state", None)  # what stands between encoder and decoder
    return {key: value for key, value in tensors.items() if value.is_floating_point()}


def outputs(model: PreTrainedModel, given: dict[str, Tensor]) -> list[Tensor]:
    """All floating-point tensors of the output, in order."""
    return list(named_outputs(model, given).values())


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__
