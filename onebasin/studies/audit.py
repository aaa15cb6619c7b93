# SPDX-License-Identifier: Apache-2.0
"""The audit of a family or of one small model: are its table's continuous symmetries all there are?

Completeness is a matter of the architecture, so the numbers are drawn anew: every parameter random, norms without
epsilon, everything in float64.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from onebasin.checkpoint import Checkpoint
from onebasin.checkpoint.stock import Stock, stock_model
from onebasin.families import table_for, tables
from onebasin.symmetry.audit import Audit
from onebasin.symmetry.audit import audit as audit_signature

LARGEST = 3000  # parameters; the Jacobian has a column for each of them
LENGTH = 8  # tokens of a text, or the most that the model takes
LEAST = 96  # inputs, for every token to meet every other
SPREAD = 0.3  # of the random parameters

# Names that configurations share, through their `attribute_map` where they call things by other names.
SIZES: dict[str, Any] = dict(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=5, vocab_size=24,
    max_position_embeddings=4, type_vocab_size=2, image_size=4, patch_size=2, num_channels=1, num_labels=12,
    n_inner=5, hidden_dim=5, ffn_dim=5, ffn_hidden_size=5, word_embed_proj_dim=8, rotary_dim=2, head_dim=4, embedding_size=6, pad_token_id=None,
)  # fmt: skip

# The head that shows most of a model: every position's output, where it has such a head.
HEADS = ("MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


def audit(target: str | Path, *, family: str | None = None, seed: int = 0, **config: Any) -> Audit:
    """The audit of a family, of a model type, or of a model folder, whose weights are replaced by random ones.

    config: sizes of the tiny model that stands for a family, as its configuration names them.
    Raises ValueError for an unknown family, or a model of more than `LARGEST` parameters.
    """
    if Path(target).is_dir():
        return audit_checkpoint(Checkpoint(target, family), seed)
    known = tables()
    kind = known[str(target)].types[0] if str(target) in known else str(target)
    table_for(kind)  # refuses what no table describes
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(kind, **config).save_pretrained(folder)
        return audit_checkpoint(Checkpoint(folder, family), seed)


def tiny_model(kind: str, **config: Any) -> PreTrainedModel:
    """A stock model of a type, at sizes whose Jacobian is a matter of seconds."""
    cls = CONFIG_MAPPING[kind]
    known = {name: value for name, value in SIZES.items() if _takes(cls, name)}
    rope = getattr(cls(), "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) < 1:  # of a head of four
        known["rope_parameters"] = {**rope, "partial_rotary_factor": 0.5}
    found = cls(**{**known, **config})
    heads = (getattr(transformers, f"MODEL_FOR_{head}_MAPPING") for head in HEADS)
    cls = next((head[type(found)] for head in heads if type(found) in head), None)
    model: PreTrainedModel = (cls or transformers.MODEL_MAPPING[type(found)])(found)
    return model


def _takes(cls: type[PretrainedConfig], name: str) -> bool:
    """Whether a configuration has this setting, by its own name or a common one."""
    return name == "num_labels" or name in inspect.signature(cls).parameters or name in cls.attribute_map


def audit_checkpoint(checkpoint: Checkpoint, seed: int = 0) -> Audit:
    signature = checkpoint.signature
    entries = {role: entry for role, entry in signature.tensors.items() if entry.alias is None}
    count = sum(torch.Size(entry.shape).numel() for entry in entries.values())
    if count > LARGEST:
        raise ValueError(f"'{checkpoint.given}' has {count:,} parameters; an audit takes the Jacobian of all outputs by "
                         f"each of them, so give a model of at most {LARGEST:,}, or name its family")  # fmt: skip
    stock = stock_model(checkpoint, dtype=torch.float64, attention="eager")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        role: SPREAD * torch.randn(entry.shape, generator=generator, dtype=torch.float64)
        + (entry.norm.unit if entry.norm else 0.0)
        for role, entry in entries.items()
    }
    tensors |= {role: tensors[entry.alias] for role, entry in signature.tensors.items() if entry.alias is not None}
    return audit_signature(signature, tensors, as_function(stock, count, generator))


def as_function(stock: Stock, enough: int, generator: torch.Generator) -> Callable[[dict[str, Tensor]], Tensor]:
    """All outputs on random inputs, many more than `enough`, as a function of the tensors by role."""
    model = stock.model
    for module in model.modules():
        for name in ("eps", "variance_epsilon", "layer_norm_eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # which would hide a row's gradient
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    places = {role: names[id(tensor)] for role, tensor in stock.parameter.items()}

    def run(values: dict[str, Tensor], given: dict[str, Tensor]) -> Tensor:
        with Float64():
            found = torch.func.functional_call(model, values, (), given, tie_weights=True)
        kept = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
        return torch.cat([value.reshape(-1) for value in kept])

    with torch.no_grad():
        each = len(run({}, random_inputs(stock, 1, generator)))
    given = random_inputs(stock, max(LEAST, 4 * enough // each), generator)
    return lambda tensors: run({places[role]: t for role, t in tensors.items() if role in places}, given)


def random_inputs(stock: Stock, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Every token in every place: nothing is padded or masked, and positions are given where a table holds them."""
    model, config = stock.model, stock.model.config
    text = config.get_text_config()
    accepted = inspect.signature(model.forward).parameters

    length = min(LENGTH, getattr(text, "max_position_embeddings", LENGTH))

    def integers(high: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (rows, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    given: dict[str, Tensor] = {}
    if "pixel_values" in accepted:
        given["pixel_values"] = normal(config.num_channels, config.image_size, config.image_size)
        patches = (config.image_size // config.patch_size) ** 2
        given["bool_masked_pos"] = torch.rand(rows, patches, generator=generator) < 0.5
        if "MaskedImage" not in type(model).__name__:
            del given["bool_masked_pos"]
    if "input_ids" in accepted:
        given["input_ids"] = integers(text.vocab_size)
        given["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        counted = [space.size for space in stock.signature.spaces.values() if space.kind == "rows"]
        if counted:  # OPT's table begins two rows before position 0
            given["position_ids"] = integers(text.max_position_embeddings, text.max_position_embeddings - counted[0])
        if getattr(text, "type_vocab_size", 0):
            given["token_type_ids"] = integers(text.type_vocab_size)
    if getattr(config, "add_cross_attention", False):
        given["encoder_hidden_states"] = normal(5, text.hidden_size)
    return {name: value for name, value in given.items() if name in accepted}


class Float64(TorchFunctionMode):
    """Float64 throughout: where a model turns float64 into float32 (RMSNorm, softmax of attention), it stays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            if func in (Tensor.to, Tensor.type):
                args = (args[0], *(torch.float64 if arg is torch.float32 else arg for arg in args[1:]))
        return func(*args, **kwargs)
