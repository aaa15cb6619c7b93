# SPDX-License-Identifier: Apache-2.0
"""The digits: a fixed split without overlap, pixels as stated, and clear sentences."""

import numpy as np
import pytest
import torch

from onebasin.data import digits


def test_splits_are_disjoint_and_complete() -> None:
    whole = {tuple(image.flatten().tolist()) for image in digits("all")[0]}
    parts = [[tuple(image.flatten().tolist()) for image in digits(split)[0]] for split in ("train", "test")]
    assert [len(part) for part in parts] == [1400, 397]
    assert not set(parts[0]) & set(parts[1])
    assert set(parts[0]) | set(parts[1]) == whole


def test_pixels_and_labels_are_scikit_learns() -> None:
    """In its order, too: the split is by place."""
    stored = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.RandomState(0).permutation(len(stored.target))
    pixels, labels = digits("all")
    assert pixels.shape == (1797, 1, 8, 8) and pixels.min() == -1 and pixels.max() == 1
    assert torch.equal(((pixels + 1) * 8).double()[order.argsort()][:, 0], torch.tensor(stored.images))
    assert labels[order.argsort()].tolist() == stored.target.tolist()


def test_the_split_is_fixed() -> None:
    torch.manual_seed(1)
    first = digits("test")
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, digits("test"), strict=True))


def test_every_class_is_in_both_splits() -> None:
    for split in ("train", "test"):
        assert digits(split)[1].unique().tolist() == list(range(10))


def test_bad_split() -> None:
    with pytest.raises(ValueError, match="no split 'validation'; choose from train, test, all"):
        digits("validation")
