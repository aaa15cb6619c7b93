# SPDX-License-Identifier: Apache-2.0
"""The work of matching, counted from shapes alone, against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import TEXT, build, save

from onebasin.checkpoint import Checkpoint
from onebasin.matching.cost import SWEEPS, Work, seconds, work
from onebasin.symmetry import acting_groups


def counted(folder: Path, level: str, **config: int) -> Work:
    signature = Checkpoint(save(build("BertForTokenClassification", **{**TEXT, **config}), folder)).signature
    return work(signature, list(signature.tensors), acting_groups(signature, level))


def test_the_work_of_one_pass_is_what_it_is_by_hand(tmp_path: Path) -> None:
    """Width 12, 3 heads of 4, 10 neurons, 2 layers: queries and keys with their biases, values and outputs, neurons.
    Rotations are found and then applied."""
    found = counted(tmp_path, "paper")
    heads, neurons = (2 * (144 + 12)) + (144 + 12 + 144), 120 + 10 + 120
    assert found.products == 2 * (2 * 4 * heads * 2 + 2 * 10 * neurons)
    assert found.factored == 2 * 2 * 3 * 4**3 and found.assigned == 2 * 10**3


def test_work_grows_with_depth_and_with_what_is_coupled(tmp_path: Path) -> None:
    found = [counted(tmp_path / str(n), "paper", num_hidden_layers=n) for n in (1, 2, 4)]
    assert [each.products / found[0].products for each in found] == [1, 2, 4]
    more = counted(tmp_path / "more", "permutation")
    assert more.assigned >= SWEEPS * found[1].assigned and more.numbers == found[1].numbers


@pytest.mark.parametrize("level", ["paper", "full"])
def test_more_work_takes_longer(level: str, tmp_path: Path) -> None:
    small, large = (counted(tmp_path / str(n), level, num_hidden_layers=n) for n in (1, 3))
    assert 0 < seconds(small) < seconds(large)
