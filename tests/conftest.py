# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the path of helpers, one thread, and seeds."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the loader's threads take a third longer for small models
os.environ["ONEBASIN_CACHE"] = ""  # nothing is kept outside of the tests' own folders

import torch
import typer.main
from hypothesis import settings
from zoo import CASES, save

import onebasin.cli
from onebasin.models import Folder

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

# Build the command line once: for every call typer would read the hints of all options anew. Tests import
# `typer.testing` later, which then takes this function.
typer.main.get_command = cache(typer.main.get_command)
onebasin.cli.loaded = cache(onebasin.cli.loaded)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first, lest one worker end with it while the other has nothing left to do; tests of one
    small model come one after another, so that it is made once."""
    place = {case: number for number, case in enumerate(CASES, 1)}

    def order(item: pytest.Item) -> tuple[bool, int]:
        asked = getattr(item, "callspec", None)
        return "test_fuzz_slice" not in item.nodeid, place.get(asked.params.get("case"), 0) if asked else 0

    items.sort(key=order)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes longer than many a test


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_few_collections() -> None:
    torch.set_num_threads(1)  # the models are tiny, and other processes of the run want the cores
    gc.freeze()  # the collected tests stay
    gc.set_threshold(10_000, 10, 10)  # looking for garbage every 700 objects takes 6 % of the time


@pytest.fixture
def nothing_stays_in_the_temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert not list(scratch.iterdir())


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    """Case of the zoo -> its folder in float64, saved once and opened."""
    place = tmp_path_factory.mktemp("saved")

    @cache
    def open_case(case: str) -> Folder:
        return Folder(save(CASES[case]().double(), place / case))

    return open_case


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(kind, name="kind", dtype=float32, **config) -> the folder of a tiny random model, config values replaced."""

    def build(kind: str = "BertForSequenceClassification", name: str = "", **changes: Any) -> Path:
        from pairs import folder

        return folder(tmp_path / (name or kind), kind, **changes)

    return build


@pytest.fixture
def half_a_second_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a search thinks that it has time for everything, but not for long."""
    monkeypatch.setattr("onebasin.jobs.search.Setup.left", 0.5)
    monkeypatch.setattr("onebasin.jobs.search.Setup.has_time", lambda *_: True)
    monkeypatch.setattr("onebasin.jobs.search.Setup.learns", lambda *_: True)
    monkeypatch.setattr("onebasin.jobs.search.trials.SHORTEST", 0.2)


@pytest.fixture
def three_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not asked how near the models come: models that share nothing take many sweeps."""
    from pairs import few_sweeps

    few_sweeps(monkeypatch)


@pytest.fixture
def bert(make: Callable[..., Path]) -> Path:
    return make()


@pytest.fixture(params=["linux", "macos", "windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide from our modules what another system lacks; tests/engine/test_other_systems.py does so as they load."""
    from onebasin.engine import filesystem, memory

    if request.param != "linux":
        monkeypatch.setattr(filesystem, "_renameat2", lambda *_: False)
    if request.param == "windows":
        monkeypatch.setattr(filesystem, "fcntl", None)
        monkeypatch.setattr(memory, "resource", None)
