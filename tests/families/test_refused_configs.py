# SPDX-License-Identifier: Apache-2.0
"""Configurations that change the mathematics and that no table follows are refused in one sentence that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onebasin.families import table_for
from onebasin.models.folder import Folder
from onebasin.symmetry import TableError, resolve

Saved = Callable[[str], Folder]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("BeitForMaskedImageModeling", {"use_mean_pooling": False}, "use_mean_pooling = False"),
        ("BloomForCausalLM", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact = True"),
    ],
)
def test_it_is_named_with_its_reason(case: str, changes: dict[str, Any], message: str, saved: Saved) -> None:
    checkpoint = saved(case)
    config = checkpoint.config
    with pytest.raises(TableError, match=f"models with .*{message}.* have no table yet: .+"):
        resolve(table_for(config["model_type"]), checkpoint.shapes, {**config, **changes})


def test_a_setting_that_no_head_of_the_model_reads_is_not_refused(saved: Saved) -> None:
    checkpoint = saved("Wav2Vec2ForCTC")
    resolve(table_for("wav2vec2"), checkpoint.shapes, {**checkpoint.config, "use_weighted_layer_sum": True})
