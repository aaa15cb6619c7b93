# SPDX-License-Identifier: Apache-2.0
"""Random inputs for a model of any type, from the parameters of its `forward` and the sizes in its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .configuration import configs, numbers
from .input_shapes import BATCH, Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH, WAYS = 13, 10
Given = dict[str, Any]

# Inputs that go with the main one if `forward` accepts them.
_TEXT = ("input_ids", "attention_mask", "global_attention_mask", "decoder_input_ids", "token_type_ids", "bbox",
         "entity_ids", "entity_position_ids", "visual_embeds", "protein_input_ids",
         "protein_attention_mask")  # fmt: skip
_IMAGE = ("pixel_values", "image_pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "high_res_pixel_values",
          "flattened_patches", "image_grid_thw", "grid_thw", "spatial_shapes", "pixel_attention_mask",
          "pixel_position_ids", "image_position_ids", "image_embeds_position_mask", "target_sizes",
          "merge_sizes", "image_merge_sizes")  # fmt: skip
_SIZES = ("image_sizes", "image_attention_mask")
_SOUND = ("input_features", "input_values", "audio_input_features", "audio_embed_sizes", "input_features_mask",
          "feature_attention_mask", "feature_lens", "audio_feature_lengths")  # fmt: skip
_INSTEAD = ("inputs_embeds", "hidden_states", "query_embeds")
# Image or sound -> the word for it in names, and its kind of token.
_TOKENS = {"pixel_values": ("image", 1), "image_pixel_values": ("image", 1), "input_features": ("audio", 0),
           "input_values": ("audio", 0), "audio_input_features": ("audio", 0)}  # fmt: skip


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
        known = Inputs(model, self.widths, self.length)
        made = _made(model, known, self.names, self.makers, seed)
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
    if "encoder_hidden_states" in accepted and any(name.endswith("encoder_attn") for name, _ in model.named_modules()):
        text.append("encoder_hidden_states")  # a decoder, alone
    image = [name for name in _IMAGE if name in accepted]
    sized = [*image, *(name for name in _SIZES if name in accepted)]
    sound = [name for name in _SOUND if name in accepted]
    every = [name for name in accepted if name not in _INSTEAD or name in first]
    needs = inspect.signature(getattr(model, "get_image_features", len)).parameters.keys()
    both = [sized, image] if "image_sizes" in needs or "image_pixel_values" in image else [image, sized]
    choices = [*([*each, *sound] for each in both), *both, sound, *([name] for name in sound), []]
    beside = [needed] * (first != needed)  # another input may replace the main one
    starts = [*([*each, *text] for each in (first, *beside)), first]
    known = Inputs(model, widths, length)
    for names in (*([*start, *more] for start in starts for more in choices), every):
        for way, given in _ways(model, known, tuple(dict.fromkeys(names)), seed):
            shapes = str({name: getattr(value, "shape", value) for name, value in given.items()})
            if shapes not in seen:
                seen.add(shapes)
                yield way, given


def _ways(model: PreTrainedModel, known: Inputs, names: tuple[str, ...], seed: int) -> Iterator[tuple[Way, Given]]:
    """Yield inputs of these names, in all of the shapes that images and sounds may have."""
    counts = {name: len(known.makers(name)) for name in names}
    names = tuple(name for name in names if counts[name])
    ranges = [range(counts[name]) for name in names]
    for places in islice(sorted(product(*ranges), key=lambda each: (sum(map(bool, each)), sum(each))), WAYS):
        for number, given in enumerate(_made(model, known, names, places, seed)):
            yield Way(names, places, number, known.widths, known.most), given


def _made(
    model: PreTrainedModel, known: Inputs, names: Sequence[str], places: Sequence[int], seed: int
) -> Iterator[Given]:
    """Make inputs, each by the maker at its place; yield them with tokens for images and sounds in the text, and
    without."""
    known.generator.manual_seed(seed)
    given = {name: known.makers(name)[place]() for name, place in zip(names, places, strict=True)}
    if "input_ids" in given and (given.keys() & _TOKENS.keys()):
        yield from _placed(model, given)
    yield given


def _placed(model: PreTrainedModel, given: Given) -> Iterator[Given]:
    """Yield inputs with the placeholder tokens of images and sounds before the text, as many as the model expects."""
    found = given
    for name, (word, kind) in _TOKENS.items():
        keys = (f"{word}_token_id", f"{word}_token_index", f"{word}_patch_id")
        token = next((n for each in configs(model.config) for key in keys for n in numbers(vars(each).get(key))), None)
        if name in given and token is not None and given["input_ids"].dim() == 2:
            one = _with_tokens(model, found, token, kind, 1)
            count = _rows_made(model, word, given) or _rows_named(model, one) or 1
            found = _with_tokens(model, found, token, kind, count)
    if found is not given:
        yield found


def _with_tokens(model: PreTrainedModel, given: Given, token: int, kind: int, count: int) -> Given:
    """Return inputs with so many tokens of a kind before the text."""
    ids = given["input_ids"]
    found = {**given, "input_ids": pad(torch.where(ids == token, 0, ids), (count, 0), value=token)}
    for mask in {"attention_mask", "token_type_ids"} & given.keys():
        found[mask] = pad(given[mask], (count, 0), value=int(mask == "attention_mask"))
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        found["mm_token_type_ids"] = pad(given.get("mm_token_type_ids", torch.zeros_like(ids)), (count, 0), value=kind)
    return found


def _rows_made(model: PreTrainedModel, word: str, given: Given) -> int:
    """Return the number of vectors that a tower makes of an example's image or sound, by its own function: 0 if it has
    none, or expects them in another shape."""
    for inner in (model, getattr(model, "model", None)):
        for how in (f"get_{word}_features", f"get_{word}_embeddings"):
            if (features := getattr(inner, how, None)) is not None:
                wanted = inspect.signature(features).parameters.keys() - {"input_ids", "attention_mask"}
                with suppress(Exception), torch.no_grad():
                    return _rows(features(**{key: value for key, value in given.items() if key in wanted})) // BATCH
    return 0


def _rows_named(model: PreTrainedModel, given: Given) -> int:
    """Return the same number, read from a model's error for another number of placeholders; 0 without an error."""
    try:
        with torch.no_grad():
            model(**given)
    except Exception as error:
        said = re.search(r"(?:, features: |shape mismatch: value tensor of shape \[)(\d+)", str(error))
        return int(said[1]) // BATCH if said else 0
    return 0


def _rows(made: Any) -> int:
    """Return the number of vectors in the output of a tower."""
    for name in ("pooler_output", "last_hidden_state"):
        made = getattr(made, name, None) if getattr(made, name, None) is not None else made
    if isinstance(made, Tensor):
        return made.flatten(0, -2).shape[0]
    return sum(_rows(each) for each in made)


def widths_named(errors: Iterable[Exception]) -> set[int]:
    """Return the widths that matrices need, read from torch's errors for inputs that do not fit them."""
    return {int(n) for error in errors for n in re.findall(r"be multiplied \(\d+x\d+ and (\d+)x", str(error))}


def length_named(errors: Iterable[Exception]) -> int:
    """Return the number of tokens that a text needs, read from torch's errors for texts that are not as long as the
    sound beside them; `LENGTH` without one."""
    said = (re.search(rf"a \({LENGTH}\) must match the size of tensor b \((\d+)\)", str(error)) for error in errors)
    return next((int(match[1]) for match in said if match), LENGTH)


def senses(model: PreTrainedModel) -> set[str]:
    """Return the names of the images and sounds that a model accepts besides text."""
    accepted = inspect.signature(model.forward).parameters.keys()
    return _TOKENS.keys() & accepted if "input_ids" in accepted else set()
