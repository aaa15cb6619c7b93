# SPDX-License-Identifier: Apache-2.0
"""A model as functions of its tensors, for the audit to differentiate: random tensors, and outputs on random inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onebasin.models import Folder
from onebasin.running.configuration import configs, kind_of_number, numbers, settings
from onebasin.running.expert_layout import one_by_one
from onebasin.running.float64 import OnlyFloat64
from onebasin.running.input_shapes import BATCH
from onebasin.running.loaded import _load
from onebasin.running.verification import outward
from onebasin.symmetry import Entry, Signature

LARGEST = 7000  # parameters; the Jacobian has a column for each of them
LENGTH = 8  # tokens of a text, if the model accepts that many
ROWS = 384  # least number of inputs: every token should occur with every other, and images tell a tower's parameters
FEW = 12  # inputs at a time
SPREAD = 0.3  # of the random parameters
LARGE = 1.0  # of convolutions of sound: the GELUs after the seven of them would otherwise be nearly linear
LIMIT = 0.5  # of clipped gates and projections: what no input takes there could be scaled, or turned, unlike others
SMALL = 0.1  # of biases, so that no ReLU neuron is dead or always on
TEXTS = {"input_ids", "attention_mask", "decoder_input_ids", "token_type_ids"}

Function = Callable[[dict[str, Tensor]], Tensor]
Draw = Callable[[Folder, PreTrainedModel, int, torch.Generator], dict[str, Tensor]]


def random_point(checkpoint: Folder, generator: torch.Generator) -> tuple[Signature, dict[str, Tensor]]:
    """Return a model folder's signature without counters, and random tensors. Raises ValueError for a large model."""
    kept = {role: entry for role, entry in checkpoint.signature.tensors.items()
            if checkpoint.dtypes.keys() >= set(entry.names)}  # fmt: skip
    signature = replace(checkpoint.signature, tensors=kept)
    own = {role: entry for role, entry in signature.tensors.items() if entry.alias is None}
    count = sum(torch.Size(entry.shape).numel() for entry in own.values())
    if count > LARGEST:
        raise ValueError(f"'{checkpoint.name}' has {count:,} parameters; an audit takes the Jacobian of all outputs "
                         f"by each of them, so give a model of at most {LARGEST:,}, or name its family")  # fmt: skip
    tensors = {}
    for role, entry in own.items():
        centre = entry.norm.unit if entry.norm else float(role.endswith("running_var"))  # a variance is positive
        spread = SMALL if len(entry.shape) == 1 and not entry.norm else LARGE if len(entry.shape) == 3 else SPREAD
        if entry.scaled or (entry.norm and entry.norm.copies > 1):
            spread, centre = 0.0, 1.0  # as if it were folded, which does not change the number of directions
        tensors[role] = centre + spread * torch.randn(entry.shape, generator=generator, dtype=torch.float64)
    tensors |= {role: tensors[entry.alias] for role, entry in signature.tensors.items() if entry.alias is not None}
    return signature, tensors


