# SPDX-License-Identifier: Apache-2.0
"""Merges that are killed at random moments, then resumed. Run as: interrupted.py FOLDER KILLS [LEVEL]

Every merge runs in a fork of this process, which has imported everything and computed nothing. Prints how often there
was no output, a complete one, and kept units when the merge was killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from footprint import import_everything, make

import onebasin

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip


def forked(run: Callable[[], object]) -> int:
    """Run it in a fork of this process, which ends with 0, or with 1 and a traceback; return the fork's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def start(pair: list[Path], out: Path, **how: Any) -> int:
    how = {"verify": "none", "shard_size": "200KB", "workers": 2, "max_sweeps": 3, "rescale": "none", **how}
    return forked(lambda: onebasin.merge(pair, out, verdict=False, **how))


def finished(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, status
    return True


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("model*"))}


def main(folder: Path, kills: int, level: str = "full") -> dict[str, int]:
    import_everything()
    pair = [folder / f"model-{seed}" for seed in range(2)]
    for seed, model in enumerate(pair):
        assert finished(forked(partial(make, model, 3, seed, **SHAPE)))
    began = time.perf_counter()
    assert finished(start(pair, folder / "whole", match=level))
    whole, length = weights(folder / "whole"), time.perf_counter() - began
    assert whole
    seen = {"none": 0, "complete": 0, "units": 0}
    for number in range(kills):
        room = folder / f"kill-{number}"
        room.mkdir()
        out = room / "out"
        child = start(pair, out, match=level)
        time.sleep(random.uniform(0.0, 1.0) * length)
        os.kill(child, signal.SIGKILL)
        finished(child)
        if out.exists():
            assert weights(out) == whole
        seen["complete" if out.exists() else "none"] += 1
        seen["units"] += any(room.glob(".out.units/*"))
        assert finished(start(pair, out, match=level, resume=True, overwrite=True))
        assert weights(out) == whole
        assert not any(room.glob(".out.units"))
        shutil.rmtree(room)
    return seen


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
