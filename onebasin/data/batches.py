# SPDX-License-Identifier: Apache-2.0
"""Examples turned into batches of a model's inputs: images, token sequences, labelled texts and words, speech."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from onebasin.running.classes import quietly
from onebasin.settings import Examples

from . import speech, text
from .digits import digits
from .files import kind, read_rows, read_sentences, read_text
from .tables import Class, Row

IGNORED = -100  # the label of positions that the loss ignores
TOKENIZER_FILES = (  # one of these holds the vocabulary
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)

Features = dict[str, list[int]]  # one sequence: input_ids, labels, and what else the tokenizer gives


@dataclass(frozen=True)
class Source:
    """The data, the model's folder and configuration, and how examples are read."""

    data: str
    model: Path
    config: Any
    how: Examples

    @cached_property
    def context(self) -> int:
        """The longest sequence in tokens."""
        return self.how.context or min(getattr(self.config, "max_position_embeddings", None) or 512, 512)

    @cached_property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Character -> id, where there is one instead of a tokenizer."""
        given = self.how.vocabulary
        return given if given is None or isinstance(given, Mapping) else text.read_vocabulary(given)


# --- images ------------------------------------------------------------------------------------------------


def _images(source: Source) -> Iterator[dict[str, Tensor]]:
    if source.data == "builtin:digits":
        pixels, labels = digits(source.how.split or "test")
        pixels, labels = pixels[: source.how.limit], labels[: source.how.limit]
        if source.config.num_labels < 10:
            raise ValueError(f"builtin:digits has 10 classes, but the model has {source.config.num_labels}")
    else:
        rows = _rows(source, "image", "label")
        pixels = pixel_values(source, rows)
        labels = torch.tensor([_label(source, row, i) for i, row in enumerate(rows, 1)])
    for images, targets in zip(*(torch.split(one, source.how.batch) for one in (pixels, labels)), strict=True):
        yield {"pixel_values": images, "labels": targets}


def pixel_values(source: Source, rows: list[Row]) -> Tensor:
    """Return the pixels of images, given as paths beside the data, as the bytes of a file, or decoded."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("image files need Pillow: pip install 'onebasin[data]'") from None
    mode = "L" if getattr(source.config, "num_channels", 3) == 1 else "RGB"
    beside = Path(source.data) if Path(source.data).is_dir() else Path(source.data).parent
    images = []
    for number, row in enumerate(rows, 1):
        given = row["image"]
        raw = given.get("bytes") if isinstance(given, dict) else None
        place = given.get("path") if isinstance(given, dict) else given
        try:
            if isinstance(given, Image.Image):
                images.append(given.convert(mode))
                continue
            with Image.open(io.BytesIO(raw) if raw else beside / str(place)) as image:
                images.append(image.convert(mode))
        except OSError as error:
            raise ValueError(f"row {number} of '{source.data}': cannot read '{place}': {error}") from None
    if not (source.model / "preprocessor_config.json").is_file():
        raise ValueError(f"'{source.model}' has no preprocessor_config.json, which image files need")
    from transformers import AutoImageProcessor  # slow to load, as it brings all that runs models

    with quietly():
        processor = AutoImageProcessor.from_pretrained(source.model)  # type: ignore[no-untyped-call]
    pixels: Tensor = processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels


# --- language models ---------------------------------------------------------------------------------------


def _causal_lm(source: Source) -> Iterator[dict[str, Tensor]]:
    features, _ = _token_sequences(source)
    yield from padded([{**one, "labels": one["input_ids"]} for one in features], source.how.batch, source.how.by_length)


def _masked_lm(source: Source) -> Iterator[dict[str, Tensor]]:
    features, mask_id = _token_sequences(source)
    if mask_id is None:
        raise ValueError("masked-lm needs the id of the mask token, since the model's tokenizer names none")
    generator = torch.Generator().manual_seed(source.how.seed)
    hidden = masked(features, mask_id, source.how.mask_share, source.how.maskable, generator)
    yield from padded(hidden, source.how.batch, source.how.by_length)


def masked(
    features: list[Features], mask: int, share: float, maskable: Sequence[int] | None, generator: torch.Generator
) -> list[Features]:
    """Return sequences in which a share of the tokens, at least one, is hidden, with the hidden tokens as labels.

    Args:
        features: the sequences; tokens in their `special_tokens_mask` are not hidden.
        mask: the token put in place of hidden ones.
        share: of the tokens of each sequence that may be hidden.
        maskable: the tokens that may be hidden (default: all).
        generator: draws them.
    """
    allowed, found = None if maskable is None else set(maskable), []
    for one in features:
        ids = one["input_ids"]
        special = one.get("special_tokens_mask", [0] * len(ids))
        free = [i for i, id_ in enumerate(ids) if not special[i] and (allowed is None or id_ in allowed)]
        number = min(len(free), max(1, round(share * len(free))))
        chosen = {free[i] for i in torch.randperm(len(free), generator=generator)[:number].tolist()}
        inputs = [mask if i in chosen else id_ for i, id_ in enumerate(ids)]
        labels = [id_ if i in chosen else IGNORED for i, id_ in enumerate(ids)]
        found.append({**one, "input_ids": inputs, "labels": labels})
    return found