def as_functions(
    checkpoint: Folder,
    least: int,
    generator: torch.Generator,
    draw: Draw | None = None,
    says: Callable[[Any], Iterable[Tensor]] = lambda found: outward(found).values(),
) -> list[Function]:
    """Return functions of the tensors by role, each with the outputs on a few random inputs, and at least `least`
    outputs in total. The eps of norms is set to zero."""
    model, places = _numbered(checkpoint)
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        for name, value in list(vars(module).items()):
            if name.endswith(("limit", "clip_qkv")) and isinstance(value, float) and isfinite(value):
                setattr(module, name, min(value, LIMIT))
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # this row would get no gradient

    def run(tensors: dict[str, Tensor], given: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([tensors[role].reshape(-1) for role in stored(checkpoint.signature)])
        values = {name: flat[place] for name, place in places.items()}
        with OnlyFloat64():
            found = [torch.func.functional_call(model, values, (), each, tie_weights=True) for each in ways(given)]
        return torch.cat([value.reshape(-1) for each in found for value in says(each)])

    with torch.no_grad():
        entries = stored(checkpoint.signature).values()
        some = {entry.role: torch.randn(entry.shape, generator=generator, dtype=torch.float64) for entry in entries}
        draw = draw or random_inputs
        count = len(run(some, draw(checkpoint, model, FEW, generator)))
    times = max(ROWS // FEW, -(-least // count))
    return [partial(run, given=draw(checkpoint, model, FEW, generator)) for _ in range(times)]


def ways(given: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the inputs, and also those without the inputs of XLNet's second stream, which is returned instead of the
    first."""
    first = {name: value for name, value in given.items() if name not in ("perm_mask", "target_mapping")}
    return [given, first] if len(first) < len(given) else [given]


def stored(signature: Signature) -> dict[str, Entry]:
    return {role: entry for role, entry in signature.tensors.items() if entry.stored}


def _numbered(checkpoint: Folder) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return the stock model in float64, and for each parameter the places of its entries in the concatenation of all
    tensors, observed by loading tensors with these places as entries. Experts that are separate in the folder may be
    one parameter in memory."""
    state: dict[str, Tensor] = {}
    start = 0
    for entry in stored(checkpoint.signature).values():
        count = torch.Size(entry.shape).numel()
        whole = torch.arange(start, start + count, dtype=torch.float32).reshape(entry.shape)
        state |= {name: part.contiguous() for name, part in entry.split(whole)}
        start += count
    model = _load(checkpoint, state, "eager")
    one_by_one(model)  # torch's grouped products do not support float64
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in state}
    places = {name: tensor.detach().round().long() for name, tensor in (*model.named_parameters(), *buffers.items())}
    module: nn.Module = model
    module.to(torch.float64).train(False)
    return model, places


def inputs_like(
    given: Mapping[str, Tensor], checkpoint: Folder, model: PreTrainedModel, rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return inputs of the same kinds and shapes with at least `rows` rows. Every token may be in every place, except
    placeholders of images, and padding, which has the same position everywhere in some models."""
    times = -(-rows // BATCH)
    special = {n for each in configs(model.config) for key, value in settings(each) if kind_of_number(key) == "token"
               for n in numbers(value)}  # fmt: skip

    pads = {n for each in configs(model.config) for n in numbers(getattr(each, "pad_token_id", None))}

    def drawn(name: str, value: Tensor) -> Tensor:
        if not value.dim() or len(value) % BATCH:
            return value
        many = value.repeat(times, *[1] * (value.dim() - 1))
        if value.is_floating_point():
            return torch.randn(many.shape, generator=generator, dtype=value.dtype)
        if not name.endswith("input_ids"):
            return many
        mixed = given.keys() - TEXTS
        vocabulary = getattr(model.config.get_text_config(), "vocab_size", int(value.max()) + 1)  # CANINE hashes any
        left_out = special if mixed else pads
        plain = torch.tensor([n for n in range(vocabulary) if n not in left_out])
        tokens = plain[torch.randint(len(plain), many.shape, generator=generator)]
        return torch.where(many == many[:, :1], many, tokens) if mixed else tokens

    return {name: drawn(name, value) for name, value in given.items()}


def random_inputs(
    checkpoint: Folder, model: PreTrainedModel, rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return inputs with every token in every place, without padding or masks, and with positions if there is a table
    of them."""
    config: Any = model.config
    text, image = config.get_text_config(), getattr(config, "vision_config", config)
    accepted = inspect.signature(model.forward).parameters
    most = (getattr(text, name, LENGTH) for name in ("max_position_embeddings", "max_target_positions"))
    length = min(number if number > 0 else LENGTH for number in most)  # -1 in XLNet: no limit

    def integers(high: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (rows, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    given: dict[str, Tensor] = {}
    if "pixel_values" in accepted:
        given["pixel_values"] = normal(image.num_channels, image.image_size, image.image_size)
        if any("mask_token" in role for role in checkpoint.signature.tensors):
            patches = (image.image_size // image.patch_size) ** 2
            given["bool_masked_pos"] = torch.rand(rows, patches, generator=generator) < 0.5
    if "input_features" in accepted:
        given["input_features"] = normal(config.num_mel_bins, 2 * config.max_source_positions)
    if "input_values" in accepted:
        given["input_values"] = normal(60)
    if "input_ids" in accepted:
        given["input_ids"] = integers(text.vocab_size)
        given["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        counted = [space.size for space in checkpoint.signature.spaces.values() if space.kind == "rows"]
        if counted:  # OPT's table begins two rows before position 0
            given["position_ids"] = integers(text.max_position_embeddings, text.max_position_embeddings - counted[0])
        if getattr(text, "type_vocab_size", 0):
            given["token_type_ids"] = integers(text.type_vocab_size)
    if "target_mapping" in accepted:
        given["token_type_ids"] = integers(2)
        given["target_mapping"] = torch.eye(length, dtype=torch.float64).expand(rows, length, length)
        given["perm_mask"] = torch.eye(length, dtype=torch.float64).expand(rows, length, length)  # all but itself
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = integers(text.vocab_size)
    if getattr(config, "add_cross_attention", False):
        given["encoder_hidden_states"] = normal(5, text.hidden_size)
    return {name: value for name, value in given.items() if name in accepted}
