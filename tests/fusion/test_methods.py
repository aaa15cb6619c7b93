# SPDX-License-Identifier: Apache-2.0
"""Every method that is registered, a new one too: merging copies of a model gives its function back."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import folder

import onebasin
from onebasin.fusion import METHODS, method_of


@pytest.mark.parametrize("method", METHODS)
def test_copies_of_a_model_merge_into_its_function(method: str, tmp_path: Path) -> None:
    model = folder(tmp_path / "model", "GPT2LMHeadModel")
    data = {"data": "self", "samples": 64} if method_of(method)().needs_data else {}
    onebasin.merge([model, model], tmp_path / "out", method=method, match="none", weights=[0.3, 0.7], **data)
    assert onebasin.verify(model, tmp_path / "out", tolerance=1e-4).same