def _token_sequences(source: Source) -> tuple[list[Features], int | None]:
    """Return token sequences, and the id of the mask token if it is known."""
    if source.data == "builtin:stdlib" or kind(source.data) == "txt":
        features, tokenizer = _running_text(source)
    else:
        features, tokenizer = _row_texts(source)
    _refuse_tokens(source, features)
    own_mask = getattr(tokenizer, "mask_token_id", None)
    return features, own_mask if source.how.mask_id is None else source.how.mask_id


def _running_text(source: Source) -> tuple[list[Features], Any]:
    """Return sequences of exactly `context` tokens, and the tokenizer if one was used."""
    vocabulary, tokenizer = source.vocabulary, None
    if source.data == "builtin:stdlib":
        whole = text.stdlib_text()
        vocabulary = vocabulary or text.character_vocabulary(whole)
    else:
        whole = read_text(source.data)
    piece = text.part(whole, source.how.split or "validation")
    if vocabulary:
        needed = None if source.how.limit is None else source.how.limit * source.context  # one token a character
        ids = text.encode(piece[:needed], vocabulary)
    else:
        tokenizer = _tokenizer(source)
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
    return [{"input_ids": one} for one in text.sequences(ids, source.context)[: source.how.limit]], tokenizer


def _row_texts(source: Source) -> tuple[list[Features], Any]:
    """Return one sequence of at most `context` tokens per row, and the tokenizer if one was used."""
    rows = _rows(source)
    if "input_ids" in rows[0]:
        return [{"input_ids": _ids(source, row, i)} for i, row in enumerate(rows, 1)], None
    texts = [_text(source, row, i) for i, row in enumerate(rows, 1)]
    if source.vocabulary:
        return [{"input_ids": text.encode(one, source.vocabulary)[: source.context]} for one in texts], None
    tokenizer = _tokenizer(source)
    options = {"truncation": True, "max_length": source.context, "return_special_tokens_mask": True}
    paired = "text_pair" in rows[0]
    pairs = [_text(source, row, i, "text_pair") for i, row in enumerate(rows, 1)] if paired else None
    encoded = tokenizer(texts, pairs, **options)
    return [{key: encoded[key][i] for key in encoded} for i in range(len(texts))], tokenizer


# --- classification of texts and tokens --------------------------------------------------------------------


def _text_classification(source: Source) -> Iterator[dict[str, Tensor]]:
    rows = _rows(source, "text", "label")
    labels = [_label(source, row, number) for number, row in enumerate(rows, 1)]
    yield from _labelled_texts(source, rows, labels)


def _text_regression(source: Source) -> Iterator[dict[str, Tensor]]:
    if source.config.num_labels != 1:
        raise ValueError(f"text-regression needs a model with one output, and this one has {source.config.num_labels}")
    rows = _rows(source, "text", "label")
    labels = []
    for number, row in enumerate(rows, 1):
        try:
            labels.append(float(row["label"]))
        except (TypeError, ValueError):
            raise ValueError(f"the label {row['label']!r} in row {number} of '{source.data}' is no number") from None
    yield from _labelled_texts(source, rows, labels)


def _labelled_texts(source: Source, rows: list[Row], labels: list[int] | list[float]) -> Iterator[dict[str, Tensor]]:
    tokenizer = _tokenizer(source)
    features = []
    for number, (row, label) in enumerate(zip(rows, labels, strict=True), 1):
        pair = _text(source, row, number, "text_pair") if "text_pair" in row else None
        given = tokenizer(_text(source, row, number), pair, truncation=True, max_length=source.context)
        features.append({**given, "labels": [label]})
    _refuse_tokens(source, features)
    yield from (
        {**one, "labels": one["labels"][:, 0]} for one in padded(features, source.how.batch, source.how.by_length)
    )


def _token_classification(source: Source) -> Iterator[dict[str, Tensor]]:
    _no_split(source)
    rows = read_sentences(source.data, split=source.how.split, limit=source.how.limit, renamed=source.how.columns)
    tokenizer = _tokenizer(source)
    if not tokenizer.is_fast:
        raise ValueError(f"token-classification needs a tokenizer.json, which '{source.model}' lacks")
    features = []
    for number, row in enumerate(rows, 1):
        tags = [_label(source, {"label": tag}, number) for tag in row["tags"]]
        given = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=source.context)
        words = given.word_ids()
        first = [word is not None and word not in words[:i] for i, word in enumerate(words)]
        labels = [tags[word] if first[i] else IGNORED for i, word in enumerate(words)]
        features.append({**given, "labels": labels})
    _refuse_tokens(source, features)
    yield from padded(features, source.how.batch, source.how.by_length)


