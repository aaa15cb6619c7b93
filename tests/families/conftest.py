# SPDX-License-Identifier: Apache-2.0
"""Every case saved once, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import zoo

from onebasin.models.folder import Folder

Saved = Callable[[str], Folder]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Case -> its folder, opened."""
    folder: Path = tmp_path_factory.mktemp("saved")

    @cache
    def open_case(case: str) -> Folder:
        return Folder(zoo.save(zoo.CASES[case]().double(), folder / case))

    return open_case
