# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits: 1,797 images of 8 x 8 pixels, 10 classes, in digits.npz beside this file.

They are the test images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine
Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0), in the order in which scikit-learn has them.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from onebasin.settings import choose_from

SPLITS = ("train", "test", "all")
TRAIN_IMAGES = 1400  # the other 397 are the test images


def digits(split: str = "test") -> tuple[Tensor, Tensor]:
    """Return pixels (images, 1, 8, 8), float32 in [-1, 1] (stored value 0..16, / 8 - 1), and labels (images,).

    The split is fixed: a random order from NumPy's frozen seed-0 stream; its first 1,400 are for training.
    Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"builtin:digits has no split '{split}'; {choose_from(split, SPLITS)}")
    with (files(__package__) / "digits.npz").open("rb") as file, np.load(file) as stored:
        images, targets = stored["pixels"], stored["labels"]
    order = np.random.RandomState(0).permutation(len(targets))  # the files are ordered by writer
    chosen = {"train": order[:TRAIN_IMAGES], "test": order[TRAIN_IMAGES:], "all": order}[split]
    pixels = torch.tensor(images[chosen], dtype=torch.float32).unsqueeze(1) / 8 - 1
    return pixels, torch.tensor(targets[chosen], dtype=torch.int64)