# --- speech ------------------------------------------------------------------------------------------------


def _speech_recognition(source: Source) -> Iterator[dict[str, Tensor]]:
    rows = _rows(source, "audio", "text")
    tokenizer = _tokenizer(source)
    longest = min(source.context, getattr(source.config, "max_target_positions", None) or source.context)
    given = len(tokenizer("")["input_ids"]) - 1  # tokens before every text; one more stands after it
    sequences = []
    for number, row in enumerate(rows, 1):
        ids = tokenizer(_text(source, row, number))["input_ids"][: longest + 1]
        sequences.append({"input_ids": ids[:-1], "labels": [IGNORED] * (given - 1) + ids[given:]})
    for start, texts in zip(range(0, len(rows), source.how.batch), padded(sequences, source.how.batch), strict=True):
        files = [Path(source.data).parent / row["audio"] for row in rows[start : start + source.how.batch]]
        yield {
            "input_features": speech.features(source.model, files),
            "decoder_input_ids": texts["input_ids"],
            "labels": texts["labels"],
            **({"decoder_attention_mask": texts["attention_mask"]} if "attention_mask" in texts else {}),
        }


# --- what they share ----------------------------------------------------------------------------------


def _refuse_tokens(source: Source, features: list[Features]) -> None:
    """Raise ValueError for an example without tokens, and for tokens that the model does not know."""
    for number, one in enumerate(features, 1):
        if not one["input_ids"]:
            raise ValueError(f"row {number} of '{source.data}' has no tokens that the model's tokenizer knows")
    largest = max(max(one["input_ids"]) for one in features)
    known = source.config.get_text_config(encoder=True).vocab_size
    if largest >= known:
        raise ValueError(f"the data have token id {largest}, but the model's vocabulary has {known}")


def padded(features: list[Features], batch: int, by_length: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield batches of sequences, padded at the right; without an attention mask where all have the same length."""
    fill = {"labels": IGNORED}
    if by_length:
        features = sorted(features, key=lambda one: len(one["input_ids"]))
    for start in range(0, len(features), batch):
        some = features[start : start + batch]
        lengths = {len(one["input_ids"]) for one in some}
        if len(lengths) > 1:
            some = [{"attention_mask": [1] * len(one["input_ids"]), **one} for one in some]
        keys = [key for key in some[0] if key != "special_tokens_mask"]
        whole = {key: zip_longest(*(one[key] for one in some), fillvalue=fill.get(key, 0)) for key in keys}
        yield {key: torch.tensor([*columns]).mT.contiguous() for key, columns in whole.items()}


def _rows(source: Source, *columns: str) -> list[Row]:
    _no_split(source)
    return read_rows(source.data, columns, split=source.how.split, limit=source.how.limit, renamed=source.how.columns)


def _no_split(source: Source) -> None:
    if source.data.startswith("builtin:"):
        raise ValueError(
            f"'{source.data}' does not fit this task; builtin:digits is for image-classification, "
            "builtin:stdlib for causal-lm and masked-lm"
        )
    if source.how.split not in (None, "all") and kind(source.data) in ("txt", "jsonl", "csv"):
        raise ValueError(f"'{source.data}' is taken whole; give the file of the split '{source.how.split}' instead")


def _text(source: Source, row: Row, number: int, column: str = "text") -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"row {number} of '{source.data}' has no text in the column '{column}'")
    return value


def _ids(source: Source, row: Row, number: int) -> list[int]:
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f"row {number} of '{source.data}' has no list of token ids in the column 'input_ids'")
    return ids[: source.context]


def _label(source: Source, row: Row, number: int) -> int:
    """Return the model's class id of a label, which is given by name or number."""
    label, known = row["label"], {name: index for index, name in source.config.id2label.items()}
    if isinstance(label, Class):  # by name if the model knows that name, else by number
        label = label.name if label.name in known else label.number
    if label in known:
        return int(known[label])
    number_given = type(label) is int or (isinstance(label, str) and label.isdecimal())
    if number_given and 0 <= int(label) < source.config.num_labels:
        return int(label)
    names = ", ".join(map(str, list(known)[:10])) + (", ..." if len(known) > 10 else "")
    raise ValueError(f"unknown label {label!r} in row {number} of '{source.data}'; the model knows {names}")


def _tokenizer(source: Source) -> Any:
    if not any((source.model / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"'{source.model}' has no tokenizer; give a vocabulary, character -> id, for a language model")
    with quietly():
        return AutoTokenizer.from_pretrained(source.model, config=source.config)


BATCHES = {
    "image-classification": _images,
    "causal-lm": _causal_lm,
    "masked-lm": _masked_lm,
    "text-classification": _text_classification,
    "text-regression": _text_regression,
    "token-classification": _token_classification,
    "speech-recognition": _speech_recognition,
}
