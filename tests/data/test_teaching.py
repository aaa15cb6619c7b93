# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from onebasin.data import teaching
from onebasin.data.teaching import Teachers, divergence, example_losses, logit_distance, predictions

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


@pytest.mark.parametrize("loss", [divergence, logit_distance])
def test_all_rows_of_an_example_count_for_it(loss) -> None:  # type: ignore[no-untyped-def]
    """As where a tower returns the patches of all images in one sequence."""
    own, *theirs = answers(5)
    flat = [{"logits": one["logits"].flatten(0, 1)} for one in (own, *theirs)]
    batch = {"pixel_values": torch.ones(8, 4), "grid_thw": torch.ones(2, 3)}
    each = example_losses(loss, lambda _: flat[0], lambda _: flat[1:], WEIGHTS, [batch])
    assert torch.allclose(each, example_losses(loss, lambda _: own, lambda _: theirs, WEIGHTS, [{"x": torch.ones(2)}]))


@pytest.mark.parametrize("key", ["labels", "attention_mask", "pixel_values"])
def test_answers_that_are_kept_count_as_those_just_given(key, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The models run once, all positions that count fit into a room for just these, and every loss is the same."""
    own, *theirs = answers(5)
    counted = torch.tensor([[True, False, True], [False, True, False]])
    batch = {"labels": torch.where(counted, 3, -100), "attention_mask": counted.long()}
    batch = {key: batch.get(key, torch.ones(2, 3))}
    runs = []

    def model(number: int, _: dict[str, Tensor]) -> dict[str, Tensor]:
        runs.append(number)
        return theirs[number]

    monkeypatch.setattr(teaching, "KEPT", 2 * 5 * (6 if key == "pixel_values" else 3))
    kept = Teachers([partial(model, number) for number in range(2)])
    first, again = kept(batch), kept(batch)
    assert runs == [0, 1]
    for loss in (divergence, logit_distance):
        assert torch.equal(loss(own, first, WEIGHTS, batch), loss(own, again, WEIGHTS, batch))
        each = example_losses(loss, lambda _: own, kept, WEIGHTS, [batch])
        assert torch.equal(each, example_losses(loss, lambda _: own, lambda _: theirs, WEIGHTS, [batch]))
    kept.forget(batch)
    other = {name: value.clone() for name, value in batch.items()}
    for _ in range(2):
        kept(other)  # in the room of the one that is forgotten
    assert runs == [0, 1, 0, 1]
    monkeypatch.setattr(teaching, "KEPT", 2 * 5 * 3 - 1)
    Teachers(kept.models)(batch), Teachers(kept.models)(batch)
    assert len(runs) == 8  # no room


@pytest.mark.parametrize("key", ["labels", "attention_mask", "pixel_values"])
def test_the_mean_loss_is_that_of_whole_batches_but_models_see_a_few_examples(key, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """An example in which nothing counts does not, either."""
    generator = torch.Generator().manual_seed(1)
    maps = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    counted = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    whole = {"labels": torch.where(counted.bool(), 3, -100), "attention_mask": counted}
    shown = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    batches = [{"shown": x, key: whole.get(key, shown)[: len(x)]} for x in (shown, shown[:3])]
    rows = []

    def model(number: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows.append(len(batch["shown"]))
        return {"logits": batch["shown"] @ maps[number]}

    own, *theirs = (partial(model, number) for number in range(3))
    expected = [divergence(own(b), [one(b) for one in theirs], WEIGHTS, b) for b in batches]
    for examples in (1, 2, 3):
        monkeypatch.setattr(teaching, "PIECE", examples * 15 + 14)
        rows.clear()
        found = teaching.mean_loss(divergence, own, Teachers(theirs), WEIGHTS, batches)
        assert found == pytest.approx(float(sum(expected)) / 2)
        assert max(rows) == examples


def test_what_a_backbone_predicts_are_its_feature_maps() -> None:
    maps = (torch.randn(2, 3, 4, 4), torch.randn(2, 6, 2, 2))
    assert predictions({"feature_maps": maps}) == {"feature_maps.0": maps[0], "feature_maps.1": maps[1]}
    assert predictions({"logits": maps[0], "feature_maps": maps}).keys() == {"logits"}


def test_a_loss_that_a_class_returns_unasked_is_not_its_prediction() -> None:
    """Of audio codecs (DAC), say."""
    found = predictions({"loss": torch.zeros(2), "audio_values": torch.zeros(2, 5)})
    assert list(found) == ["audio_values", "loss"]
