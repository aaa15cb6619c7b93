# SPDX-License-Identifier: Apache-2.0
"""A cache of measurements, with which a study that was stopped continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from onebasin.engine import Store, Tell, kept

from .config import Config

T = TypeVar("T")


class Once:
    """Makes measurements that are not in the cache. seconds: of all measurements, including those in the cache."""

    def __init__(self, store: Store, tell: Tell) -> None:
        self.store, self.tell, self.seconds = store, tell, 0.0

    def __call__(self, what: str, models: Sequence[str], measure: Callable[[], T]) -> T:
        """Return the result of `measure`, as JSON values, from the cache if it is there.

        what: one line, which is different for every measurement of a study on `models`; progress shows both.
        """
        unit = json.dumps([what, *map(_files, models)])
        file = self.store.find(unit)
        if file is None:
            self.tell(f"{what}: {', '.join(models)}")
            started = time.perf_counter()
            found = measure()
            text = json.dumps([found, time.perf_counter() - started])
            self.store.put(unit, lambda file: file.write_text(text, "utf-8"))
        else:
            text = file.read_text("utf-8")
        value: T
        value, seconds = json.loads(text)
        self.seconds += seconds
        return value


@contextmanager
def measuring(study: str, config: Config, folder: Path, resume: bool, tell: Tell) -> Iterator[Once]:
    """Yield a `Once` that stores its results in a hidden folder in `folder` until the study is complete.

    A study that is killed or ends in an error keeps its measurements, which may have taken hours, while the error may
    concern one of many models; the error (ValueError) then mentions this.

    resume: use stored results. Those of other settings or other models are never used.
    """
    settings = config.model_dump(exclude={"models", "seeds"})
    with kept(folder / f".{study}.units", resume, through_errors=True) as place:
        once = Once(Store(place, json.dumps([torch.__version__, settings])), tell)
        try:
            yield once
        except (ValueError, OSError) as error:
            if not once.seconds:
                raise
            raise ValueError(f"{error} (earlier measurements are kept: continue with --resume)") from error


def _files(model: str) -> list[Any]:
    """Return a model's files with their sizes and times of change."""
    found = ((str(file), file.stat()) for file in sorted(Path(model).glob("*.*")))
    return [model, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in found)]
