# SPDX-License-Identifier: Apache-2.0
"""Models of several types, and with and without heads: matched where one table holds for all, else refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import scrambled
from transformers import CONFIG_MAPPING, CwmForCausalLM, HeliumForCausalLM, LlamaForCausalLM, PreTrainedModel

import onebasin
from onebasin.models import ModelError
from onebasin.running import twins

CLASSES = {"llama": LlamaForCausalLM, "cwm": CwmForCausalLM, "helium": HeliumForCausalLM}
SIZES = dict(
    vocab_size=23, hidden_size=16, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
    num_key_value_heads=2, max_position_embeddings=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_bias=False, tie_word_embeddings=False,
)  # fmt: skip


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.to(torch.float64).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(twins.random_model(CONFIG_MAPPING["llama"](**SIZES), LlamaForCausalLM), tmp_path / "llama")


def of_type(kind: str, like: Path) -> Path:
    """A model of another type with the same weights."""
    made = CLASSES[kind](CONFIG_MAPPING[kind](**SIZES))
    made.load_state_dict(LlamaForCausalLM.from_pretrained(like).state_dict())
    return saved(made, like.with_name(kind))


@pytest.mark.parametrize("level", ["paper", "full"])
def test_types_of_one_structure_are_matched(level: str, llama: Path, tmp_path: Path) -> None:
    """Cwm has no table by hand; what is inferred calls Llama's spaces otherwise."""
    source = scrambled(llama, tmp_path / "source", "paper")
    anchor = of_type("cwm", llama)
    for one, other in ((source, anchor), (anchor, source)):
        found = onebasin.match(one, other, symmetry=level, precision="float64")
        assert found.distance_before > 0.1
        assert found.distance_after < 1e-5 * found.distance_before


def test_a_type_of_another_structure_is_refused_in_a_sentence(llama: Path) -> None:
    """Helium pairs other dimensions in its rotary embeddings, though all names and shapes are Llama's."""
    with pytest.raises(ModelError, match=r"is of family llama, .* of helium: they cannot be paired$"):
        onebasin.match(llama, of_type("helium", llama))


def test_a_model_without_its_head_is_matched(tmp_path: Path) -> None:
    """Nothing acts on hidden states that leave a model; inference then calls them otherwise than before a head."""
    whole = twins.build("granite")[0]
    anchor = saved(whole.base_model, tmp_path / "bare")
    saved(whole, tmp_path / "whole")
    assert json.loads((anchor / "config.json").read_text("utf-8"))["architectures"] == ["GraniteModel"]
    source = scrambled(tmp_path / "whole", tmp_path / "source", "permutation")
    found = onebasin.match(source, anchor, symmetry="permutation", precision="float64")
    assert found.distance_before > 0.1
    assert found.distance_after < 1e-5 * found.distance_before
    bare = scrambled(anchor, tmp_path / "scrambled", "permutation")
    found = onebasin.match(bare, tmp_path / "whole", symmetry="permutation", precision="float64")
    assert found.distance_after < 1e-5 * found.distance_before
