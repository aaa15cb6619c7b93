# SPDX-License-Identifier: Apache-2.0
"""Tasks: a dataset becomes batches of a model's inputs, and batches give a mean loss, an accuracy and other metrics."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from onebasin.checkpoint import Checkpoint
from onebasin.engine import Tell

from . import metrics, speech, text
from .digits import digits
from .files import kind, read_rows, read_sentences, read_text
from .tables import Class, Row

TASKS = {  # task -> the class of transformers that loads a model for it
    "image-classification": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "text-regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "speech-recognition": "AutoModelForSpeechSeq2Seq",
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


@dataclass(frozen=True)
class Scores:
    """loss: mean over all labels that count, of the cross-entropy in nats, or of the squared error (regression).
    accuracy: share of the labels predicted; NaN for regression.

    metrics: further ones by name, also as attributes: macro_f1, micro_f1, matthews (classification), entity_f1 (tags
    such as B-PER), pearson, spearman (regression), perplexity (language models).
    """

    loss: float
    accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        """Raises ValueError for a metric that the task lacks, or whose library is not installed."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.metrics:
            known = ", ".join(["loss", "accuracy", *self.metrics])
            hint = f"; it needs the package {metrics.NEEDS[name]}" if name in metrics.NEEDS else ""
            raise ValueError(f"these examples have no metric '{name}'{hint}; they have {known}")
        return self.metrics[name]


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
    columns: Mapping[str, str] = field(default_factory=dict)
    by_length: bool = False


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
    columns: Mapping[str, str] | None = None,
    by_length: bool = False,
) -> Task:
    """The examples of `data` in batches, for models with `model`'s tokenizer, labels and image processor.

    data: `builtin:digits`, `builtin:stdlib`; a file in .txt, .jsonl, .csv (also .gz) or .parquet; a folder with one
    subfolder of images for every class; a folder of the `datasets` library; or a dataset of the hub, owner/name or
    owner/name:configuration.
      image-classification  builtin:digits; rows with `image` (a path beside the file) and `label`
      causal-lm, masked-lm  builtin:stdlib or a .txt, cut into consecutive sequences of `context` tokens
                            without special tokens; rows with `text` or ready `input_ids`, one sequence each
      text-classification   rows with `text`, perhaps `text_pair`, and `label`; text-regression: a number as `label`
      token-classification  rows with lists `tokens` and `tags`, or a .txt in CoNLL columns; of each word the
                            first token counts
      speech-recognition    rows with `audio` (a WAV file beside the file) and `text`; what the tokenizer puts
                            before every text is given, the tokens of the text and its end count
    split: digits have train, test (default), all; running text has train, validation (default), all; datasets have
    their own (default: the only one, else test, else validation); files are taken whole. limit: only the first so many
    examples. batch: examples in a batch. context: longest sequence in tokens (default: what the model takes, at most
    512).
    vocabulary: character -> id, or its JSON file, instead of the model's tokenizer.
    mask_id, maskable, mask_share, seed (masked-lm): in each sequence this share of the tokens whose id is in
    `maskable` (default: all but special tokens), and at least one, is replaced by `mask_id` (default: the
    tokenizer's) and must be predicted. Which ones depends on `seed` and the order of the sequences alone.
    columns: our name of a column -> its name in the data, such as {"text": "sentence"}. by_length: examples of like
    length share a batch, which saves padding but changes their order.
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
        columns or {},
        by_length,
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
def evaluate(model: PreTrainedModel, task: Task, tell: Tell | None = None) -> Scores:
    """Loss, accuracy and the task's other metrics of `model`, in eval mode, over all batches, on the model's device.

    The loss is the mean over labels, not over batches, so it does not depend on the batch size. A causal
    model predicts each token but the first from those before it.
    Raises ValueError where no label counts.
    """
    model.train(False)
    loss, right, count = 0.0, 0, 0
    answers: list[tuple[list[Any], list[Any]]] = []  # of every row: predicted, right
    keeps = task.name.endswith(("-classification", "-regression"))
    for number, batch in enumerate(task.batches, 1):
        if tell:
            tell(f"evaluating: batch {number} of {len(task.batches)}")
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        logits = model(**inputs, output_attentions=False, output_hidden_states=False).logits.float()
        if task.name == "text-regression":
            guesses = logits.reshape(labels.shape)
            loss += float(mse_loss(guesses, labels.to(guesses), reduction="sum"))
        else:
            if task.name == "causal-lm":
                logits, labels = logits[:, :-1], labels[:, 1:]
            guesses = logits.argmax(-1)
            flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
            loss += float(cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"))
            right += int((guesses == labels).sum())
        counts = labels != IGNORED
        count += int(counts.sum())
        if keeps:
            rows = zip(guesses, labels, counts, strict=True)
            answers += [(guess[kept].tolist(), label[kept].tolist()) for guess, label, kept in rows]
    if not count:
        raise ValueError("the data leave nothing to predict")
    accuracy = float("nan") if task.name == "text-regression" else right / count
    return Scores(loss / count, accuracy, _metrics(model, task.name, loss / count, answers))


def _metrics(
    model: PreTrainedModel, task: str, loss: float, answers: list[tuple[list[Any], list[Any]]]
) -> dict[str, float]:
    if task.endswith("-lm"):
        return {"perplexity": metrics.perplexity(loss)}
    predicted, right = ([value for row in answers for value in _listed(row[side])] for side in (0, 1))
    if task == "text-regression":
        return metrics.of_numbers(predicted, right)
    if not task.endswith("-classification"):
        return {}
    found = metrics.of_classes(predicted, right)
    if task == "token-classification":
        names = model.config.id2label or {}
        tags = ([[str(names.get(value, value)) for value in row[side]] for row in answers] for side in (0, 1))
        found |= metrics.of_entities(*tags)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
    """Of images as paths beside the data, as the bytes of a file, or decoded."""
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
    with quiet():
        processor = AutoImageProcessor.from_pretrained(source.model)  # type: ignore[no-untyped-call]
    pixels: Tensor = processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels


# --- language models ---------------------------------------------------------------------------------------


def _causal_lm(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    features, _ = _token_sequences(source)
    yield from _padded([{**one, "labels": one["input_ids"]} for one in features], batch, source.by_length)


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
    yield from _padded(masked, batch, source.by_length)


def _token_sequences(source: Source) -> tuple[list[Features], int | None]:
    """Token sequences, and the id of the mask token where one is known."""
    if source.data == "builtin:stdlib" or kind(source.data) == "txt":
        features, tokenizer = _running_text(source)
    else:
        features, tokenizer = _row_texts(source)
    _refuse_tokens(source, features)
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
    paired = "text_pair" in rows[0]
    pairs = [_text(source, row, i, "text_pair") for i, row in enumerate(rows, 1)] if paired else None
    encoded = tokenizer(texts, pairs, **options)
    return [{key: encoded[key][i] for key in encoded} for i in range(len(texts))], tokenizer


# --- classification of texts and tokens --------------------------------------------------------------------


def _text_classification(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    rows = _rows(source, "text", "label")
    labels = [_label(source, row, number) for number, row in enumerate(rows, 1)]
    yield from _labelled_texts(source, rows, labels, batch)


def _text_regression(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    if source.config.num_labels != 1:
        raise ValueError(f"text-regression needs a model with one output, and this has {source.config.num_labels}")
    rows = _rows(source, "text", "label")
    labels = []
    for number, row in enumerate(rows, 1):
        try:
            labels.append(float(row["label"]))
        except (TypeError, ValueError):
            raise ValueError(f"the label {row['label']!r} in row {number} of '{source.data}' is no number") from None
    yield from _labelled_texts(source, rows, labels, batch)


def _labelled_texts(
    source: Source, rows: list[Row], labels: list[int] | list[float], batch: int
) -> Iterator[dict[str, Tensor]]:
    tokenizer = _tokenizer(source)
    features = []
    for number, (row, label) in enumerate(zip(rows, labels, strict=True), 1):
        pair = _text(source, row, number, "text_pair") if "text_pair" in row else None
        given = tokenizer(_text(source, row, number), pair, truncation=True, max_length=source.context)
        features.append({**given, "labels": [label]})
    _refuse_tokens(source, features)
    yield from ({**one, "labels": one["labels"][:, 0]} for one in _padded(features, batch, source.by_length))


def _token_classification(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    _no_split(source)
    rows = read_sentences(source.data, split=source.split, limit=source.limit, renamed=source.columns)
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
    yield from _padded(features, batch, source.by_length)


# --- speech ------------------------------------------------------------------------------------------------


def _speech_recognition(source: Source, batch: int) -> Iterator[dict[str, Tensor]]:
    rows = _rows(source, "audio", "text")
    tokenizer = _tokenizer(source)
    longest = min(source.context, getattr(source.config, "max_target_positions", None) or source.context)
    given = len(tokenizer("")["input_ids"]) - 1  # tokens before every text; one more stands after it
    sequences = []
    for number, row in enumerate(rows, 1):
        ids = tokenizer(_text(source, row, number))["input_ids"][: longest + 1]
        sequences.append({"input_ids": ids[:-1], "labels": [IGNORED] * (given - 1) + ids[given:]})
    for start, padded in zip(range(0, len(rows), batch), _padded(sequences, batch), strict=True):
        files = [Path(source.data).parent / row["audio"] for row in rows[start : start + batch]]
        yield {
            "input_features": speech.features(source.model, files),
            "decoder_input_ids": padded["input_ids"],
            "labels": padded["labels"],
            **({"decoder_attention_mask": padded["attention_mask"]} if "attention_mask" in padded else {}),
        }


# --- what the tasks share ----------------------------------------------------------------------------------


def _refuse_tokens(source: Source, features: list[Features]) -> None:
    """Raises ValueError for an example without tokens, and for tokens that the model does not know."""
    for number, one in enumerate(features, 1):
        if not one["input_ids"]:
            raise ValueError(f"row {number} of '{source.data}' has no tokens that the model's tokenizer knows")
    largest, known = max(max(one["input_ids"]) for one in features), source.config.vocab_size
    if largest >= known:
        raise ValueError(f"the data have token id {largest}, but the model's vocabulary has {known}")


def _padded(features: list[Features], batch: int, by_length: bool = False) -> Iterator[dict[str, Tensor]]:
    """Sequences of one batch filled up at the right; without an attention mask where all have one length."""
    fill = {"labels": IGNORED}
    if by_length:
        features = sorted(features, key=lambda one: len(one["input_ids"]))
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
    return read_rows(source.data, columns, split=source.split, limit=source.limit, renamed=source.columns)


def _no_split(source: Source) -> None:
    if source.data.startswith("builtin:"):
        raise ValueError(
            f"'{source.data}' does not fit this task; builtin:digits is for image-classification, "
            "builtin:stdlib for causal-lm and masked-lm"
        )
    if source.split not in (None, "all") and kind(source.data) in ("txt", "jsonl", "csv"):
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
    if isinstance(label, Class):  # by its name where the model knows it, else by its number
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
    "text-regression": _text_regression,
    "token-classification": _token_classification,
    "speech-recognition": _speech_recognition,
}
