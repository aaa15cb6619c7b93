# SPDX-License-Identifier: Apache-2.0
"""Stock models of a family that are small enough to compute the Jacobian of their outputs in seconds."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from onebasin.models.errors import one_line

# A table of tokens or positions has more rows than the width of the stream, an embedding
# is wider than a head, and the output of convolutions of sound is wider than the stream: otherwise the inputs of a
# layer would not use all of its weights.
SIZES: dict[str, Any] = dict(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, rotary_dim=2,
    intermediate_size=5, n_inner=5, hidden_dim=5, ffn_dim=5, ffn_hidden_size=5, d_ff=5, mlp_ratio=1,
    embedding_size=6, word_embed_proj_dim=8, projection_dim=8, classifier_proj_size=8,
    vocab_size=24, max_position_embeddings=4, type_vocab_size=2, pad_token_id=None,
    image_size=4, patch_size=2, num_channels=2, num_labels=12,
    encoder_layers=1, decoder_layers=1, num_decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=5, decoder_ffn_dim=5, relative_attention_num_buckets=6, relative_attention_max_distance=5,
    num_mel_bins=3, max_source_positions=4, max_target_positions=4,
    num_local_experts=2, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=4,
    shared_expert_intermediate_size=4,
    conv_dim=(4, 4, 4, 4, 4, 4, 10), conv_stride=(2, 2, 1, 1, 1, 1, 1), conv_kernel=(3, 2, 2, 2, 2, 2, 2),
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
)  # fmt: skip
TOWERS = ("text_config", "vision_config")  # configurations inside a configuration
END = dict(eos_token_id=2)  # CLIP then uses the output at the largest token, instead of the first

# The heads that reveal most of a model, with one output per token or class.
HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "CTC", "IMAGE_CLASSIFICATION")


def tiny_model(kind: str, **settings: Any) -> PreTrainedModel:
    """Return a stock model of a type that is small enough to compute its Jacobian in seconds."""
    cls = CONFIG_MAPPING[kind]
    own = cls.attribute_map  # common name -> the configuration's
    known = _sizes(cls)
    for tower in TOWERS:
        if tower in cls.sub_configs:
            known[tower] = {**_sizes(cls.sub_configs[tower]), **END, **settings.pop(tower, {})}
    settings = {own.get(name, name): value for name, value in settings.items()}
    rope = getattr(cls(), "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) < 1:
        known["rope_parameters"] = {**rope, "partial_rotary_factor": 0.5}  # of a head of four
    try:
        config = cls(**{**known, **settings})
        heads = [getattr(transformers, f"MODEL_FOR_{head}_MAPPING") for head in HEADS]
        towers = any(tower in cls.sub_configs for tower in TOWERS)  # the base model compares them
        headed = next((head[cls] for head in heads if cls in head and not towers), transformers.MODEL_MAPPING[cls])
        build: Any = headed[0] if isinstance(headed, tuple) else headed
        model: PreTrainedModel = build(config)
    except Exception as error:  # each configuration refuses bad values in its own way
        raise ValueError(f"a tiny '{kind}' cannot be built: {one_line(error)}") from None
    return model


def _sizes(cls: type[PretrainedConfig]) -> dict[str, Any]:
    """Return `SIZES` under the names of a configuration."""
    return {cls.attribute_map.get(name, name): value for name, value in SIZES.items() if takes(cls, name)}


def takes(cls: type[PretrainedConfig], name: str) -> bool:
    """Return whether a configuration has this setting, under its own name or a common one."""
    return name == "num_labels" or name in inspect.signature(cls).parameters or name in cls.attribute_map
