# SPDX-License-Identifier: Apache-2.0
"""Random valid configurations of every family, matched at a random level and compared by other code.

The sizes begin as those of the tests' tiny models. What the class of the model reads from its config is found by
watching it; every switch among these, and every size, is then drawn at random. Valid is what plain transformers builds
and runs.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import torch
import transformers
import zoo
from transformers import PreTrainedConfig, PreTrainedModel
from zoo import CASES

from .cases import OK, Case, Finding, Outcome, Place
from .commands import judge, listing, run, shown
from .damage import LEVELS, wrong_refusal
from .equality import ROUNDINGS, one_by_one, one_rounding, refuse_difference
from .folders import seeded

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh", "relu2", "sigmoid",
    "leaky_relu",
               "swish", "gelu_fast", "relu6", "mish", "linear"]  # fmt: skip
CHOICES: dict[str, list[Any]] = {  # switches whose values the class does not list
    "feed_forward_proj": ["relu", "gated-gelu", "gated-relu", "gelu", "gated-silu"],
    "pos_att_type": [["p2c"], ["c2p"], ["p2c", "c2p"], []],
    "norm_rel_ebd": ["none", "layer_norm"], "position_buckets": [-1, 2, 4, 8], "conv_kernel_size": [0, 1, 3],
    "conv_act": ["tanh", "gelu", "relu"], "feat_extract_norm": ["layer", "group"], "scoring_func": ["softmax",
    "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy"], "attn_type": ["bi", "uni"],
    "summary_type": ["last", "first", "mean"], "summary_activation": [None, "tanh"], "problem_type": [None],
    "classifier_pooling": ["cls", "mean"], "num_ln_in_parallel_attn": [None, 1, 2], "clip_qkv": [None, 0.5, 8.0],
    "sliding_window": [None, 3, 6], "position_embedding_type": ["absolute"], "clamp_len": [-1, 4],
    "final_logit_softcapping": [None, 5.0, 30.0], "attn_logit_softcapping": [None, 5.0, 50.0], "same_length": [False,
    True],
    "query_pre_attn_scalar": [1, 16, 256], "logit_scale": [0.0625, 1.0, 3.0], "routed_scaling_factor": [1.0, 2.5],
    "embedding_multiplier": [1.0, 3.0], "tokenizer_class": [None], "shared_expert_intermediate_size": [4, 7],
    "relative_attention_num_buckets": [4, 8, 32], "relative_attention_max_distance": [3, 6, 128],
    "max_relative_positions": [-1, 4, 12], "router_aux_loss_coef": [0.0], "talking_head": [False, True],
    "vision_feature_layer": [-1, -2], "vision_feature_select_strategy": ["default", "full"],
    "image_seq_length": [4], "reduction_factor": [1], "mamba": [None],
}  # fmt: skip
SIZES: dict[tuple[str, ...], list[int]] = {
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
    "decoder_layers"):
        [1, 2, 3],
    ("intermediate_size", "n_inner", "hidden_dim", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner",
     "ffn_hidden_size", "moe_intermediate_size"): [1, 5, 8, 10, 16],
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"):
        [1, 2, 3, 4, 6],
    ("num_key_value_heads", "num_kv_heads"): [1, 2, 3, 4],
    ("hidden_size", "n_embd", "dim", "d_model"): [8, 12, 16, 24],
    ("head_dim", "d_kv", "qk_rope_head_dim"): [2, 4, 6, 8],
    ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "embedding_size", "word_embed_proj_dim"): [2, 6,
    8, 12],
    ("num_local_experts", "num_experts", "n_routed_experts"): [1, 2, 4],
    ("num_experts_per_tok",): [1, 2], ("n_group", "topk_group", "n_shared_experts", "num_hidden_groups",
    "inner_group_num"):
        [1, 2],
    ("vocab_size",): [23, 31], ("type_vocab_size",): [1, 2, 3], ("num_labels",): [1, 2, 4],
}  # fmt: skip
NEVER = {"is_encoder_decoder", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
         "use_return_dict", "gradient_checkpointing", "tf_legacy_loss", "apply_spec_augment", "use_bfloat16",
         "is_decoder",
         "add_cross_attention", "untie_r", "model_type", "architectures", "use_mems_eval", "use_mems_train",
         "output_router_logits", "pretraining_tp", "chunk_size_feed_forward", "use_masked_image_modeling"}  # fmt: skip
TRIES = 12


def reads(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what the class reads from its config while it is built and run: name -> the value there."""
    seen: dict[str, Any] = {}
    plain = PreTrainedConfig.__getattribute__

    def watched(self: Any, name: str) -> Any:
        value = plain(self, name)
        if not name.startswith("_") and not callable(value):
            seen.setdefault(name, value)
        return value

    PreTrainedConfig.__getattribute__ = watched  # type: ignore[method-assign,assignment]
    try:
        model = zoo.build(kind, **config)
        zoo.outputs(model, zoo.inputs(model))
        declared = set(model.config.to_dict())
    finally:
        PreTrainedConfig.__getattribute__ = plain  # type: ignore[method-assign]
    return {name: value for name, value in sorted(seen.items()) if name in declared and name not in NEVER}


