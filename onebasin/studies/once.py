# SPDX-License-Identifier: Apache-2.0
"""Measurements that are kept as they are made, so that a study which was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from onebasin.engine import Store, kept

from .config import Config

T = TypeVar("T")


class Once(Protocol):
    def __call__(self, what: str, measure: Callable[[], T]) -> T:
        """What `measure` gives, as JSON holds it: measured now, or found where an earlier run has kept it.

        what: one line, another for every measurement of a study; it is also what the user is told.
        """


@contextmanager
def measuring(study: str, config: Config, folder: Path, resume: bool, tell: Callable[[str], None]) -> Iterator[Once]:
    """A `Once` that keeps its results in a hidden folder under `folder` until the study is complete.

    resume: use what is there. Results of another file, other settings or other models are never found.
    """
    with kept(folder / f".{study}.units", resume) as place:
        store = Store(place, inputs(config))

        def once(what: str, measure: Callable[[], T]) -> T:
            file = store.find(what)
            if file is None:
                tell(what)
                text = json.dumps(measure())
                store.put(what, partial(_write, text))
            else:
                text = file.read_text("utf-8")
            found: T = json.loads(text)
            return found

        yield once


def _write(text: str, file: Path) -> None:
    file.write_text(text, "utf-8")


def inputs(config: Config) -> str:
    """What a study depends on, as text: its settings, and the files of its models as they stand now."""
    files: list[list[Any]] = [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns]
        for run in config.runs()
        for model in run
        for file in sorted(Path(model).glob("*.*"))
    ]
    return json.dumps([torch.__version__, config.model_dump(), files])
