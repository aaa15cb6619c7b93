# SPDX-License-Identifier: Apache-2.0
"""A table that is inferred from twins fits a model of full size, in which sizes that agree in twins differ."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from onebasin.cli import app
from onebasin.running import inference, twins
from onebasin.running.inference.full_size import stored
from onebasin.symmetry import resolve


# Text and images have as many heads in twins (audioflamingo3: sound); minicpm_ocr: two heads share keys and values
# there alone; idefics: only every so many layers look at images; gemma3n_text: the last 15 layers have no keys;
# nemotron_h and mamba2: groups of state-space heads were 2 in every twin; laguna: layers have other numbers of heads;
# lightglue: its 64 pixels of a cell are as many as its neurons; longcat_flash: some of its experts only pass on what
# they are given.
@pytest.mark.parametrize(
    "kind",
    [
        "audioflamingo3",
        "cohere2_vision",
        "minicpm_ocr",
        "idefics",
        "gemma3n_text",
        "nemotron_h",
        "mamba2",
        "laguna",
        "lightglue",
        "longcat_flash",
    ],
)
def test_a_table_fits_a_model_of_full_size(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    itself = stored(config, type(twins.build(config)[0]).__name__)
    assert itself is not None
    found = inference.infer(config)
    signature = resolve(found.table, *itself)
    assert signature.tensors and signature.spaces and found.fits


def test_a_table_that_describes_only_twins_is_told() -> None:
    """LeViT's last images are single pixels in every twin; Ministral's class refuses its own default configuration."""
    assert inference.infer("levit").fits is False and inference.infer("ministral").fits is None
    assert "does not describe the model itself" in CliRunner().invoke(app, ["infer", "levit"]).output.replace("\n", " ")


def test_groups_of_state_space_heads_are_found_by_name() -> None:
    """With a number of groups that nothing else in the configuration has."""
    config = CONFIG_MAPPING["nemotron_h"](n_groups=4)
    itself = stored(config, type(twins.build(config)[0]).__name__)
    assert itself is not None
    table = inference.infer(config).table
    assert ["n_groups"] in table.sizes.values()
    assert resolve(table, *itself).tensors
