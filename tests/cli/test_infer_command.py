# SPDX-License-Identifier: Apache-2.0
"""onebasin infer: what it takes, what it prints, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from onebasin.running.classes import type_of_class, unregistered


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("graniet", "nearest types: granite,"),
        ("Granite", "nearest types: granite,"),
        ("nosuchtype", "'nosuchtype' is neither a model folder nor a model type of transformers"),
        ("./granite", "there is no folder './granite'"),
        ("someone/granite", "there is no folder 'someone/granite'"),
    ],
)
def test_what_is_no_model_is_refused(refused: Any, name: str, sentence: str) -> None:
    assert sentence in refused("infer", name)


def test_a_class_is_inferred_by_its_name(ask: Any) -> None:
    assert "types granite" in ask("infer", "GraniteForCausalLM")["table"]
    assert type_of_class("Granite") is None and type_of_class("load_tf_weights") is None


def test_a_tower_without_a_registered_class_is_found_beside_its_configuration(ask: Any) -> None:
    assert unregistered(CONFIG_MAPPING["siglip_text_model"]())[0] == "SiglipTextModel"
    assert unregistered(CONFIG_MAPPING["llama4_vision_model"]())[0] == "Llama4VisionModel"
    found = ask("infer", "siglip_text_model")
    assert found["departure"] < 1e-9 and "token_embedding.weight" in found["table"]
