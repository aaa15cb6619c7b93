# SPDX-License-Identifier: Apache-2.0
"""A match that is killed at every rename and every flush, and resumed each time. Run as: kills.py FOLDER [bare] [EVERY]

It writes a model, its anchor's canonical form and an alignment, over nothing and then over what is there. Every run is
a fork of this process. bare: as on a system without renameat2. EVERY: only every so many-th moment. Prints how many
there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from footprint import import_everything, make
from interrupted import SHAPE, finished, forked, weights
from safetensors.torch import load_file

import onebasin
from onebasin.engine import filesystem

MOMENTS = ("rename", "replace", "fsync", "link", "unlink", "rmdir")  # of os
QUICK = {"symmetry": "full", "verify": "none", "workers": 1, "max_sweeps": 1, "rescale": "none"}
PLACES = ("out", "out-anchor", "maps.safetensors")


def count_down(left: int, then: Callable[[], object]) -> list[int]:
    """Call `then` before the call number `left` of what changes names or flushes; returns how many are left."""
    counter = [left]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter[0] -= 1
            if counter[0] == 0:
                then()
            return original(*args, **kwargs)

        return call

    for name in MOMENTS:
        setattr(os, name, counted(getattr(os, name)))
    filesystem._renameat2 = counted(filesystem._renameat2)
    return counter


def start(pair: list[Path], room: Path, kill_at: int = 0, count: Path | None = None, **how: Any) -> int:
    def run() -> None:
        counter = count_down(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        onebasin.match(*pair, room / "out", alignment=room / PLACES[2], **QUICK, **how)
        if count is not None:
            count.write_text(str(-counter[0]))

    return forked(run)


def state(room: Path) -> dict[str, Any]:
    """What stands in the places: name -> bytes, by file or, of the alignment, by tensor."""
    found: dict[str, Any] = {name: weights(room / name) for name in PLACES[:2] if (room / name).exists()}
    if (maps := room / PLACES[2]).exists():
        found[maps.name] = {name: tensor.numpy().tobytes() for name, tensor in load_file(maps).items()}
    return found


def main(folder: Path, bare: bool = False, every: int = 1) -> int:
    import_everything()
    if bare:
        filesystem._renameat2 = lambda *_: False
    pair = [folder / f"model-{seed}" for seed in range(2)]
    for seed, model in enumerate(pair):
        assert finished(forked(partial(make, model, 1, seed, **{**SHAPE, "hidden_size": 16, "intermediate_size": 8})))
    whole, other = folder / "whole", folder / "other"
    for room, models in ((whole, pair), (other, pair[::-1])):
        room.mkdir()
        assert finished(start(models, room, count=folder / "count"))
    new, old = state(whole), state(other)
    assert len(new) == len(old) == 3 and all(new[name] != old[name] for name in new)
    moments = 0
    for over in (False, True):
        if over:
            shutil.copytree(other, folder / "again")
            assert finished(start(pair, folder / "again", count=folder / "count", overwrite=True))
        for moment in range(1, int((folder / "count").read_text()) + 1, every):
            moments += 1
            room = folder / f"kill-{over}-{moment}"
            shutil.copytree(other, room) if over else room.mkdir()
            assert not finished(start(pair, room, moment, overwrite=over)), moment
            left = state(room)
            for name, found in left.items():
                assert found in (new[name], old[name] if over else None), (moment, name)
            complete = left == new and not (room / ".out.units" / "placed").exists()
            assert finished(start(pair, room, resume=True, overwrite=over or complete)), moment
            assert state(room) == new, moment
            assert sorted(path.name for path in room.iterdir()) == sorted(PLACES), moment
            shutil.rmtree(room)
    return moments


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:] if word.isdigit()]
    print(main(Path(sys.argv[1]), "bare" in sys.argv[2:], *numbers))
