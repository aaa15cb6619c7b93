# SPDX-License-Identifier: Apache-2.0
"""Random valid inputs for two `transformers` models, from their configs and what `forward` accepts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Names of the number of positions in configs.
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx")
_SPECIAL = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start", "image", "audio", "video")


def probe(a: PreTrainedModel, b: PreTrainedModel, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return random inputs that both models accept, on a's device and in its dtype.

    Token ids are in the smaller vocabulary and not special. Rows have different lengths, end in the end token if there
    is one, and are padded and masked. Images and audio are standard normal.

    batch: the number of rows. length: of the longest text, in tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    text = [model.config.get_text_config() for model in (a, b)]
    image = [getattr(model.config, "vision_config", None) or model.config for model in (a, b)]
    whole = [model.config for model in (a, b)]
    accepted = _accepted(a) & _accepted(b)
    if type(a).__name__.endswith("ForSequenceClassification") and not _ids(text[0], "pad_token_id"):
        batch = 1  # decoders find the last token of a row by the padding after it
    choices = 2 if type(a).__name__.endswith(("MultipleChoice", "DoubleHeadsModel")) else 1
    given: dict[str, Tensor] = {}
    if "input_ids" in accepted and "input_ids" in _needed(a):
        given |= _text(text, batch * choices, length, generator)
        if choices > 1:
            given = {name: value.unflatten(0, (batch, choices)) for name, value in given.items()}  # type: ignore[no-untyped-call]
        if "decoder_input_ids" in accepted:
            given["decoder_input_ids"] = _text(text, batch, length, generator)["input_ids"]
    if "pixel_values" in accepted:
        given["pixel_values"] = _pixels(image, batch, generator)
        if "bool_masked_pos" in accepted and "MaskedImage" in type(a).__name__:
            side = _least(image, "image_size", default=1) // _least(image, "patch_size", default=1)
            given["bool_masked_pos"] = torch.rand(batch, side * side, generator=generator) < 0.4
        token = next(iter(_ids(a.config, "image_token_id")), None)
        if token is not None and "input_ids" in given:
            _place_images(a, given, token)
    if "input_features" in accepted:  # a log-mel spectrogram: twice the encoder's positions
        frames = 2 * _least(whole, "max_source_positions", default=1500)
        bins = _least(whole, "num_mel_bins", default=80)
        given["input_features"] = torch.randn(batch, bins, frames, generator=generator)
        given["decoder_input_ids"] = _text(text, batch, length, generator)["input_ids"]
    if "input_values" in accepted:
        bins = _least(whole, "num_mel_bins", default=0)
        shape = (batch, _least(whole, "max_length", default=1024), bins) if bins else (batch, 4000)
        given["input_values"] = torch.randn(shape, generator=generator)
    if getattr(a.config, "add_cross_attention", False):
        width = _least(text, "hidden_size", default=1)
        given["encoder_hidden_states"] = torch.randn(batch, 5, width, generator=generator)
    return {
        name: value.to(a.device, a.dtype if value.is_floating_point() else None)
        for name, value in given.items()
        if name in accepted
    }


def unpadded(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the entries of a tensor that are not padding, (samples, ...): what is computed at padding has no meaning.

    value: (batch, tokens, ...); tensors of other shapes are returned as they are. mask: (batch, tokens), 0 at padding,
    or None.
    """
    if mask is not None and value.shape[: mask.dim()] == mask.shape:
        return value[mask.to(value.device).bool()]
    return value


def _place_images(model: Any, given: dict[str, Tensor], token: int) -> None:
    """Put the placeholder tokens of images before the texts of a model that reads both. Leave the images out if the
    model does not reveal how many tokens it needs."""
    pixels = given["pixel_values"].to(model.device, model.dtype)
    for images in (pixels, pixels.unsqueeze(1)):  # one image for every text, or a list of one
        try:
            with torch.no_grad():
                found = model.get_image_features(pixel_values=images)
            found = getattr(found, "pooler_output", found)
            count = sum(features.flatten(0, -2).shape[0] for features in found) // len(pixels)
        except Exception:  # each model class expects images in its own form
            continue
        ids = given["input_ids"]
        ids = torch.where(ids == token, ids[ids != token][0], ids)
        given["input_ids"] = torch.cat([torch.full((len(ids), count), token), ids], 1)
        given["attention_mask"] = torch.cat([torch.ones(len(ids), count, dtype=torch.long), given["attention_mask"]], 1)
        given["pixel_values"] = images
        return
    del given["pixel_values"]


def _accepted(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _needed(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the main input; both for models with two (CLIP)."""
    both = "pixel_values" in _accepted(model) and model.config.get_text_config() is not model.config
    return ("input_ids", "pixel_values") if both else (model.main_input_name,)


def _text(configs: list[PretrainedConfig], rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return input_ids, masks and token_type_ids, each (rows, length), mc_token_ids (rows,), and for models that read
    these, entity_ids (rows, mentions) and entity_position_ids (rows, mentions, 2)."""
    vocabulary = _least(configs, "vocab_size", default=1)
    special = {value for config in configs for word in _SPECIAL for value in _ids(config, f"{word}_token_id")}
    plain = torch.tensor([token for token in range(vocabulary) if token not in special] or [0])
    pad, end = (
        [token for token in _ids(configs[0], f"{word}_token_id") if 0 <= token < vocabulary] for word in ("pad", "eos")
    )
    # RoBERTa's positions start after the id of the padding token.
    offset = pad[0] + 1 if pad and pad[0] < 8 else 0
    positions = (_least(configs, name, default=length + offset) for name in POSITIONS)
    length = max(2, min(length, *(number - offset for number in positions)))
    ids = plain[torch.randint(len(plain), (rows, length), generator=generator)]
    lengths = length - torch.arange(rows) % max(1, length // 2)
    mask = (torch.arange(length) < lengths[:, None]).long()
    if end:
        ids[torch.arange(rows), lengths - 1] = end[0]
    ids = torch.where(mask == 1, ids, pad[0] if pad else 0)
    kinds = _least(configs, "type_vocab_size", default=0)  # GPT-2 has none: it would embed them as tokens
    first = (torch.arange(length) == 0).long().expand(rows, -1)
    found = {"input_ids": ids, "attention_mask": mask, "global_attention_mask": first, "mc_token_ids": lengths - 1}
    if entities := _least(configs, "entity_vocab_size", default=0):  # two mentions, of two tokens each
        found["entity_ids"] = torch.randint(entities, (rows, 2), generator=generator)
        found["entity_position_ids"] = torch.randint(length - length // 2, (rows, 2, 2), generator=generator)
    if kinds:
        found["token_type_ids"] = torch.randint(kinds, ids.shape, generator=generator)
    return found


def _pixels(configs: list[PretrainedConfig], batch: int, generator: torch.Generator) -> Tensor:
    """(batch, channels, height, width)"""
    size: Any = getattr(configs[0], "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = _least(configs, "num_channels", default=3)
    return torch.randn(batch, channels, height, width, generator=generator)


def _least(configs: list[PretrainedConfig], name: str, default: int) -> int:
    """Return the smallest integer `name` in the configs."""
    found = [getattr(config, name, None) for config in configs]
    return min((value for value in found if isinstance(value, int)), default=default)


def _ids(config: PretrainedConfig, name: str) -> list[int]:
    """Return a token id of the config as a list: none, one or several."""
    value = getattr(config, name, None)
    several = value if isinstance(value, list | tuple) else [value]
    return [item for item in several if isinstance(item, int)]
