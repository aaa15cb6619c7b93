# SPDX-License-Identifier: Apache-2.0
"""Real models are called by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from weights import model_folder


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """Name -> model folder; see `weights.MODELS`."""
    return model_folder
