# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onebasin.data.teaching import divergence, logit_distance

WEIGHTS = [0.3, 0.7]


def answers(classes: int) -> list[dict[str, Tensor]]:
    """Of a student and two teachers, to two sequences of three tokens."""
    generator = torch.Generator().manual_seed(0)
    return [{"logits": torch.randn(2, 3, classes, generator=generator, dtype=torch.float64)} for _ in range(3)]


def test_the_distance_of_logits_is_the_divergence_at_a_high_temperature() -> None:
    own, *theirs = answers(5)
    for temperature in (1e3, 1e4):
        cooled = [{"logits": one["logits"] / temperature} for one in (own, *theirs)]
        limit = temperature**2 * divergence(cooled[0], cooled[1:], WEIGHTS, {})
        assert float(logit_distance(own, theirs, WEIGHTS, {})) == pytest.approx(float(limit), rel=10 / temperature)


def test_the_distance_of_logits_leaves_out_what_a_softmax_does_not_see() -> None:
    own, *theirs = answers(5)
    lifted = {"logits": own["logits"] + torch.arange(6.0).reshape(2, 3, 1)}
    found = float(logit_distance(own, theirs, WEIGHTS, {}))
    assert float(logit_distance(lifted, theirs, WEIGHTS, {})) == pytest.approx(found)
    mean = {"logits": sum((w * one["logits"] for w, one in zip(WEIGHTS, theirs, strict=True)), torch.zeros(()))}
    assert float(logit_distance(mean, theirs, WEIGHTS, {})) < 1e-30 < found


@pytest.mark.parametrize("loss", [divergence, logit_distance])
def test_padding_and_tokens_that_were_shown_do_not_count(loss) -> None:  # type: ignore[no-untyped-def]
    own, *theirs = answers(5)
    first = [{"logits": one["logits"][:1]} for one in (own, *theirs)]
    alone = loss(first[0], first[1:], WEIGHTS, {})
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert torch.isclose(loss(own, theirs, WEIGHTS, {"attention_mask": mask}), alone)
    labels = torch.where(mask.bool(), 7, -100)
    assert torch.isclose(loss(own, theirs, WEIGHTS, {"labels": labels}), alone)


@pytest.mark.parametrize("loss", [divergence, logit_distance])
def test_a_model_with_one_output_is_compared_by_its_number(loss) -> None:  # type: ignore[no-untyped-def]
    own, *theirs = answers(1)
    mean = sum((w * one["logits"] for w, one in zip(WEIGHTS, theirs, strict=True)), torch.zeros(()))
    expected = (own["logits"] - mean).square().mean()
    assert expected > 0.1
    assert torch.isclose(loss(own, theirs, WEIGHTS, {}), expected)
