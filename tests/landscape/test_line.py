# SPDX-License-Identifier: Apache-2.0
"""The line between two models: interpolation, the barrier's formula, and curves of real models."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import folder, folders, model
from safetensors.torch import load_file
from zoo import VOCAB

from onebasin.data import Task, evaluate, load_model
from onebasin.landscape import barrier, curve, interpolate


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 1.5, 2.0], 0.0),  # on the straight line
        ([1.0, 4.0, 2.0], 2.5),  # a hill
        ([1.0, 0.2, 2.0], 0.0),  # a valley: the ends are the largest excess
        ([3.0, 3.1, 1.0], 1.1),  # below the higher end, and yet above the line
    ],
)
def test_barrier_of_hand_made_curves(losses: list[float], expected: float) -> None:
    assert barrier(losses[0], losses[-1], losses, [0.0, 0.5, 1.0]) == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=9), st.floats(-5, 5), st.floats(-5, 5)
)  # fmt: skip
def test_barrier_ignores_a_straight_line_that_is_added(losses: list[float], height: float, slope: float) -> None:
    lambdas = [i / (len(losses) - 1) for i in range(len(losses))]
    tilted = [loss + height + slope * lam for loss, lam in zip(losses, lambdas, strict=True)]
    before, after = (barrier(one[0], one[-1], one, lambdas) for one in (losses, tilted))
    assert before == pytest.approx(after, abs=1e-9)


def test_bad_barriers() -> None:
    with pytest.raises(ValueError, match="one loss per point, not 1 losses for 2 points"):
        barrier(0.0, 0.0, [0.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="not a number"):
        barrier(0.0, 0.0, [0.0, math.nan], [0.0, 1.0])


def test_interpolation_of_state_dicts() -> None:
    a = {"w": torch.randn(3, 4), "ids": torch.arange(3)}
    b = {"w": torch.randn(3, 4).half(), "ids": torch.arange(3)}
    assert torch.equal(interpolate(a, b, 0)["w"], a["w"])
    assert torch.equal(interpolate(a, b, 1)["w"], b["w"].float())
    torch.testing.assert_close(interpolate(a, b, 0.3)["w"], 0.7 * a["w"] + 0.3 * b["w"].float())
    assert torch.equal(interpolate(a, b, 0.3)["ids"], a["ids"])


def test_interpolation_of_folders(tmp_path: Path) -> None:
    ends = folders(tmp_path, "ViTForImageClassification", apart=1.0)
    a, b = (load_file(end / "model.safetensors") for end in ends)
    middle = interpolate(*ends, 0.25)
    assert middle.keys() == a.keys() == b.keys()
    for name, tensor in middle.items():
        torch.testing.assert_close(tensor, 0.75 * a[name] + 0.25 * b[name])


def test_models_that_are_not_on_one_line() -> None:
    with pytest.raises(ValueError, match="only one of them has the tensor 'v'"):
        interpolate({"w": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(2)}, 0.5)
    with pytest.raises(ValueError, match=r"'w' has the shapes \(2,\) and \(3,\)"):
        interpolate({"w": torch.ones(2)}, {"w": torch.ones(3)}, 0.5)


def words() -> Task:
    ids = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    return Task("causal-lm", ({"input_ids": ids, "labels": ids},))


@pytest.mark.parametrize("tied", [(True, True), (True, False), (False, True)])
def test_curve_is_the_loss_of_interpolated_models(tmp_path: Path, tied: tuple[bool, bool]) -> None:
    ends = [folder(tmp_path / str(i), "GPT2LMHeadModel", i, apart=0.5, tie_word_embeddings=tie)
            for i, tie in enumerate(tied)]  # fmt: skip
    found = curve(*ends, words(), points=5)
    a, b = (load_model(end, "causal-lm").state_dict() for end in ends)
    carrier = model("GPT2LMHeadModel", tie_word_embeddings=all(tied))
    for lam, loss, accuracy in zip(found["lambdas"], found["losses"], found["accuracies"], strict=True):
        carrier.load_state_dict({name: (1 - lam) * a[name] + lam * b[name] for name in a})
        scores = evaluate(carrier, words())
        assert loss == pytest.approx(scores.loss, rel=1e-5) and accuracy == scores.accuracy
    assert found["lambdas"] == [0, 0.25, 0.5, 0.75, 1]
    assert found["end_losses"] == [found["losses"][0], found["losses"][-1]]
    assert found["barrier"] == barrier(*found["end_losses"], found["losses"], found["lambdas"])


def test_bad_curves(tmp_path: Path) -> None:
    gpt, other = folder(tmp_path / "a", "GPT2LMHeadModel"), folder(tmp_path / "b", "GPT2LMHeadModel", n_embd=24)
    with pytest.raises(ValueError, match="points 1: it must be greater than or equal to 2"):
        curve(gpt, gpt, words(), points=1)
    with pytest.raises(ValueError, match="has the shapes"):
        curve(gpt, other, words())
    with pytest.raises(ValueError, match="is a gpt2 model, for which there is no image-classification"):
        curve(gpt, gpt, Task("image-classification", ()))
