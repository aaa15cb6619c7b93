# SPDX-License-Identifier: Apache-2.0
"""Speech: recordings as inputs of a recogniser, its transcripts, and their word error rate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Samples = NDArray[np.float32]
LONGEST = 64  # tokens of a transcript


def recording(file: str | Path, rate: int) -> Samples:
    """Return a WAV file as samples in [-1, 1], `rate` per second, averaged over its channels. Raises ValueError."""
    from scipy.io import wavfile  # slow to load, and nothing else needs it

    try:
        own, samples = wavfile.read(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the recording '{file}' (a WAV file is needed): {error}") from None
    if not len(samples):
        raise ValueError(f"the recording '{file}' is empty")
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.float32) - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if samples.ndim == 2:
        samples = samples.mean(1)
    from scipy.signal import resample_poly  # slow to load, and nothing else needs it

    common = gcd(own, rate)
    return resample_poly(samples, rate // common, own // common).astype(np.float32)


def features(folder: Path, files: Sequence[Path]) -> Tensor:
    """Return the inputs of the speech model in `folder`: (recordings, bins, frames). Longer recordings are cut."""
    if not (folder / "preprocessor_config.json").is_file():
        raise ValueError(f"'{folder}' has no preprocessor_config.json, which recordings need")
    from transformers import AutoFeatureExtractor  # slow to load, as it brings all that runs models

    extractor: Any = AutoFeatureExtractor.from_pretrained(folder)  # type: ignore[no-untyped-call]
    rate = extractor.sampling_rate
    heard: Tensor = extractor([recording(file, rate) for file in files], sampling_rate=rate, return_tensors="pt")[
        "input_features"
    ]
    return heard


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
