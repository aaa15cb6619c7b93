# SPDX-License-Identifier: Apache-2.0
"""The transcripts of a speech recogniser, and their word error rate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

LONGEST = 64  # tokens of a transcript


@torch.inference_mode()
def transcribe(model: PreTrainedModel, heard: Tensor, prompt: Sequence[int], end: int) -> Iterator[list[int]]:
    """Yield the token ids of a greedy transcript of every recording, without the prompt and the end.

    Args:
        model: A speech recogniser.
        heard: Recordings, (recordings, bins, frames).
        prompt: Token ids that every text begins with.
        end: The token id that ends a text.
    """
    longest = min(LONGEST, model.config.max_target_positions - len(prompt))
    for one in torch.split(heard, 1):
        encoded = model.get_encoder()(one.to(model.device))
        written, cache, given = list[int](), None, list(prompt)
        while len(written) < longest:
            ids = torch.tensor([given], device=model.device)
            output = model(encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
            cache, given = output.past_key_values, [int(output.logits[0, -1].argmax())]
            if given[0] == end:
                break
            written += given
        yield written


def word_error_rate(said: Sequence[str], heard: Sequence[str]) -> float:
    """Return the words to insert, delete or replace, divided by the words said; case and punctuation are ignored.

    It may exceed 1 if more words are heard than said. Raises ValueError if no words are said, or for unequal lengths.
    """
    pairs = [(_words(one), _words(other)) for one, other in zip(said, heard, strict=True)]
    total = sum(len(one) for one, _ in pairs)
    if not total:
        raise ValueError("the texts hold no words")
    return sum(_edits(one, other) for one, other in pairs) / total


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower().replace("’", "'"))


def _edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]
