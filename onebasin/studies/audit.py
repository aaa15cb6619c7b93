# SPDX-License-Identifier: Apache-2.0
"""The audit of a family or a small model: does its table have all continuous symmetries?

Completeness depends only on the architecture, so all parameters are drawn at random, norms have no epsilon, and
everything is in float64.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from onebasin.families import UnknownFamily, named_table, table_for, tables
from onebasin.models import Folder, ModelError
from onebasin.models.errors import one_line
from onebasin.running.classes import quietly
from onebasin.running.configuration import configs, default_config, kind_of_number, numbers, settings
from onebasin.running.expert_layout import one_by_one
from onebasin.running.float64 import OnlyFloat64
from onebasin.running.inference import of_config
from onebasin.running.loaded import _load
from onebasin.running.made_inputs import BATCH
from onebasin.running.shrinking import Scale
from onebasin.running.twins import build, floats_of
from onebasin.running.verification import outward
from onebasin.settings import Seed, checked
from onebasin.symmetry import Entry, Signature
from onebasin.symmetry.audit.null_space import WRONG, Audit
from onebasin.symmetry.audit.null_space import audit as audit_signature
from onebasin.symmetry.tables.table import Table

LARGEST = 7000  # parameters; the Jacobian has a column for each of them
POINTS = 3  # most random points to try until nothing is missing at one
LENGTH = 8  # tokens of a text, if the model accepts that many
ROWS = 384  # least number of inputs: every token should occur with every other, and images tell a tower's parameters
FEW = 12  # inputs at a time
SPREAD = 0.3  # of the random parameters
LARGE = 1.0  # of convolutions of sound: the GELUs after the seven of them would otherwise be nearly linear
LIMIT = 0.5  # of clipped gates and projections: what no input takes there could be scaled, or turned, unlike others
SMALL = 0.1  # of biases, so that no ReLU neuron is dead or always on

# Of the tiny model of a family. A table of tokens or positions has more rows than the width of the stream, an embedding
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

# Of the twin of a type whose table is inferred. There are more tokens than a stream of eight dimensions has squares and
# products, and as many neurons as needed: otherwise some matrix could change the lengths that norms use without an
# effect on any token.
SMALLEST = Scale(
    head=4, heads=1,
    most=dict(width=6, neurons=7, vocabulary=40, positions=6, experts=2, labels=12, grid=2, patches=4, bins=10,
              ratio=1),
)  # fmt: skip
LARGER = {**(SMALLEST.most or {}), "grid": 3}  # at the last point: in a row of two patches, turns may be half ones
Function = Callable[[dict[str, Tensor]], Tensor]
TEXTS = {"input_ids", "attention_mask", "decoder_input_ids", "token_type_ids"}

# The heads that reveal most of a model, with one output per token or class.
HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "CTC", "IMAGE_CLASSIFICATION")


def audit(target: str | Path, *, family: str | None = None, seed: int = 0, **settings: Any) -> Audit:
    """Audit a family, a model type, or a model folder, whose weights are replaced by random ones.

    Args:
        target: The family, the model type or the folder.
        family: The name or file of a table to use instead of the model type's own.
        seed: Of all random numbers.
        settings: Values in the configuration of a family's tiny model.

    Raises:
        ValueError: The family is unknown, its configuration refuses the settings, there are settings for a folder, or
            the model has more than `LARGEST` parameters.
    """
    seed = checked(Seed, "seed", seed)
    if Path(target).is_dir():
        if settings:
            raise ValueError(f"'{target}' is a model folder; set '{next(iter(settings))}' in its config.json")
        return audit_checkpoint(Folder(target, family), seed)
    name = str(target)
    kind = tables()[name].types[0] if name in tables() else name
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"'{name}' is not a model folder, a family or a model type; families: {', '.join(tables())}")
    try:
        table_for(kind) if family is None else named_table(family)
    except UnknownFamily:
        if settings:
            raise ValueError(f"the table of '{kind}' is inferred, so its tiny model takes no settings") from None
        return audit_inferred(kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        with quietly():
            tiny_model(kind, **settings).save_pretrained(folder)
        checkpoint = Folder(folder, family)
        checkpoint.name = f"tiny {kind}"  # for errors
        return audit_checkpoint(checkpoint, seed)


def audit_inferred(kind: str, seed: int = 0) -> Audit:
    """Audit the table that is inferred for a model type, on the smallest twin, at up to `POINTS` random points.

    One point at which nothing is missing is enough: a generic point has the least number of flat directions, and the
    table generates the largest number there. More directions are flat if a neuron happens to be dead, or is clipped for
    most inputs, and nearly flat ones leave no gap. Images are larger at the last point.

    Raises:
        ValueError: No exact table is inferred for it, or its smallest twin is too large.
    """
    table = of_config(default_config(kind).to_dict()).table
    cls = type(build(kind)[0])  # also caches how it runs, for the next call
    for point in range(seed, seed + POINTS):
        last = point == seed + POINTS - 1
        try:
            found = _at(kind, cls, table, seed, point, replace(SMALLEST, most=LARGER) if last else SMALLEST)
        except ValueError:
            if not last:
                raise
        if found.complete:
            break
    return found


def _at(kind: str, cls: type[PreTrainedModel], table: Table, seed: int, point: int, scale: Scale) -> Audit:
    """Audit a table at a random point of the smallest twin that runs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, given = build(kind, cls, seed, scale)
        except ModelError:
            wider = {name: n for name, n in (scale.most or {}).items() if name != "width"}
            model, given = build(kind, cls, seed, replace(scale, most=wider))
        with quietly():
            model.save_pretrained(folder)
        checkpoint = Folder(folder)
        checkpoint.name = f"tiny {kind}"
        try:
            checkpoint.read_by(table)
            assert checkpoint.signature
        except ModelError:  # it names layers that the twin does not have
            checkpoint.read_by(of_config(checkpoint.raw_config).table)
        found = audit_checkpoint(checkpoint, point, given)
        if found.largest_change >= WRONG:  # a size that this configuration tells otherwise
            checkpoint.read_by(of_config(checkpoint.raw_config).table)
            found = audit_checkpoint(checkpoint, point, given)
        return found


