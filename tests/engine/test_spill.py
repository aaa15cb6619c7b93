# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from onebasin.engine import Spill, spill

SIZE = 4 * 10_000  # bytes of a tensor below


def bytes_in_memory(*tensors: Tensor) -> int:
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("room", [0, SIZE, 10 * SIZE])
def test_what_paused_computations_hold_takes_no_more_than_the_room(room: int, tmp_path: Path) -> None:
    """And is as it was, seen through views, changed or not, again and again."""
    held, expected = [], []
    with Spill(room, str(tmp_path)) as some:
        for number in range(5):
            held.append(torch.full((100, 100), float(number)))
            some.rest(number)
            expected.append(torch.full((100, 100), float(number)).tolist())
            assert bytes_in_memory(*held) == min(room, SIZE * len(held))
        for turn in range(3):
            for number, own in enumerate(held):
                assert own[3:].T.mT.tolist() == expected[number][3:]
                own[turn].add_(1)
                some.rest(number)
                expected[number][turn] = [number + 1.0] * 100
                assert bytes_in_memory(*held) == min(room, 5 * SIZE)
        some.restore()
    some.close()
    assert [own.tolist() for own in held] == expected
    assert not list(tmp_path.iterdir())


def test_the_file_does_not_grow_with_what_is_gone() -> None:
    with Spill(0) as some:
        for number in range(20):
            held = torch.full((100, 100), float(number))
            some.rest(0)
            assert held.sum() == 1e4 * number
            assert bytes_in_memory(held) == SIZE
    assert some._file._end <= 2 * SIZE


def test_what_did_not_change_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = spill._File.write
    monkeypatch.setattr(spill._File, "write", lambda file, numbers: [written.append(1), write(file, numbers)][1])
    with Spill(0) as some:
        held = torch.ones(100, 100)
        for _ in range(3):
            some.rest(0)
            assert held.sum() == 1e4
        assert len(written) == 1
        held.mul_(2)
        some.rest(0)
        assert held.sum() == 2e4
        assert len(written) == 2


def test_what_others_made_and_small_tensors_stay() -> None:
    weights, small = torch.nn.Parameter(torch.ones(100, 100)), torch.ones(3)
    with Spill(0) as some, torch.no_grad():
        views, few = weights.mT[5:], small + 1
        some.rest(0)
        assert bytes_in_memory(views) == SIZE
        assert bytes_in_memory(few) == 12
