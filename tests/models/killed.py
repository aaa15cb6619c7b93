# SPDX-License-Identifier: Apache-2.0
"""Write a model over another and be killed on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import onebasin
from onebasin.models import Folder, write_model
from onebasin.settings import OutputSettings


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(name: str, number: int, after: bool = False) -> None:
    """Die before (or after) call `number` of a function of ours."""
    module, attribute = name.rsplit(".", 1)
    owner: Any = attrgetter(module)(onebasin)
    original: Callable[..., Any] = getattr(owner, attribute)
    left = [number]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not after and left[0] == 0:
            die()
        found = original(*args, **kwargs)
        if after and left[0] == 0:
            die()
        return found

    setattr(owner, attribute, counted)


MOMENTS: dict[str, Callable[[], None]] = {
    "before-first-shard": lambda: at_call("models.shards.Shard.close", 1),
    "after-first-shard": lambda: at_call("models.shards.Shard.close", 1, after=True),
    "after-second-shard": lambda: at_call("models.shards.Shard.close", 2, after=True),
    "before-index": lambda: at_call("models.weight_files._name_shards", 1),
    "before-exchange": lambda: at_call("engine.placing.swap", 1),
    "after-exchange": lambda: at_call("engine.placing.swap", 1, after=True),
    "while-removing-the-old": lambda: at_call("engine.placing.os.unlink", 2),
    "never": lambda: None,
}


def overwrite(new: Path, out: Path, moment: str) -> None:
    """Write `new` over `out` in a fork that sends itself SIGKILL at a moment."""
    like = Folder(new)
    child = os.fork()
    if child == 0:
        try:
            MOMENTS[moment]()
            pairs = ((name, like.read_name(name)) for name in like.files)
            write_model(out, pairs, like, overwrite=True, look=OutputSettings(shard_size=2000))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed == (moment != "never"), f"{moment}: {status}"
