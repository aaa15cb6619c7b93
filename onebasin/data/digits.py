# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits that ship inside scikit-learn: 1,797 images of 8 x 8 pixels, 10 classes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "test", "all")
TRAIN_IMAGES = 1400  # the other 397 are the test images


def digits(split: str = "test") -> tuple[Tensor, Tensor]:
    """Pixels (images, 1, 8, 8), float32 in [-1, 1] (stored value 0..16, / 8 - 1), and labels (images,).

    The split is fixed: a random order from NumPy's frozen seed-0 stream; its first 1,400 are for training.
    Raises ValueError for an unknown split, and where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("builtin:digits needs scikit-learn: pip install 'onebasin[demo]'") from None
    if split not in SPLITS:
        raise ValueError(f"builtin:digits has no split '{split}'; choose from {', '.join(SPLITS)}")
    stored = load_digits()
    order = np.random.RandomState(0).permutation(len(stored.target))  # the files are ordered by writer
    chosen = {"train": order[:TRAIN_IMAGES], "test": order[TRAIN_IMAGES:], "all": order}[split]
    pixels = torch.tensor(stored.images[chosen], dtype=torch.float32).unsqueeze(1) / 8 - 1
    return pixels, torch.tensor(stored.target[chosen])
