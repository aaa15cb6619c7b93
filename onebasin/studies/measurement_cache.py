# SPDX-License-Identifier: Apache-2.0
"""Measurements that are kept as they are made, so that a study which was stopped goes on where it was."""

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
    """Measures what was not measured yet. seconds: of all measurements, those that were found too."""

    def __init__(self, store: Store, tell: Tell) -> None:
        self.store, self.tell, self.seconds = store, tell, 0.0

    def __call__(self, what: str, models: Sequence[str], measure: Callable[[], T]) -> T:
        """Return the result of `measure`, as JSON holds it: measured now, or found where an earlier run has kept it.

        what: one line, another for every measurement of a study on `models`; the user is told both.
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
    """A `Once` that keeps its results in a hidden folder under `folder` until the study is complete.

    resume: use what is there. Results of other settings or other models are never found. A study that is killed and one
    that ends in an error leave what they measured: hours may lie in it, and the mistake in one of many models. Such an
    error (ValueError) says so.
    """
    settings = config.model_dump(exclude={"models", "seeds"})
    with kept(folder / f".{study}.units", resume, through_errors=True) as place:
        once = Once(Store(place, json.dumps([torch.__version__, settings])), tell)
        try:
            yield once
        except (ValueError, OSError) as error:
            if not once.seconds:
                raise
            raise ValueError(f"{error} (what was measured before is kept: go on with --resume)") from error


def _files(model: str) -> list[Any]:
    """A model's files as they stand now."""
    found = ((str(file), file.stat()) for file in sorted(Path(model).glob("*.*")))
    return [model, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in found)]
