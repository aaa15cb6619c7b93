# SPDX-License-Identifier: Apache-2.0
"""Models whose weights are made when they are used."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, inputs, named_outputs, one_of_each_class, save

from onebasin.models import Folder, ModelError
from onebasin.running.lazy_weights import Awaited, await_weights, placed, stand_ins
from onebasin.running.loading import load, streamed
from onebasin.running.verification import compare

DTYPE = torch.float64
# What a class puts together from several tensors, takes apart, or copies into memory of its own, it holds.
HOLDING = ("moe", "mixtral", "deepseek", "swiglu", "xlnet")


# A class once, and what other settings make it put together.
@pytest.mark.parametrize("case", [*one_of_each_class(), "Dinov2ForImageClassification-swiglu", "Wav2Vec2ForCTC-stable"])
def test_it_computes_what_the_whole_model_computes(case: str, saved: Callable[[str], Folder]) -> None:
    folder = saved(case)
    whole, left_out = load(folder, DTYPE)
    model, unused = streamed(folder, None, DTYPE, "cpu")
    assert unused == left_out
    wanted = named_outputs(whole, inputs(whole))
    got = named_outputs(model, inputs(whole))
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-9), name
    numbers = sum(parameter.numel() for parameter in model.parameters())
    held = sum(parameter.numel() for parameter in model.parameters() if not isinstance(parameter, Awaited))
    assert held < 0.1 * numbers or any(word in case.lower() for word in HOLDING), (
        f"{case} holds {held} of its {numbers} numbers"
    )


def test_a_copy_of_a_stand_in_is_found() -> None:
    """Its numbers mean nothing: a class that copies cannot be run so, whole, in parts or as a buffer."""
    like = {"weight": torch.empty(6, 4), "bias": torch.empty(6)}

    def awaits(change: str) -> bool:
        given = stand_ins(like, DTYPE)
        layer = nn.Linear(4, 6, dtype=DTYPE)
        layer.weight, layer.bias = nn.Parameter(given["weight"]), nn.Parameter(given["bias"])
        if change == "whole":
            layer.weight = nn.Parameter(given["weight"].clone())
        elif change == "part":
            layer.weight = nn.Parameter(given["weight"][3:].clone())
        elif change == "buffer":
            layer.register_buffer("shift", given["bias"].clone())
        return await_weights(layer, given, lambda name: torch.zeros_like(like[name]), DTYPE, "cpu")

    assert awaits("nothing")
    assert not any(map(awaits, ("whole", "part", "buffer")))


def test_who_kept_a_stand_in_besides_cannot_use_it() -> None:
    given = stand_ins({"weight": torch.empty(6, 4)}, DTYPE)
    layer = nn.Linear(4, 6, bias=False, dtype=DTYPE)
    layer.weight = kept = nn.Parameter(given["weight"])
    assert placed(layer, given) == {"weight"}
    assert await_weights(layer, given, lambda _: torch.eye(6, 4, dtype=DTYPE), DTYPE, "cpu")
    x = torch.randn(2, 4, dtype=DTYPE)
    assert torch.equal(layer(x)[:, :4], x)
    with pytest.raises(RuntimeError):
        nn.functional.linear(x, kept)


def test_tensors_are_let_go_once_they_were_used() -> None:
    like = {str(number): torch.empty(4, 4) for number in range(20)}
    given = stand_ins(like, DTYPE)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=DTYPE) for _ in like))
    for layer, tensor in zip(layers, given.values(), strict=True):
        layer.weight = nn.Parameter(tensor)  # type: ignore[assignment]
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = made = 0

    def make(name: str) -> Tensor:
        nonlocal most, made
        tensor = torch.eye(4, dtype=DTYPE)
        alive.add(tensor)
        most, made = max(most, len(alive)), made + 1
        return tensor

    assert await_weights(layers, given, make, DTYPE, "cpu")
    x = torch.randn(2, 4, dtype=DTYPE)
    with torch.no_grad():
        assert torch.equal(layers(x), x)
    assert most == 1 and made == 20


def test_a_model_that_does_not_run_so_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a model's own look into memory by themselves."""
    folder = save(CASES["BertModel"](), tmp_path / "model")
    looked: list[int] = []

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        looked.append(self.dense.weight.data_ptr())  # type: ignore[union-attr, operator]
        return hidden_states[:, 0]

    monkeypatch.setattr("transformers.models.bert.modeling_bert.BertPooler.forward", forward)
    with pytest.raises(RuntimeError), torch.no_grad():
        model, _ = streamed(Folder(folder), None, DTYPE, "cpu")
        model(**inputs(model))
    assert not looked
    assert compare(folder, folder).same and len(looked) == 2


def test_models_that_do_not_compare_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found without holding them would be found again, in memory that there may not be."""
    monkeypatch.setattr("onebasin.running.verification.held", lambda *_: pytest.fail("held"))
    case = CASES["BertForSequenceClassification"]
    folders = [save(case(num_labels=labels), tmp_path / str(labels)) for labels in (3, 4)]
    with pytest.raises(ModelError, match="differ in the shape of 'logits'"):
        compare(*folders)
