# SPDX-License-Identifier: Apache-2.0
"""The shapes that the arguments of a model's `forward` may have, in a notation, and random tensors of these shapes.

A shape is a kind and its axes, and an argument may have several, separated by bars:

    "past_values": "normal batch context+lags | normal batch context variables"

An axis is a size (`batch`, `length`, `channels`), a number, or a sum or product (`side*side`). Sizes come from the
model's configuration; `name=8` is the setting of that name, or 8 if there is none, and `width` any of the widths that
are asked for. A kind is a method of `Inputs`; a size instead means whole numbers below it. `size?` before a shape
means: only if this size is not 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .configuration import configs, kind_of_number, numbers, settings
from .probes import POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, FRAMES, SIDE, SAMPLES = 3, 2, 64, 3840
Maker = Callable[[], Any]


def _only(condition: str, shapes: str) -> str:
    return "|".join(f"{condition}? {each}" for each in shapes.split("|"))


_FLAT = "normal batch side*side width | normal batch side*side cell"
_PATCHES = """normal batch*side*side width | normal batch*side*side cell | merged? normal batch*side*side merged"""
_STACKED = "normal batch*side*side channels patch patch"
_PLANE = f"""tiled? normal batch 1 max_num_tiles=4 channels height wide | normal batch channels height wide |
    normal batch 1 channels height wide | normal batch frames channels height wide |
    normal batch 1 1 channels height wide | normal batch 2 channels height wide | {_FLAT} | {_PATCHES} | {_STACKED} |
    normal batch channels {SIDE} {SIDE}"""
_SPECTRUM = """spectrogram? normal batch 1 positions bins | normal batch positions width |
    normal batch bins positions | normal batch positions bins"""

SHAPES: Mapping[str, str] = {
    "input_ids": """text batch length | books? codes batch*books length | books? codes batch length books |
        books? codes batch books length | books? codes batch length books+1""",
    "decoder_input_ids": "decoder batch length | parallel? decoder batch length parallel",
    "attention_mask": "ones batch length",
    "global_attention_mask": "leading batch length 1",
    "token_type_ids": "token_types batch length",
    "entity_ids": "entity_vocab_size=1 batch 2",
    "entity_position_ids": "length batch 2 2",
    "bbox": "boxes batch length",
    "lang_ids": "zeros batch",
    "langs": "zeros batch length",
    "pixel_values": f"{_only('packed', f'{_PATCHES} | {_STACKED}')} | {_only('rows', _FLAT)} | {_PLANE}",
    "high_res_pixel_values": "normal batch channels high high",
    "image_pixel_values": "normal batch 2 channels height wide",
    "image_attention_mask": "crops? true batch 2 down across | ones batch length 1",
    "aspect_ratio_ids": "ones batch 1",
    "aspect_ratio_mask": "ones batch 1 max_num_tiles=4",
    "protein_input_ids": "protein batch length",
    "protein_attention_mask": "ones batch length",
    "audio_input_features": _SPECTRUM,
    "audio_embed_sizes": "each 1",
    "pixel_values_videos": f"normal batch frames channels height wide | {_PATCHES}",
    "flattened_patches": "placed batch side*side patch_embed_hidden_size=cell",
    "image_grid_thw": "each 1 side side",
    "grid_thw": "each 1 side side",
    "image_sizes": "each height wide",
    "target_sizes": "each side side",
    "spatial_shapes": "each side side",
    "pixel_attention_mask": "sequences? ones batch side*side | tiles? true batch 1",
    "pixel_position_ids": "places batch",
    "image_position_ids": "places batch",
    "image_embeds_position_mask": "leading batch length latent_query_num=5",
    "merge_sizes": "each spread",
    "image_merge_sizes": "each spread",
    "input_features": _SPECTRUM,
    "input_values": f"""normal batch {SAMPLES} | normal batch 1 {SAMPLES} | normal batch max_length=64 bins |
        {_SPECTRUM}""",
    "input_features_mask": "ones batch positions",
    "feature_attention_mask": "ones batch positions",
    "audio_mel": "normal batch positions bins",
    "audio_mel_mask": "nowhere batch positions",
    "past_values": "normal batch context+lags | normal batch context variables",
    "past_time_features": "normal batch context+lags num_time_features=0",
    "past_observed_mask": "everywhere batch context+lags",
    "future_values": "normal batch prediction_length=2",
    "future_time_features": "normal batch prediction_length=2 num_time_features=0",
    "inputs": "text batch length | normal batch length d_model=24",
    "inputs_embeds": "normal batch length hidden",
    "hidden_states": f"normal batch length hidden | {_PATCHES}",
    "query_embeds": "normal batch length hidden_size=24",
    "qformer_input_ids": "qformer batch length",
    "encoder_hidden_states": "normal batch 5 encoder_hidden",
    "states": "normal batch length state_dim=2",
    "actions": "normal batch length act_dim=2",
    "rewards": "normal batch length 1",
    "returns_to_go": "normal batch length 1",
    "timesteps": "max_ep_len=8 batch length",
    "visual_feats": "normal batch 5 visual_feat_dim=24",
    "visual_pos": "normal batch 5 visual_pos_dim=4",
    "visual_embeds": "normal batch 5 visual_embedding_dim=24",
    "prompt_pixel_values": "normal batch channels height wide",
    "prompt_masks": "normal batch channels height wide",
    "state": "normal batch max_state_dim=8",
    "latents": "normal batch hidden_size=24 8",
    "codebook_idx": "one",
    "freq": "zeros batch",
}

# Size -> the part of the configuration to look in first, the settings that may state it, and what it is otherwise.
_STATED: Mapping[str, tuple[str, str, int]] = {
    "channels": ("vision", "num_channels in_channels in_chans", 3),
    "high": ("high", "image_size", SIDE),
    "patch": ("vision", "patch_size encoder_patch_size", 2),
    "spread": ("vision", "spatial_merge_size merge_size merge_kernel_size pooling_kernel_size", 1),
    "depth": ("vision", "temporal_patch_size", 1),
    "frames": ("vision", "num_frames frames_per_clip", FRAMES),
    "bins of one frame": (
        "sound",
        "num_mel_bins feature_size input_feat_per_channel input_dim n_mels mel_dim input_feat_size "
        "feature_projection_input_dim",
        80,
    ),
    "stacked": ("sound", "num_stacked_frames", 1),
    "window": ("sound", "n_window max_source_positions", 32),
    "token_types": ("text", "type_vocab_size", 1),
    "extent": ("text", "max_2d_position_embeddings", 32),
    "books": ("", "num_codebooks codebooks", 0),
    "variables": ("", "num_input_channels input_size", 1),
    "hidden": ("", "hidden_size d_model", 24),
    "encoder_hidden": ("", "encoder_hidden_size cross_attention_hidden_size hidden_size d_model", 24),
}


class Inputs:
    """Random inputs for a model, by the names of its arguments.

    Args:
        model: The model; of its class only the parameters of `forward` and `get_image_features` count.
        widths: Sizes of a frame of sound or of a patch, besides those in the configuration.
        most: Tokens of a text, if the model accepts that many.
    """

    def __init__(self, model: PreTrainedModel, widths: Collection[int], most: int) -> None:
        config: Any = model.config
        self.generator, self.widths, self.most = torch.Generator(), frozenset(widths), most
        self.every = list(configs(config))
        text = config.get_text_config(**({"encoder": True} if getattr(config, "is_encoder_decoder", False) else {}))
        decoder = config.get_text_config(decoder=True)
        text = getattr(config, "encoder_config", text) if text is decoder else text
        sized = ("patch_size", "image_size", "max_img_size")
        vision: Any = getattr(config, "vision_config", None) or next(
            (each for each in self.every if any(hasattr(each, name) for name in sized)), config
        )
        sound: Any = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
        self.parts = {"text": text, "decoder": decoder, "vision": vision, "sound": sound,
                      "qformer": getattr(config, "qformer_config", text),
                      "protein": getattr(config, "protein_encoder_config", text),
                      "high": getattr(config, "high_res_vision_config", vision)}  # fmt: skip
        self.special = {n for each in self.every for key, value in settings(each) if kind_of_number(key) == "token"
                        for n in numbers(value)}  # fmt: skip
        self.smallest = min((n for each in self.every for key, value in settings(each)
                             if kind_of_number(key) == "vocabulary" for n in numbers(value) if n > 8),
                            default=32)  # fmt: skip
        length = longest_text(model, most, self.every)
        known = self.sizes = {size: self._stated(*where) for size, where in _STATED.items()}
        accepted = inspect.signature(model.forward).parameters.keys()
        packed = not accepted.isdisjoint(("image_grid_thw", "grid_thw"))
        towers = (getattr(each, "get_image_features", len) for each in (model, getattr(model, "model", None)))
        tiles = any(each.name == "pixel_attention_mask" and each.default is each.empty
                    for tower in towers for each in inspect.signature(tower).parameters.values())  # fmt: skip
        sequences = not accepted.isdisjoint(("spatial_shapes", "pixel_position_ids", "image_position_ids"))
        free = min(SIDE, 4 * known["spread"] * known["patch"]) if hasattr(vision, "patch_size") else SIDE
        image = (getattr(vision, name, None) for name in ("image_size", "img_size", "max_img_size"))
        size: Any = next(filter(None, image), free)
        height, wide = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        cell = known["channels"] * known["depth"] * known["patch"] ** 2
        known |= {
            "batch": BATCH, "length": length, "height": height, "wide": wide, "cell": cell,
            "side": 2 * known["spread"],  # patches
            "merged": cell * known["spread"] ** 2 if known["spread"] > 1 else 0,  # several patches in one row
            "bins": known["bins of one frame"] * known["stacked"], "positions": 2 * known["window"],
            "context": self._stated("", "context_length", length),
            "lags": max([0, *numbers(vars(config).get("lags_sequence"))]),
            "parallel": vars(decoder).get("num_channels") or 0,  # tokens at one position
            "down": height // known["patch"], "across": wide // known["patch"],  # patches of an image
            "crops": "image_pixel_values" in accepted, "tiled": "aspect_ratio_ids" in accepted,
            "packed": packed, "sequences": sequences, "rows": sequences and not packed, "tiles": tiles,
            "spectrogram": hasattr(sound, "spec_size"),
        }  # fmt: skip

    def makers(self, argument: str) -> list[Maker]:
        """Return what makes the values of an argument, in the order in which they are tried; none if it is unknown."""
        found: list[Maker] = []
        for shape in SHAPES[argument].split("|") if argument in SHAPES else ():
            *conditions, rest = shape.split("?")
            if not all(self.size(condition.strip()) for condition in conditions):
                continue
            kind, *axes = rest.split()
            make = getattr(self, kind, None) or partial(self.below, self.size(kind))
            for width in self.widths if "width" in axes else (0,):
                found.append(partial(make, *(width if axis == "width" else self.size(axis) for axis in axes)))
        return found

    def size(self, axis: str) -> int:
        """Return the size of an axis, see the notation above."""
        if "+" in axis:
            return sum(map(self.size, axis.split("+")))
        if "*" in axis:
            return prod(map(self.size, axis.split("*")))
        if "=" in axis:
            name, otherwise = axis.split("=")
            return self._stated("", name, self.size(otherwise))
        return int(axis) if axis.isdigit() else self.sizes[axis]

    def _stated(self, part: str, names: str, otherwise: int) -> int:
        for scope in (*([self.parts[part]] if part else []), *self.every):
            for name in names.split():
                for n in numbers(getattr(scope, "__dict__", {}).get(name)):
                    return n
        return otherwise

    # --- kinds ----------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def below(self, size: int, *shape: int) -> Tensor:
        return torch.randint(max(size, 1), shape, generator=self.generator)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.long)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)

    def leading(self, batch: int, length: int, count: int) -> Tensor:
        """Return ones for the first tokens and zeros for the others."""
        return (torch.arange(length) < count).long().expand(batch, -1)

    def everywhere(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float64)

    def true(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    def nowhere(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bool)

    def one(self) -> int:
        return 1

    def text(self, *shape: int, part: str = "text") -> Tensor:
        """Return tokens that are not special."""
        scope = self.parts[part]
        vocabulary = self._stated(part, "vocab_size text_vocab_size", 32)
        plain = torch.tensor([n for n in range(vocabulary) if n not in self.special] or [0])
        found = plain[torch.randint(len(plain), shape, generator=self.generator)]
        for n in numbers(vars(scope).get("question_token_id")):  # marks the question to answer
            found[:, 2] = n
        return found

    def decoder(self, *shape: int) -> Tensor:
        return self.text(*shape, part="decoder")

    def qformer(self, *shape: int) -> Tensor:
        return self.text(*shape, part="qformer")

    def protein(self, *shape: int) -> Tensor:
        return self.text(*shape, part="protein")

    def codes(self, *shape: int) -> Tensor:
        """Return tokens that are in every vocabulary."""
        return self.text(*shape) % self.smallest

    def each(self, *values: int) -> Tensor:
        """Return the same numbers for each example."""
        return torch.tensor([values if len(values) > 1 else values[0]] * BATCH)

    def boxes(self, *shape: int) -> Tensor:
        """Return the left, upper, right and lower ends of boxes."""
        half = self.sizes["extent"] // 2
        corner, size = (self.below(half, *shape, 2) for _ in range(2))
        return torch.cat([corner, corner + size], -1)

    def places(self, batch: int) -> Tensor:
        """Return the row and column of every patch."""
        side = torch.arange(self.sizes["side"])
        return torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2).expand(batch, -1, -1)

    def placed(self, *shape: int) -> Tensor:
        """Return the row, the column and the pixels of every patch."""
        seen = self.normal(*shape)
        return torch.cat([self.places(len(seen)) + 1, seen], -1)


def longest_text(model: PreTrainedModel, most: int, configs: Sequence[Any]) -> int:
    """Return the length of the longest text that a model accepts, at most `most`, by the positions in some of its
    configurations."""
    stated = (next((n for each in configs for n in numbers(vars(each).get(name))), 0) for name in POSITIONS)
    counted = [n for n in stated if n > 2]
    pads = [
        padding
        for each in model.modules()
        for padding in numbers(getattr(each, "padding_idx", None))
        if isinstance(table := getattr(each, "weight", None), Tensor) and len(table) in counted
    ]  # RoBERTa counts from there on
    return min([most, *(n - max(pads, default=-1) - 1 for n in counted)])