def drawn(read: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return new values for some of what a class reads."""
    found: dict[str, Any] = {}
    for name, value in read.items():
        sizes = next((values for keys, values in SIZES.items() if name in keys), None)
        chance = rng.random()
        if name in CHOICES:
            if chance < 0.5:
                found[name] = rng.choice(CHOICES[name])
        elif isinstance(value, bool):
            if chance < 0.4:
                found[name] = not value
        elif isinstance(value, str) and ("act" in name or value in ACTIVATIONS):
            if chance < 0.5:
                found[name] = rng.choice(ACTIVATIONS)
        elif sizes is not None:
            if chance < 0.3:
                found[name] = rng.choice(sizes)
        elif isinstance(value, float) and ("eps" in name or "epsilon" in name) and chance < 0.3:
            found[name] = rng.choice([1e-12, 1e-6, 1e-3])
    return found


def valid(kind: str, config: dict[str, Any]) -> PreTrainedModel | None:
    """Return the model where plain transformers builds and runs it."""
    try:
        model = zoo.build(kind, **config)
        found = zoo.outputs(model, zoo.inputs(model))
    except Exception:  # each class refuses a config in its own way
        return None
    return model if found and all(bool(output.isfinite().all()) for output in found) else None


def configuration(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a class, the config it begins with, and what is changed of it so that it is still valid."""
    name = rng.choice(sorted(CASES))
    kind, config = CASES[name].args[0], dict(CASES[name].keywords)
    read = reads(kind, config)
    for _ in range(TRIES):
        changes = drawn(read, rng)
        if any(isinstance(config.get(key), dict) for key in changes) or valid(kind, {**config, **changes}) is None:
            continue
        return kind, config, changes
    return kind, config, {}


def harmed(model: PreTrainedModel, rng: random.Random) -> str:
    """Give some models weights that are special: dead or equal neurons, heads without full rank, other sizes."""
    way = rng.choice(["plain"] * 5 + ["zeros", "equal", "low rank", "scaled", "no biases"])
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            chosen = float(torch.rand((), generator=generator)) < 0.3
            if way == "zeros" and chosen and parameter.dim() == 2:
                parameter[: max(1, len(parameter) // 3)] = 0
            elif way == "equal" and chosen and parameter.dim() == 2 and "embed" not in name:
                parameter[-1] = parameter[0]
            elif way == "low rank" and chosen and parameter.dim() == 2:
                parameter.copy_(parameter[:, :1] @ parameter[:1])
            elif way == "scaled" and chosen and parameter.dim() == 2:
                parameter.mul_(10.0 ** rng.choice([-2, -1, 1]))
            elif way == "no biases" and name.endswith("bias"):
                parameter.zero_()
    return way


def try_family(case: Case, place: Place) -> Outcome:
    """Match (or bring into canonical form) a random model and compare what was written with what it was made of."""
    rng = case.draw()
    with one_by_one():
        kind, config, changes = configuration(rng)
    where = place.room / "in"
    where.mkdir()
    dtype = rng.choice(["float32"] * 3 + ["float16", "bfloat16", "float64"])
    ways = []
    for name in "ab":
        model = seeded(zoo.build(kind, **{**config, **changes}),
                       rng.randrange(2**31))  # fmt: skip
        ways.append(harmed(model, rng))
        zoo.save(model.to(getattr(torch, dtype)), where / name)
    level, job = rng.choice(LEVELS), rng.choice(["match"] * 5 + ["canonical", "same"])
    told: list[object] = [where / "a"] if job == "canonical" else [where / "a", where / ("a" if job == "same" else "b")]
    told = ["canonical" if job == "canonical" else "match", *told, "-o", place.room / "out", "--json"]
    if job != "canonical":
        told += ["--symmetry", level, "--workers", 1]
    if rng.random() < 0.25:
        told += ["--precision", "float64"]
    if rng.random() < 0.2:
        told += ["--verify", "tensors"]
    if rng.random() < 0.2:
        told += ["--dtype", rng.choice(["float32", "float16", "bfloat16", "float64"])]
    tried = f"{kind} {json.dumps(changes)} {dtype} {'+'.join(ways)}: {shown(told, place.room)}"
    before = listing(place.room)
    try:
        said = run(told)
        outcome = judge(said, before, place.room, new=["out", "out-anchor"])
        if outcome.word != OK:
            if not rounding_alone(outcome.said, told, place):
                wrong_refusal(outcome.said)
            return Outcome(outcome.word, outcome.said, tried)
        pairs = [("a", "out"), ("b", "out-anchor")][: 2 if (place.room / "out-anchor").is_dir() else 1]
        worst = 0.0
        for source, copy in pairs:
            source = "a" if job == "same" else source
            worst = max(worst, refuse_difference(where / source, place.room / copy, told))
        if worst > ROUNDINGS:  # conditions may explain it: then nothing is left of it in float64
            worst = in_float64(told, place)
        near(json.loads(said.stdout))
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise Finding(f"the output cannot be compared: {type(error).__name__} {text}\n{tried}") from None
    return Outcome(OK, f"{worst:.3g} roundings", tried)


def rounding_alone(said: str, told: list[object], place: Place) -> bool:
    """Return whether a refusal is of a model of which one rounding changes as much, and its remedy helps."""
    apart = re.search(r"'[^']*/in/(\w+)' differs from the original by .*relative ([\d.e+-]+),", said)
    if not apart or "--precision float64 helps" not in said:
        return False
    return (
        float(apart[2]) < ROUNDINGS * one_rounding(place.room / "in" / apart[1]) and in_float64(told, place) < ROUNDINGS
    )


def in_float64(told: list[object], place: Place) -> float:
    """Run a command once more in float64, and return by how many roundings of float32 the copy differs."""
    said = run([*told, "--overwrite", "--precision", "float64", "--dtype", "float64"])
    if said.code:
        raise Finding(f"not in float64: {said.stderr.strip()[-300:]}")
    return refuse_difference(place.room / "in" / "a", place.room / "out", [])


def near(said: dict[str, Any]) -> None:
    """Raise Finding where a match went away from its anchor."""
    if "distance_after" in said and said["distance_after"] > said["distance_before"] * (1 + 1e-4) + 1e-6:
        raise Finding(f"farther than before: {said['distance_before']:.6g} -> {said['distance_after']:.6g}")


def classes() -> None:
    """Import every class, so that no case has to."""
    for builder in CASES.values():
        getattr(transformers, builder.args[0])
