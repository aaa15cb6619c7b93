# SPDX-License-Identifier: Apache-2.0
"""Tables by hand and inferred ones, compared on the same models; the page on inference shows what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

by_hand = pytest.importorskip("benchmarks.by_hand")
PAGE = Path(__file__).parents[2] / "docs" / "inference.md"


def known() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(by_hand.FILE.read_text("utf-8"))["types"]
    return found


# albert: layers that run again; bloom: a function with a gradient of its own, whose GELU takes a product of products;
# beit: LayerScale; vit: constants between positions, class token and patches; xlm-roberta: the home of tied tensors;
# deberta-v2: attention seen in another shape; gpt_neox: two norms of the same vectors; cohere: norms step by step.
KINDS = ["llama", "mixtral", "albert", "bloom", "beit", "vit", "xlm-roberta", "deberta-v2",
         "gpt_neox", "cohere"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_inference_lets_a_model_move_as_its_table_by_hand_does(kind: str) -> None:
    found = by_hand.compared(kind, 0)
    assert by_hand.equal(found) and found["table"] > 0
    assert found == known()[kind][0]


def test_no_direction_is_inferred_that_the_complete_table_by_hand_does_not_have() -> None:
    """T5 has one embedding for encoder and decoder, and a file holds it under a name that nothing looks up."""
    found = by_hand.compared("t5", 0)
    assert found["table"] - 6 < found["inferred"] <= found["table"]


def test_every_type_of_a_table_by_hand_is_compared() -> None:
    assert list(known()) == by_hand.types()


def test_a_table_says_what_it_knows_more_and_only_then() -> None:
    for kind, draws in known().items():
        assert len(draws) == by_hand.DRAWS
        assert bool(by_hand.causes(kind)) == (not all(map(by_hand.equal, draws))), kind


def test_the_page_on_inference_shows_the_comparison() -> None:
    assert by_hand.table(known()) in PAGE.read_text("utf-8")
