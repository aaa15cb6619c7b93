# SPDX-License-Identifier: Apache-2.0
"""Tasks: a dataset becomes batches of a model's inputs, and batches give a mean loss and an accuracy."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from onebasin.checkpoint import Checkpoint

from . import text
from .digits import digits
from .files import Row, kind, read_rows, read_sentences, read_text

TASKS = {  # task -> the class of transformers that loads a model for it
    "image-classification": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
IGNORED = -100  # the label of a position that does not count
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
class Task:
    """name: a key of TASKS. batches: a model's inputs, and `labels` (batch,) or (batch, tokens), or -100."""

    name: str
    batches: tuple[dict[str, Tensor], ...]


class Scores(NamedTuple):
    """loss: mean cross-entropy in nats over all labels that count. accuracy: share of these predicted."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Source:
    """Where the examples come from and how they are cut; the fields are `load_task`'s arguments."""

    data: str
    model: Path
    config: Any
    split: str | None
    limit: int | None
    context: int
    vocabulary: dict[str, int] | None
    mask_id: int | None
    maskable: Collection[int] | None
    mask_share: float
    seed: int


# --- the public functions ----------------------------------------------------------------------------------


def load_task(
    name: str,
    data: str | Path,
    model: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    batch: int = 64,
    context: int | None = None,
    vocabulary: str | Path | dict[str, int] | None = None,
    mask_id: int | None = None,
    maskable: Collection[int] | None = None,
    mask_share: float = 0.15,
    seed: int = 0,
) -> Task:
    """The examples of `data` in batches, for models with `model`'s tokenizer, labels and image processor.

    data: `builtin:digits`, `builtin:stdlib` or a file.
      image-classification  builtin:digits; rows with `image` (a path beside the file) and `label`
      causal-lm, masked-lm  builtin:stdlib or a .txt, cut into consecutive sequences of `context` tokens
                            without special tokens; rows with `text` or ready `input_ids`, one sequence each
      text-classification   rows with `text`, perhaps `text_pair`, and `label`
      token-classification  rows with lists `tokens` and `tags`, or a .txt in CoNLL columns; of each word the
                            first token counts
    split: digits have train, test (default), all; running text has train, validation (default), all; row
    files are taken whole. limit: only the first so many examples. batch: examples in a batch.
    context: longest sequence in tokens (default: what the model takes, at most 512).
    vocabulary: character -> id, or its JSON file, instead of the model's tokenizer.
    mask_id, maskable, mask_share, seed (masked-lm): in each sequence this share of the tokens whose id is in
    `maskable` (default: all but special tokens), and at least one, is replaced by `mask_id` (default: the
    tokenizer's) and must be predicted. Which ones depends on `seed` and the order of the sequences alone.
    Raises ValueError in one sentence for a dataset that cannot be read or does not fit the model.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}'; choose from {', '.join(TASKS)}")
    for option, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    if not 0 < mask_share <= 1:
        raise ValueError(f"mask_share must lie in (0, 1], not {mask_share}")
    folder, config = _open(model)
    if vocabulary is not None and not isinstance(vocabulary, dict):
        vocabulary = text.read_vocabulary(vocabulary)
    longest = min(getattr(config, "max_position_embeddings", None) or 512, 512)
    source = Source(
        str(data),
        folder,
        config,
        split,
        limit,
        context or longest,
        vocabulary,
        mask_id,
        maskable,
        mask_share,
        seed,
    )
    return Task(name, tuple(_BATCHES[name](source, batch)))


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the loading reports and progress bars of transformers, which onebasin replaces by its own."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(model: str | Path, task: str) -> PreTrainedModel:
    """The model of a folder with the head of `task`, in float32, for evaluation.

    Raises ValueError where the folder cannot be loaded so, or lacks a tensor, which would be left at random.
    """
    folder, config = _open(model)
    auto = getattr(transformers, TASKS[task])
    if type(config) not in auto._model_mapping:
        raise ValueError(f"'{model}' is a {config.model_type} model, for which there is no {task}")
    try:
        with quiet():
            loaded, info = auto.from_pretrained(folder, config=config, output_loading_info=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load '{model}' for {task}: {str(error).strip().splitlines()[0]}") from None
    if info["missing_keys"]:
        raise ValueError(f"'{model}' has no tensor '{min(info['missing_keys'])}', which {task} needs")
    result: PreTrainedModel = loaded.float().eval()
    return result


@torch.inference_mode()
def evaluate(model: PreTrainedModel, task: Task) -> Scores:
    """Loss and accuracy of `model`, in eval mode, over all batches.

    The loss is the mean over labels, not over batches, so it does not depend on the batch size. A causal
    model predicts each token but the first from those before it.
    Raises ValueError where no label counts.
    """
    model.train(False)
    loss, right, count = 0.0, 0, 0
    for batch in task.batches:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        logits = model(**inputs, output_attentions=False, output_hidden_states=False).logits.float()
        if task.name == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        loss += float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        count += int((labels != IGNORED).sum())
    if not count:
        raise ValueError("the data leave nothing to predict")
    return Scores(loss / count, right / count)


# --- images ------------------------------------------------------------------------------------------------


def _images(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    if source.data == "builtin:digits":
        pixels, labels = digits(source.split or "test")
        pixels, labels = pixels[: source.limit], labels[: source.limit]
        if source.config.num_labels < 10:
            raise ValueError(f"builtin:digits has 10 classes, but the model has {source.config.num_labels}")
    else:
        rows = _rows(source, "image", "label")
        pixels, labels = (
            _pixels(source, rows),
            torch.tensor([_label(source, row, i) for i, row in enumerate(rows, 1)]),
        )
    for start in range(0, len(labels), batch):
        yield {"pixel_values": pixels[start : start + batch], "labels": labels[start : start + batch]}


def _pixels(source: Source, rows: list[Row]) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("image files need Pillow: pip install 'onebasin[plot]'") from None
    mode = "L" if getattr(source.config, "num_channels", 3) == 1 else "RGB"
    images = []
    for number, row in enumerate(rows, 1):
        try:
            with Image.open(Path(source.data).parent / row["image"]) as image:
                images.append(image.convert(mode))
        except OSError as error:
            raise ValueError(f"row {number} of '{source.data}': cannot read '{row['image']}': {error}") from None
    if not (source.model / "preprocessor_config.json").is_file():
        raise ValueError(f"'{source.model}' has no preprocessor_config.json, which image files need")
    with quiet():
        processor = AutoImageProcessor.from_pretrained(source.model)  # type: ignore[no-untyped-call]
    pixels: Tensor = processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels


# --- language models ---------------------------------------------------------------------------------------


def _causal_lm(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    features, _ = _token_sequences(source)
    yield from _padded([{**one, "labels": one["input_ids"]} for one in features], batch)


def _masked_lm(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    features, mask_id = _token_sequences(source)
    if mask_id is None:
        raise ValueError("masked-lm needs the id of the mask token, since the model's tokenizer names none")
    generator = torch.Generator().manual_seed(source.seed)
    allowed = None if source.maskable is None else set(source.maskable)
    masked = []
    for one in features:
        ids = one["input_ids"]
        special = one.pop("special_tokens_mask", [0] * len(ids))
        free = [i for i, id_ in enumerate(ids) if not special[i] and (allowed is None or id_ in allowed)]
        number = min(len(free), max(1, round(source.mask_share * len(free))))
        chosen = {free[i] for i in torch.randperm(len(free), generator=generator)[:number].tolist()}
        inputs = [mask_id if i in chosen else id_ for i, id_ in enumerate(ids)]
        labels = [id_ if i in chosen else IGNORED for i, id_ in enumerate(ids)]
        masked.append({**one, "input_ids": inputs, "labels": labels})
    yield from _padded(masked, batch)


def _token_sequences(source: Source) -> tuple[list[Features], int | None]:
    """Token sequences, and the id of the mask token where one is known."""
    if source.data == "builtin:stdlib" or kind(source.data) == "txt":
        features, tokenizer = _running_text(source)
    else:
        features, tokenizer = _row_texts(source)
    largest, known = max(max(one["input_ids"]) for one in features), source.config.vocab_size
    if largest >= known:
        raise ValueError(f"the data have token id {largest}, but the model's vocabulary has {known}")
    own_mask = getattr(tokenizer, "mask_token_id", None)
    return features, own_mask if source.mask_id is None else source.mask_id


def _running_text(source: Source) -> tuple[list[Features], Any]:
    """Sequences of exactly `context` tokens, and the tokenizer where one was used."""
    vocabulary, tokenizer = source.vocabulary, None
    if source.data == "builtin:stdlib":
        whole = text.stdlib_text()
        vocabulary = vocabulary or text.character_vocabulary(whole)
    else:
        whole = read_text(source.data)
    piece = text.part(whole, source.split or "validation")
    if vocabulary:
        needed = None if source.limit is None else source.limit * source.context  # one token a character
        ids = text.encode(piece[:needed], vocabulary)
    else:
        tokenizer = _tokenizer(source)
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
    return [{"input_ids": one} for one in text.sequences(ids, source.context)[: source.limit]], tokenizer


def _row_texts(source: Source) -> tuple[list[Features], Any]:
    """One sequence of at most `context` tokens per row, and the tokenizer where one was used."""
    rows = _rows(source)
    if "input_ids" in rows[0]:
        return [{"input_ids": _ids(source, row, i)} for i, row in enumerate(rows, 1)], None
    texts = [_text(source, row, i) for i, row in enumerate(rows, 1)]
    if source.vocabulary:
        return [{"input_ids": text.encode(one, source.vocabulary)[: source.context]} for one in texts], None
    tokenizer = _tokenizer(source)
    options = {"truncation": True, "max_length": source.context, "return_special_tokens_mask": True}
    encoded = tokenizer(texts, **options)
    return [{key: encoded[key][i] for key in encoded} for i in range(len(texts))], tokenizer


# --- classification of texts and tokens --------------------------------------------------------------------


def _text_classification(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    rows = _rows(source, "text", "label")
    tokenizer = _tokenizer(source)
    features = []
    for number, row in enumerate(rows, 1):
        pair = _text(source, row, number, "text_pair") if "text_pair" in row else None
        given = tokenizer(_text(source, row, number), pair, truncation=True, max_length=source.context)
        features.append({**given, "labels": [_label(source, row, number)]})
    yield from ({**one, "labels": one["labels"][:, 0]} for one in _padded(features, batch))


def _token_classification(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    _no_split(source)
    rows = read_sentences(source.data)[: source.limit]
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
    yield from _padded(features, batch)


# --- what the tasks share ----------------------------------------------------------------------------------


def _padded(features: list[Features], batch: int) -> Iterator[dict[str, Tensor]]:
    """Sequences of one batch filled up at the right; without an attention mask where all have one length."""
    fill = {"labels": IGNORED}
    for start in range(0, len(features), batch):
        some = features[start : start + batch]
        lengths = {len(one["input_ids"]) for one in some}
        if len(lengths) > 1:
            some = [{"attention_mask": [1] * len(one["input_ids"]), **one} for one in some]
        yield {
            key: torch.tensor([one[key] + [fill.get(key, 0)] * (_width(some, key) - len(one[key])) for one in some])
            for key in some[0]
            if key != "special_tokens_mask"
        }


def _width(features: list[Features], key: str) -> int:
    return max(len(one[key]) for one in features)


def _rows(source: Source, *columns: str) -> list[Row]:
    _no_split(source)
    return read_rows(source.data, columns)[: source.limit]


def _no_split(source: Source) -> None:
    if source.data.startswith("builtin:"):
        raise ValueError(
            f"'{source.data}' does not fit this task; builtin:digits is for image-classification, "
            "builtin:stdlib for causal-lm and masked-lm"
        )
    if source.split not in (None, "all"):
        raise ValueError(f"'{source.data}' is taken whole; give the file of the split '{source.split}' instead")


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
    """The model's class id of a label, given by its name or its number."""
    label, known = row["label"], {name: index for index, name in source.config.id2label.items()}
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
    with quiet():
        return AutoTokenizer.from_pretrained(source.model)


def _open(model: str | Path) -> tuple[Path, Any]:
    """A model's folder and its configuration."""
    checkpoint = Checkpoint(model)
    family = checkpoint.raw_config["model_type"]  # says clearly what is wrong with a damaged config.json
    try:
        return checkpoint.folder, AutoConfig.from_pretrained(checkpoint.folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"transformers cannot configure '{model}' (model type {family}): {reason}") from None


_BATCHES = {
    "image-classification": _images,
    "causal-lm": _causal_lm,
    "masked-lm": _masked_lm,
    "text-classification": _text_classification,
    "token-classification": _token_classification,
}
