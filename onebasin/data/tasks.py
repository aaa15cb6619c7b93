# SPDX-License-Identifier: Apache-2.0
"""Tasks: a dataset turned into batches of a model's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from onebasin.settings import ExampleKeywords, Examples, refuse_choice

from .batches import BATCHES, Source
from .models import TASKS, configured

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Task:
    """name: a key of TASKS. batches: a model's inputs, and `labels` (batch,) or (batch, tokens), or -100."""

    name: str
    batches: tuple[dict[str, Tensor], ...]


def load_task(name: str, data: str | Path, model: str | Path, **how: Unpack[ExampleKeywords]) -> Task:
    """Return the examples of `data` in batches, for models with `model`'s tokenizer, labels and image processor.

      image-classification  builtin:digits; rows with `image` (a path beside the file) and `label`
      causal-lm, masked-lm  builtin:stdlib or a .txt, cut into consecutive sequences of `context` tokens
                            without special tokens; rows with `text` or ready `input_ids`, one sequence each
      text-classification   rows with `text`, perhaps `text_pair`, and `label`; text-regression: a number as `label`
      token-classification  rows with lists `tokens` and `tags`, or a .txt in CoNLL columns; of each word the
                            first token counts
      speech-recognition    rows with `audio` (a WAV file beside the file) and `text`; what the tokenizer puts
                            before every text is given, the tokens of the text and its end count

    For masked-lm, the share `mask_share` of the maskable tokens of each sequence, at least one, is replaced by
    `mask_id` and must be predicted. Which tokens depends only on `seed` and the order of the sequences.

    Args:
        name: Of the task, one of the above.
        data: `builtin:digits`, `builtin:stdlib`; a file in .txt, .jsonl, .csv (also .gz) or .parquet; a folder with one
            subfolder of images for every class; a folder of the `datasets` library; or a dataset of the hub, owner/name
            or owner/name:configuration.
        model: The folder of the model.
        how: The fields of `Examples`. Digits have the splits train, test (default), all; running text has train,
            validation (default), all; datasets have their own (default: the only one, else test, else validation);
            files are taken whole. A vocabulary replaces the model's tokenizer.

    Raises:
        ValueError: The dataset cannot be read, or does not fit the model.
    """
    return Task(name, load_batches(name, str(data), model, Examples.of(how)))


def load_batches(name: str, data: str, model: str | Path, how: Examples) -> tuple[dict[str, Tensor], ...]:
    """Return the batches of `load_task`."""
    refuse_choice("task", name, TASKS)
    return tuple(BATCHES[name](Source(data, *configured(model), how)))
