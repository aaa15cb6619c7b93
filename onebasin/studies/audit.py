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
from onebasin.checkpoint.reader import one_line
from onebasin.checkpoint.stock import Stock, stock_model
from onebasin.checkpoint.verification import _quietly
from onebasin.families import named_table, table_for, tables
from onebasin.symmetry.audit import Audit
from onebasin.symmetry.audit import audit as audit_signature

LARGEST = 3000  # parameters; the Jacobian has a column for each of them
LENGTH = 8  # tokens of a text, or the most that the model takes
ROWS = 96  # inputs, at least: every token should meet every other
SPREAD = 0.3  # of the random parameters
SMALL = 0.1  # of biases, which then leave no ReLU neuron dead or always on

# Of the tiny model that stands for a family. A table of tokens or positions has more rows than the stream is wide, and
# an embedding is wider than a head: else the vectors that a layer meets leave some of its weights unused.
SIZES: dict[str, Any] = dict(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, rotary_dim=2,
    intermediate_size=5, n_inner=5, hidden_dim=5, ffn_dim=5, ffn_hidden_size=5, embedding_size=6, word_embed_proj_dim=8,
    vocab_size=24, max_position_embeddings=4, type_vocab_size=2, pad_token_id=None,
    image_size=4, patch_size=2, num_channels=1, num_labels=12,
)  # fmt: skip

# The heads that show most of a model, one output per token or class.
HEADS = ("MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


def audit(target: str | Path, *, family: str | None = None, seed: int = 0, **settings: Any) -> Audit:
    """The audit of a family, of a model type, or of a model folder, whose weights are replaced by random ones.

    family: name or file of a table, in place of the model type's own. settings: of the tiny model that stands for a
    family, as its configuration names them. Raises ValueError for an unknown family, settings that its configuration
    refuses, settings for a folder, and a model of more than `LARGEST` parameters.
    """
    if Path(target).is_dir():
        if settings:
            raise ValueError(f"'{target}' is a model folder; its config.json says what '{next(iter(settings))}' is")
        return audit_checkpoint(Checkpoint(target, family), seed)
    name = str(target)
    kind = tables()[name].types[0] if name in tables() else name
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"'{name}' is no model folder, and no family or model type; families: {', '.join(tables())}")
    if family is None:
        table_for(kind)
    else:
        named_table(family)
    with tempfile.TemporaryDirectory() as folder:
        with _quietly():
            tiny_model(kind, **settings).save_pretrained(folder)
        checkpoint = Checkpoint(folder, family)
        checkpoint.given = f"tiny {kind}"  # what errors call it
        return audit_checkpoint(checkpoint, seed)


def tiny_model(kind: str, **settings: Any) -> PreTrainedModel:
    """A stock model of a type, at sizes whose Jacobian is a matter of seconds."""
    cls = CONFIG_MAPPING[kind]
    own = cls.attribute_map  # common name -> the configuration's
    known = {own.get(name, name): value for name, value in SIZES.items() if _takes(cls, name)}
    settings = {own.get(name, name): value for name, value in settings.items()}
    rope = getattr(cls(), "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1) < 1:
        known["rope_parameters"] = {**rope, "partial_rotary_factor": 0.5}  # of a head of four
    try:
        config = cls(**{**known, **settings})
        heads = (getattr(transformers, f"MODEL_FOR_{head}_MAPPING") for head in HEADS)
        headed = next((head[cls] for head in heads if cls in head), None)
        build: Any = headed or transformers.MODEL_MAPPING[cls]
        model: PreTrainedModel = build(config)
    except Exception as error:  # each configuration refuses bad values in its own way
        raise ValueError(f"a tiny '{kind}' cannot be built: {one_line(error)}") from None
    return model


def _takes(cls: type[PretrainedConfig], name: str) -> bool:
    """Whether a configuration has this setting, by its own name or a common one."""
    return name == "num_labels" or name in inspect.signature(cls).parameters or name in cls.attribute_map


def audit_checkpoint(checkpoint: Checkpoint, seed: int = 0) -> Audit:
    """The audit of a model folder's architecture, at a random point."""
    signature = checkpoint.signature
    own = {role: entry for role, entry in signature.tensors.items() if entry.alias is None}
    count = sum(torch.Size(entry.shape).numel() for entry in own.values())
    if count > LARGEST:
        raise ValueError(f"'{checkpoint.given}' has {count:,} parameters; an audit takes the Jacobian of all outputs "
                         f"by each of them, so give a model of at most {LARGEST:,}, or name its family")  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for role, entry in own.items():
        centre = entry.norm.unit if entry.norm else 0.0
        spread = SMALL if len(entry.shape) == 1 and not entry.norm else SPREAD
        tensors[role] = centre + spread * torch.randn(entry.shape, generator=generator, dtype=torch.float64)
    tensors |= {role: tensors[entry.alias] for role, entry in signature.tensors.items() if entry.alias is not None}
    stock = stock_model(checkpoint, dtype=torch.float64, attention="eager")
    return audit_signature(signature, tensors, as_function(stock, 4 * count, generator))


def as_function(stock: Stock, least: int, generator: torch.Generator) -> Callable[[dict[str, Tensor]], Tensor]:
    """All outputs, at `least` so many, on random inputs, as a function of the tensors by role. Changes the model: its
    norms lose their epsilon."""
    model = stock.model
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it would hide a row's gradient
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    places = {role: names[id(tensor)] for role, tensor in stock.parameter.items()}

    def run(values: dict[str, Tensor], given: dict[str, Tensor]) -> Tensor:
        with Float64():
            found = torch.func.functional_call(model, values, (), given, tie_weights=True)
        kept = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
        return torch.cat([value.reshape(-1) for value in kept])

    with torch.no_grad():
        each = len(run({}, random_inputs(stock, 1, generator)))
    given = random_inputs(stock, max(ROWS, -(-least // each)), generator)
    return lambda tensors: run({places[role]: x for role, x in tensors.items() if role in places}, given)


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
        if "MaskedImage" in type(model).__name__:
            patches = (config.image_size // config.patch_size) ** 2
            given["bool_masked_pos"] = torch.rand(rows, patches, generator=generator) < 0.5
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
    """Float64 throughout: what a model would turn into float32 (in RMSNorm, in attention's softmax) stays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func in (Tensor.to, Tensor.type):
                args = (args[0], *(torch.float64 if arg is torch.float32 else arg for arg in args[1:]))
        return func(*args, **kwargs)
