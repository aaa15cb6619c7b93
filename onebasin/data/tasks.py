# SPDX-License-Identifier: Apache-2.0
"""Tasks: a dataset becomes batches of a model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from onebasin.settings import Count, Indices, checked

from . import text
from .batches import BATCHES, Source
from .models import TASKS, configured


@dataclass(frozen=True)
class Task:
    """name: a key of TASKS. batches: a model's inputs, and `labels` (batch,) or (batch, tokens), or -100."""

    name: str
    batches: tuple[dict[str, Tensor], ...]


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
    """Return the examples of `data` in batches, for models with `model`'s tokenizer, labels and image processor.

      image-classification  builtin:digits; rows with `image` (a path beside the file) and `label`
      causal-lm, masked-lm  builtin:stdlib or a .txt, cut into consecutive sequences of `context` tokens
                            without special tokens; rows with `text` or ready `input_ids`, one sequence each
      text-classification   rows with `text`, perhaps `text_pair`, and `label`; text-regression: a number as `label`
      token-classification  rows with lists `tokens` and `tags`, or a .txt in CoNLL columns; of each word the
                            first token counts
      speech-recognition    rows with `audio` (a WAV file beside the file) and `text`; what the tokenizer puts
                            before every text is given, the tokens of the text and its end count

    For masked-lm, in each sequence this share of the maskable tokens, and at least one, is replaced by `mask_id` and
    must be predicted. Which ones depends on `seed` and the order of the sequences alone.

    Args:
        name: Of the task, one of the above.
        data: `builtin:digits`, `builtin:stdlib`; a file in .txt, .jsonl, .csv (also .gz) or .parquet; a folder with one
            subfolder of images for every class; a folder of the `datasets` library; or a dataset of the hub, owner/name
            or owner/name:configuration.
        model: The folder of the model.
        split: Digits have train, test (default), all; running text has train, validation (default), all; datasets have
            their own (default: the only one, else test, else validation); files are taken whole.
        limit: Only this many examples, from the first on.
        batch: Examples in a batch.
        context: The longest sequence in tokens (default: what the model takes, at most 512).
        vocabulary: Character -> id, or its JSON file, instead of the model's tokenizer.
        mask_id: The id of the mask (default: the tokenizer's).
        maskable: Ids of the tokens that may be masked (default: all but special tokens).
        mask_share: The share of them that is masked.
        seed: Of the choice of masked tokens.
        columns: Our name of a column -> its name in the data, such as {"text": "sentence"}.
        by_length: Examples of like length share a batch, which saves padding but changes their order.

    Raises:
        ValueError: The dataset cannot be read, or does not fit the model.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}'; choose from {', '.join(TASKS)}")
    batch = checked(Count, "batch", batch)
    folder, config = configured(model)
    if vocabulary is not None and not isinstance(vocabulary, dict):
        vocabulary = text.read_vocabulary(vocabulary)
    longest = min(getattr(config, "max_position_embeddings", None) or 512, 512)
    source = Source(
        str(data),
        folder,
        config,
        split,
        limit,
        longest if context is None else context,
        vocabulary,
        mask_id,
        checked(Indices | None, "maskable", maskable),
        mask_share,
        seed,
        columns or {},
        by_length,
    )
    return Task(name, tuple(BATCHES[name](source, batch)))
