# SPDX-License-Identifier: Apache-2.0
"""A table that is inferred from twins fits a model of full size, in which sizes that agree in twins differ."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from onebasin.running import inference, twins
from onebasin.running.inference.tracing import as_stored
from onebasin.symmetry import resolve


# Text and images have as many heads in twins (audioflamingo3: sound).
@pytest.mark.parametrize("kind", ["audioflamingo3", "cohere2_vision"])
def test_a_table_fits_a_model_of_full_size(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    cls = type(twins.build(config)[0])
    with torch.device("meta"):
        model = cls(config)
    stored = {name: one for name, one in model.state_dict().items() if name not in (model.all_tied_weights_keys or ())}
    shapes = {name: tuple(one.shape) for name, one in as_stored(model, stored).items()}
    told = {**config.to_dict(), "architectures": [cls.__name__]}
    assert resolve(inference.infer(config).table, shapes, told).tensors
