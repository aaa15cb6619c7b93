# SPDX-License-Identifier: Apache-2.0
"""Speech: recordings as inputs of a recogniser."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Samples = NDArray[np.float32]


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
