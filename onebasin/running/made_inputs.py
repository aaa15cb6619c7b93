# SPDX-License-Identifier: Apache-2.0
"""Random inputs for a model of any type, from the parameters of its `forward` and the sizes in its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .configuration import configs, kind_of_number, numbers, settings
from .probes import POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, LENGTH, FRAMES, SIDE, SAMPLES, WAYS = 3, 13, 2, 64, 3840, 10
Given = dict[str, Any]
Maker = Callable[[], Any]

# Inputs that go with the main one if `forward` accepts them.
_TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "token_type_ids", "bbox")
_IMAGE = ("pixel_values", "flattened_patches", "image_grid_thw", "grid_thw", "spatial_shapes", "pixel_attention_mask",
          "pixel_position_ids", "image_position_ids", "target_sizes", "merge_sizes")  # fmt: skip
_SOUND = ("input_features", "input_values", "input_features_mask", "feature_attention_mask", "feature_lens",
          "audio_feature_lengths")  # fmt: skip
_INSTEAD = ("inputs_embeds", "hidden_states", "query_embeds")
_TOKENS = {"pixel_values": ("image",), "input_features": ("audio",), "input_values": ("audio",)}


@dataclass(frozen=True)
class Way:
    """A recipe for inputs: their names, the maker of each, the number among the inputs that these make (see `_made`),
    further widths of frames and patches, and the tokens of a text."""

    names: tuple[str, ...]
    makers: tuple[int, ...]
    number: int
    widths: frozenset[int]
    length: int

    def made(self, model: PreTrainedModel, seed: int) -> Given:
        """Return such inputs for a model of this class.

        Raises:
            StopIteration: They do not exist for it.
        """
        made = _made(model, self.names, self.makers, seed, self.widths, self.length)
        return next(islice(made, self.number, None))


def made_inputs(
    model: PreTrainedModel, seed: int = 0, widths: Collection[int] = (), length: int = LENGTH
) -> Iterator[tuple[Way, Given]]:
    """Yield recipes and inputs on which a model may run, first those that reach most of it.

    The inputs are keywords of its `forward`: 3 rows of random tokens that are not special, images and sounds, none of
    them masked.

    widths: sizes of a frame of sound or a patch to try, besides those in the configuration. length: tokens of a text,
    if the model accepts that many.
    """
    seen: set[str] = set()
    accepted = inspect.signature(model.forward).parameters
    needed = [name for name, each in accepted.items() if each.default is inspect.Parameter.empty
              and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]  # fmt: skip
    main = getattr(model, "main_input_name", "input_ids")
    through = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    first = [*needed, *([main] if main in accepted or (through and not needed) else [])]
    text = [name for name in _TEXT if name in accepted and ("input_ids" in accepted or name == "decoder_input_ids")]
    image = [name for name in _IMAGE if name in accepted]
    sized = [*image, *({"image_sizes"} & accepted.keys())]
    sound = [name for name in _SOUND if name in accepted]
    every = [name for name in accepted if name not in _INSTEAD or name in first]
    needs = inspect.signature(getattr(model, "get_image_features", len)).parameters.keys()
    both = [sized, image] if "image_sizes" in needs else [image, sized]
    choices = [*([*each, *sound] for each in both), *both, sound, *([name] for name in sound), []]
    beside = [needed] * (first != needed)  # another input may replace the main one
    starts = [*([*each, *text] for each in (first, *beside)), first]
    for names in (*([*start, *more] for start in starts for more in choices), every):
        for way, given in _ways(model, tuple(dict.fromkeys(names)), seed, frozenset(widths), length):
            shapes = str({name: getattr(value, "shape", value) for name, value in given.items()})
            if shapes not in seen:
                seen.add(shapes)
                yield way, given


def _ways(
    model: PreTrainedModel, names: tuple[str, ...], seed: int, widths: frozenset[int], length: int
) -> Iterator[tuple[Way, Given]]:
    """Yield inputs of these names, in all of the shapes that images and sounds may have."""
    probe = _makers(model, torch.Generator(), widths, length)
    names = tuple(name for name in names if probe.get(name))
    ranges = [range(len(probe[name])) for name in names]
    for places in islice(sorted(product(*ranges), key=lambda each: (sum(map(bool, each)), sum(each))), WAYS):
        for number, given in enumerate(_made(model, names, places, seed, widths, length)):
            yield Way(names, places, number, widths, length), given


def _made(
    model: PreTrainedModel, names: Sequence[str], places: Sequence[int], seed: int, widths: Collection[int], length: int
) -> Iterator[Given]:
    """Make inputs, each by the maker at its place; yield them with tokens for images and sounds in the text, and
    without."""
    makers = _makers(model, torch.Generator().manual_seed(seed), widths, length)
    made = {name: makers[name][place]() for name, place in zip(names, places, strict=True)}
    given = {name: value for name, value in made.items() if value is not None}
    if "input_ids" in given and (given.keys() & _TOKENS.keys()):
        yield from _placed(model, given)
    yield given


def _placed(model: PreTrainedModel, given: Given) -> Iterator[Given]:
    """Yield inputs with the placeholder tokens of images or sounds before the text, as many as the model expects."""
    found = dict(given)
    for name, words in _TOKENS.items():
        if name not in given:
            continue
        token = next(
            (
                n
                for word in words
                for each in configs(model.config)
                for key, value in vars(each).items()
                if key in (f"{word}_token_id", f"{word}_token_index", f"{word}_patch_id")
                for n in numbers(value)
            ),
            None,
        )
        if found["input_ids"].dim() != 2:
            return
        for inner in (model, getattr(model, "model", None)):
            for how in (f"get_{words[0]}_features", f"get_{words[0]}_embeddings"):
                features = getattr(inner, how, None)
                if token is None or features is None:
                    continue
                wanted = inspect.signature(features).parameters
                try:
                    with torch.no_grad():
                        made = features(**{key: value for key, value in given.items() if key in wanted
                                           and key not in ("input_ids", "attention_mask")})  # fmt: skip
                except Exception:  # it expects them in another shape
                    continue
                count = _rows(made) // BATCH
                ids = found["input_ids"]
                first = torch.full((len(ids), count), token)
                found["input_ids"] = torch.cat([first, torch.where(ids == token, 0, ids)], 1)
                for mask in ("attention_mask", "token_type_ids"):
                    if mask in found:
                        fill = torch.full((len(ids), count), int(mask == "attention_mask"))
                        found[mask] = torch.cat([fill, found[mask]], 1)
                if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                    kinds = torch.zeros_like(found["input_ids"])
                    kinds[found["input_ids"] == token] = 1
                    found["mm_token_type_ids"] = kinds
                yield found
                return


def _rows(made: Any) -> int:
    """Return the number of vectors in the output of a tower."""
    for name in ("pooler_output", "last_hidden_state"):
        made = getattr(made, name, None) if getattr(made, name, None) is not None else made
    if isinstance(made, Tensor):
        return made.flatten(0, -2).shape[0]
    return sum(_rows(each) for each in made)


def _makers(
    model: PreTrainedModel, generator: torch.Generator, widths: Collection[int], most: int
) -> Mapping[str, list[Maker]]:
    """Return argument -> its makers, in the order in which they are tried."""
    config: Any = model.config
    text = config.get_text_config(**({"encoder": True} if getattr(config, "is_encoder_decoder", False) else {}))
    decoder = config.get_text_config(decoder=True)
    text = getattr(config, "encoder_config", text) if text is decoder else text
    every = list(configs(config))
    vision: Any = getattr(config, "vision_config", None) or next(
        (each for each in every if any(hasattr(each, name) for name in ("patch_size", "image_size", "max_img_size"))),
        config,
    )
    sound: Any = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config

    def number(*names: str, default: int, scopes: tuple[Any, ...] = ()) -> int:
        for scope in (*scopes, *every):
            for name in names:
                value = getattr(scope, "__dict__", {}).get(name)
                for n in numbers(value):
                    return n
        return default

    special = {n for each in every for key, value in settings(each) if kind_of_number(key) == "token"
               for n in numbers(value)}  # fmt: skip

    length = longest_text(model, most, every)

    def ids(scope: Any, *shape: int) -> Tensor:
        vocabulary = number("vocab_size", "text_vocab_size", default=32, scopes=(scope,))
        plain = torch.tensor([n for n in range(vocabulary) if n not in special] or [0])
        found = plain[torch.randint(len(plain), shape or (BATCH, length), generator=generator)]
        for n in numbers(vars(scope).get("question_token_id")):  # marks the question to answer
            found[:, 2] = n
        return found

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(max(high, 1), shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.long)

    channels = number("num_channels", "in_channels", "in_chans", default=3, scopes=(vision,))
    patch = number("patch_size", "encoder_patch_size", default=2, scopes=(vision,))
    spread = number(
        "spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", default=1, scopes=(vision,)
    )
    depth = number("temporal_patch_size", default=1, scopes=(vision,))
    free = min(SIDE, 4 * spread * patch) if hasattr(vision, "patch_size") else SIDE  # if no size is given
    sizes = (getattr(vision, name, None) for name in ("image_size", "img_size", "max_img_size"))
    size: Any = next(filter(None, sizes), free)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    side = 2 * spread  # patches
    frames = number("num_frames", "frames_per_clip", default=FRAMES, scopes=(vision,))
    bins = number("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "n_mels", "mel_dim",
                  "input_feat_size", "feature_projection_input_dim", default=80, scopes=(sound,))  # fmt: skip
    bins *= number("num_stacked_frames", default=1, scopes=(sound,))
    positions = 2 * number("n_window", "max_source_positions", default=32, scopes=(sound,))
    cell = channels * depth * patch * patch
    merged = [cell * spread * spread] * (spread > 1)  # several patches in one row
    patches: list[Maker] = [partial(normal, BATCH * side * side, n) for n in (*widths, cell, *merged)]
    accepted = inspect.signature(model.forward).parameters
    packed = "image_grid_thw" in accepted or "grid_thw" in accepted
    flat: list[Maker] = [partial(normal, BATCH, side * side, n) for n in (*widths, channels * patch * patch)]
    stacked: Maker = partial(normal, BATCH * side * side, channels, patch, patch)
    plane: list[Maker] = [
        lambda: normal(BATCH, channels, height, width), lambda: normal(BATCH, 1, channels, height, width),
        lambda: normal(BATCH, frames, channels, height, width), lambda: normal(BATCH, 1, 1, channels, height, width),
        lambda: normal(BATCH, 2, channels, height, width),
        *flat, *patches, stacked,
        lambda: normal(BATCH, channels, SIDE, SIDE),
    ]  # fmt: skip
    sequences = "spatial_shapes" in accepted or "pixel_position_ids" in accepted or "image_position_ids" in accepted
    pixels = [*patches, stacked, *plane] if packed else [*flat, *plane] if sequences else plane
    grid = torch.tensor([[1, side, side]] * BATCH)
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    extent = number("max_2d_position_embeddings", default=32, scopes=(text,))

    def boxes() -> Tensor:
        corner = whole(extent // 2, BATCH, length, 2)
        return torch.cat([corner, corner + whole(extent // 2, BATCH, length, 2)], -1)

    def placed() -> Tensor:  # the row, the column, and the pixels of a patch
        seen = normal(BATCH, side * side, number("patch_embed_hidden_size", default=cell))
        return torch.cat([(places + 1).expand(BATCH, -1, -1), seen], -1)

    spectrum: list[Maker] = [lambda: normal(BATCH, 1, positions, bins)] if hasattr(sound, "spec_size") else []
    spectrum += [partial(normal, BATCH, positions, n) for n in widths]
    spectrum += [lambda: normal(BATCH, bins, positions), lambda: normal(BATCH, positions, bins)]
    wave: list[Maker] = [lambda: normal(BATCH, SAMPLES), lambda: normal(BATCH, 1, SAMPLES),
                         lambda: normal(BATCH, number("max_length", default=64), bins), *spectrum]  # fmt: skip
    smallest = min((n for each in every for key, value in settings(each) if kind_of_number(key) == "vocabulary"
                    for n in numbers(value) if n > 8), default=32)  # fmt: skip

    def coded(*shape: int) -> Tensor:
        return ids(text, *shape) % smallest

    books = number("num_codebooks", "codebooks", default=0)
    codes: list[Maker] = [
        lambda: coded(BATCH * books, length), lambda: coded(BATCH, length, books),
        lambda: coded(BATCH, books, length), lambda: coded(BATCH, length, books + 1),
    ] if books else []  # fmt: skip
    parallel = vars(decoder).get("num_channels")  # tokens at one position
    context = number("context_length", default=length)
    lags = max([0, *numbers(vars(config).get("lags_sequence"))])
    steps = context + lags
    variables = number("num_input_channels", "input_size", default=1)
    ahead = number("prediction_length", default=2)
    return {
        "input_ids": [lambda: ids(text), *codes],
        "decoder_input_ids": [lambda: ids(decoder),
                              *([lambda: ids(decoder, BATCH, length, parallel)] if parallel else [])],
        "attention_mask": [lambda: ones(BATCH, length)],
        "token_type_ids": [lambda: whole(number("type_vocab_size", default=1, scopes=(text,)), BATCH, length)],
        "bbox": [boxes], "lang_ids": [lambda: torch.zeros(BATCH, dtype=torch.long)],
        "pixel_values": pixels,
        "pixel_values_videos": [lambda: normal(BATCH, frames, channels, height, width), *patches],
        "flattened_patches": [placed],
        "image_grid_thw": [lambda: grid], "grid_thw": [lambda: grid],
        "image_sizes": [lambda: torch.tensor([[height, width]] * BATCH)],
        "target_sizes": [lambda: grid[:, 1:]], "spatial_shapes": [lambda: grid[:, 1:]],
        "pixel_attention_mask": [lambda: ones(BATCH, side * side) if sequences else None],
        "pixel_position_ids": [lambda: places.expand(BATCH, -1, -1)],
        "image_position_ids": [lambda: places.expand(BATCH, -1, -1)],
        "merge_sizes": [lambda: torch.full((BATCH,), spread)],
        "input_features": spectrum, "input_values": wave,
        "input_features_mask": [lambda: ones(BATCH, positions)],
        "feature_attention_mask": [lambda: ones(BATCH, positions)],
        "past_values": [lambda: normal(BATCH, steps), lambda: normal(BATCH, context, variables)],
        "past_time_features": [lambda: normal(BATCH, steps, number("num_time_features", default=0))],
        "past_observed_mask": [lambda: torch.ones(BATCH, steps, dtype=torch.float64)],
        "future_values": [lambda: normal(BATCH, ahead)],
        "future_time_features": [lambda: normal(BATCH, ahead, number("num_time_features", default=0))],
        "inputs": [lambda: ids(text), lambda: normal(BATCH, length, number("d_model", default=24))],
        "inputs_embeds": [lambda: normal(BATCH, length, number("hidden_size", "d_model", default=24))],
        "hidden_states": [lambda: normal(BATCH, length, number("hidden_size", "d_model", default=24)), *patches],
        "query_embeds": [lambda: normal(BATCH, length, number("hidden_size", default=24))],
        "qformer_input_ids": [lambda: ids(getattr(config, "qformer_config", text))],
        "encoder_hidden_states": [
            lambda: normal(BATCH, 5, number("encoder_hidden_size", "hidden_size", default=24))
        ],
        "states": [lambda: normal(BATCH, length, number("state_dim", default=2))],
        "actions": [lambda: normal(BATCH, length, number("act_dim", default=2))],
        "rewards": [lambda: normal(BATCH, length, 1)], "returns_to_go": [lambda: normal(BATCH, length, 1)],
        "timesteps": [lambda: whole(number("max_ep_len", default=8), BATCH, length)],
        "visual_feats": [lambda: normal(BATCH, 5, number("visual_feat_dim", default=24))],
        "visual_pos": [lambda: normal(BATCH, 5, number("visual_pos_dim", default=4))],
        "visual_embeds": [lambda: normal(BATCH, 5, number("visual_embedding_dim", default=24))],
        "prompt_pixel_values": [lambda: normal(BATCH, channels, height, width)],
        "prompt_masks": [lambda: normal(BATCH, channels, height, width)],
        "state": [lambda: normal(BATCH, number("max_state_dim", default=8))],
        "audio_mel": [lambda: normal(BATCH, positions, bins)],
        "audio_mel_mask": [lambda: torch.zeros(BATCH, positions, dtype=torch.bool)],
        "latents": [lambda: normal(BATCH, number("hidden_size", default=24), 8)],
        "langs": [lambda: torch.zeros(BATCH, length, dtype=torch.long)],
        "codebook_idx": [lambda: 1], "freq": [lambda: torch.zeros(BATCH, dtype=torch.long)],
    }  # fmt: skip


def widths_named(errors: Iterable[Exception]) -> set[int]:
    """Return the widths that matrices wanted, by what torch said of inputs that do not fit them."""
    return {int(n) for error in errors for n in re.findall(r"be multiplied \(\d+x\d+ and (\d+)x", str(error))}


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


def senses(model: PreTrainedModel) -> set[str]:
    """Return the names of the images and sounds that a model accepts besides text."""
    accepted = inspect.signature(model.forward).parameters.keys()
    return {"pixel_values", "input_features", "input_values"} & accepted if "input_ids" in accepted else set()
