# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pairs import folder
from stopped import stopped_and_continued
from torch import Tensor
from zoo import CASES, inputs, named_outputs

from onebasin.data.teaching import Forward, Outputs, divergence, forward_of
from onebasin.engine import Means
from onebasin.fusion.refine import Refining, refine
from onebasin.models import Folder
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch

CASE = ["GPT2LMHeadModel", "BertForMaskedLM", "ViTForImageClassification", "ViTModel", "AlbertForMaskedLM",
        "LlamaForCausalLM", "MixtralForCausalLM"]  # fmt: skip
Batches = list[dict[str, Tensor]]
EXACT = Means(precision="float64")


def models(case: str, where: Path) -> tuple[list[Folder], Batches]:
    """Two teachers, their average, and batches."""
    found = [Folder(folder(where / str(apart), case, 1, apart=apart, dtype=torch.float64)) for apart in (0, 0.1, 0.05)]
    return found, [inputs(CASES[case]().double(), seed) for seed in range(8)]


def loss(student: dict[str, Tensor], teachers: list[Folder], batch: dict[str, Tensor], weights: list[float]) -> float:
    theirs = [named_outputs(loaded_model(teacher, dtype=torch.float64).model, batch) for teacher in teachers]
    student = {name: value for name, value in student.items() if "logits" in name} or student
    return float(divergence(student, theirs, weights, batch))


@pytest.mark.parametrize("case", CASE)
def test_the_loss_falls_and_is_that_of_the_model_returned(case: str, tmp_path: Path) -> None:
    (a, b, merged), batches = models(case, tmp_path)
    weights = [0.3, 0.7]
    how = Refining(steps=30, lr=5e-3, weights=weights)
    found = refine(merged, [a, b], batches[:6], how, EXACT, held_out=batches[6:])
    start = loaded_model(merged, dtype=torch.float64)
    for model, expected in ((start.model, found.losses[0]), (found.model, min(found.losses.values()))):
        measured = [loss(named_outputs(model, batch), [a, b], batch, weights) for batch in batches[6:]]
        assert sum(measured) / 2 == pytest.approx(expected, rel=1e-9)
    assert min(found.losses.values()) < found.losses[0]
    again = loaded_model(merged, dtype=torch.float64)
    again.fill(found.tensors.__getitem__)
    for name, value in named_outputs(found.model, batches[0]).items():
        assert torch.equal(named_outputs(again.model, batches[0])[name], value)
    assert not any(parameter.requires_grad for parameter in found.model.parameters()) and not found.model.training


def test_a_model_that_is_its_own_teacher_stays(tmp_path: Path) -> None:
    (a, _, _), batches = models("GPT2LMHeadModel", tmp_path)
    found = refine(a, [a], batches, Refining(steps=5), EXACT)
    assert found.losses[0] < 1e-14
    for role, tensor in found.tensors.items():
        assert torch.allclose(tensor, a.read(role, torch.float64), atol=1e-6), role


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "ViTModel"])
def test_mixed_precision_multiplies_in_bfloat16_and_keeps_weights_in_float32(case: str, tmp_path: Path) -> None:
    (a, b, merged), batches = models(case, tmp_path)
    seen = set()
    watch = torch.nn.modules.module.register_module_forward_hook(lambda _, __, out: seen.update([type_of(out)]))
    with watch:
        found = refine(merged, [a, b], batches[:6], Refining(steps=30, lr=5e-3, mixed=True), held_out=batches[6:])
    assert torch.bfloat16 in seen
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}
    exact = [loss_of(model, [a, b], batches[6:]) for model in (loaded_model(merged).model, found.model)]
    assert exact[1] < exact[0]
    # bfloat16 keeps eight bits of every product.
    assert exact == pytest.approx([found.losses[0], found.losses[found.step]], rel=0.05)


def test_teachers_read_masked_texts_once_for_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rounds take the texts as they are; then other tokens are hidden. The student reads all."""
    (a, b, merged), _ = models("BertForMaskedLM", tmp_path)
    texts, generator = [], torch.Generator().manual_seed(0)
    for _ in range(4):
        shown = torch.randint(2, a.config["vocab_size"], (4, 12), generator=generator)
        hidden = torch.rand(shown.shape, generator=generator) < 0.3
        texts.append({"input_ids": shown.masked_fill(hidden, 1), "labels": shown.masked_fill(~hidden, -100)})
    read: list[Tensor] = []

    def recorded(stock: LoadedModel, mixed: bool = False) -> Forward:
        forward = forward_of(stock, mixed)

        def one(tensors: Mapping[str, Tensor], batch: Batch) -> Outputs:
            read.append(batch["input_ids"])
            return forward(tensors, batch)

        return one

    monkeypatch.setattr("onebasin.fusion.refine.forward_of", recorded)
    refine(merged, [a, b], texts[:3], Refining(steps=18), EXACT, held_out=texts[3:])
    held = texts[3]["input_ids"]
    here = [tuple(ids.flatten().tolist()) for ids in read if len(ids) == len(held) and not torch.equal(ids, held)]
    kinds = Counter(here)
    assert len(kinds) == 3 * 3  # three texts, hidden in three ways
    assert set(kinds.values()) == {2 + 2}  # two teachers once, and the student twice


def type_of(output: object) -> torch.dtype | None:
    return output.dtype if isinstance(output, Tensor) else None


def loss_of(model: torch.nn.Module, teachers: list[Folder], batches: Batches) -> float:
    model.double()
    return sum(loss(named_outputs(model, batch), teachers, batch, [0.5, 0.5]) for batch in batches) / len(batches)


@pytest.mark.parametrize("stop", [3, 12, 20])
def test_an_interrupted_run_ends_as_an_undisturbed_one(stop: int, tmp_path: Path) -> None:
    (a, b, merged), batches = models("GPT2LMHeadModel", tmp_path)
    whole = refine(merged, [a, b], batches, Refining(steps=20))
    how = Refining(steps=20, checkpoint=str(tmp_path / "run"))
    resumed, again = stopped_and_continued(
        lambda progress: refine(merged, [a, b], batches, how, progress=progress), stop
    )
    assert again == 20 - 2 * ((stop - 1) // 2)  # what was saved, at every second step, is not done twice
    assert resumed.losses == whole.losses and resumed.step == whole.step
    assert all(torch.equal(resumed.tensors[role], tensor) for role, tensor in whole.tensors.items())
    with pytest.raises(ValueError, match="belongs to another run"):
        refine(a, [a, b], batches, how)


def test_bad_input_is_named(tmp_path: Path) -> None:
    (a, b, merged), batches = models("GPT2LMHeadModel", tmp_path)
    with pytest.raises(ValueError, match="at least one teacher"):
        refine(merged, [], batches)
    with pytest.raises(ValueError, match="positive weights"):
        refine(merged, [a, b], batches, Refining(weights=[1.0]))
    with pytest.raises(ValueError, match="it must be greater than"):
        Refining(lr=0.0)
    with pytest.raises(ValueError, match="at least two batches"):
        refine(merged, [a, b], batches[:1])
