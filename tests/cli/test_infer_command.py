# SPDX-License-Identifier: Apache-2.0
"""onebasin infer: what it takes, what it prints, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from onebasin.running.classes import type_of_class, unregistered
from onebasin.symmetry import read_table


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


def test_a_class_is_inferred_by_its_name(ask: Any, run: Any) -> None:
    assert run("infer", "GraniteForCausalLM").stdout.startswith("# Each tensor is listed with the spaces of its axes")
    assert "types granite" in ask("infer", "GraniteForCausalLM")["table"]
    assert type_of_class("Granite") is None and type_of_class("load_tf_weights") is None


def test_a_tower_without_a_registered_class_is_found_beside_its_configuration(ask: Any) -> None:
    assert unregistered(CONFIG_MAPPING["siglip_text_model"]())[0] == "SiglipTextModel"
    assert unregistered(CONFIG_MAPPING["llama4_vision_model"]())[0] == "Llama4VisionModel"
    found = ask("infer", "siglip_text_model")
    assert found["departure"] < 1e-9 and "token_embedding.weight" in found["table"]


def test_a_class_that_transformers_lacks_is_not_replaced_without_a_word(run: Any, refused: Any, tmp_path: Path) -> None:
    config = {"model_type": "granite", "architectures": ["MyModel"], "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "names the class 'MyModel', which transformers does not have"
    assert f"{said}: a class of the type 'granite' stands in for it" in run("infer", tmp_path).stderr
    known = {**config, "architectures": ["GraniteModel"], "auto_map": {"AutoModel": "mine.MyModel"}}
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert "stands in" not in run("infer", tmp_path).stderr
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "mine.MyModel"}}))
    assert f"{said}, and code of its own for it (auto_map), which is never run" in refused("infer", tmp_path)


def test_a_class_that_does_not_run_is_named_with_the_place_where_it_fails(refused: Any) -> None:
    place = r"Chameleon\w+: \w+Error: .* in \w+\.\w+ \(modeling_chameleon\.py, line \d+\)"
    assert re.search(f"no tiny 'chameleon' runs: {place}", refused("infer", "chameleon"))


def test_a_table_says_which_operation_fixed_a_space(ask: Any) -> None:
    table = ask("infer", "fnet")["table"]
    assert re.search(r"(?m)^    \w+ fixed  # fixed by token ids$", table)
    assert read_table(table, "printed") == read_table(re.sub(" *#.*", "", table), "printed")