def verdict(kind: str, seed: int = 0) -> dict[str, Any]:
    """Audit a model type; return plain numbers: `parameters`, `flat` (directions that leave all outputs unchanged),
    `generated` (those that the table explains), `gap`, `largest_change`, `complete`. Raises ValueError as `audit`."""
    found = audit(kind, seed=seed)
    return {
        "parameters": found.parameters, "flat": found.nullity, "generated": found.dimension, "gap": found.gap,
        "largest_change": found.largest_change, "complete": found.complete,
    }  # fmt: skip


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


def audit_checkpoint(checkpoint: Folder, seed: int = 0, given: Mapping[str, Tensor] | None = None) -> Audit:
    """Audit a model folder's architecture, at a random point. Integers (counters) are not parameters.

    given: inputs on which the model runs, as a pattern for many random ones (default: made for its `forward`).
    """
    generator = torch.Generator().manual_seed(seed)
    signature, tensors = random_point(checkpoint, generator)
    count = sum(tensors[role].numel() for role, entry in signature.tensors.items() if entry.alias is None)
    how = (partial(inputs_like, given), floats_of) if given else ()  # as in the proof of the table
    functions = as_functions(checkpoint, 4 * count, generator, *how)
    counters = {role: torch.zeros(()) for role in checkpoint.signature.tensors.keys() - signature.tensors.keys()}
    return audit_signature(signature, tensors, [partial(_given, one, counters) for one in functions])


def _given(function: Function, counters: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    return function(counters | tensors)


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


Draw = Callable[[Folder, PreTrainedModel, int, torch.Generator], dict[str, Tensor]]


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
