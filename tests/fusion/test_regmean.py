# SPDX-License-Identifier: Apache-2.0
"""RegMean against the gradient of the objective it solves; Gram matrices against recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import opened
from torch import Tensor
from zoo import CASES, inputs

from onebasin.engine import Means
from onebasin.fusion.method import Sources
from onebasin.fusion.regmean import Regression, input_grams, regression_mean
from onebasin.fusion.statistics import Statistics, measured
from onebasin.fusion.tensors import merged_tensors
from onebasin.models import Rewritten
from onebasin.running.loaded import loaded_model
from onebasin.running.trace import hooks
from onebasin.running.trial import scrambling

CASE = ["BertForMaskedLM", "GPT2LMHeadModel", "ViTForImageClassification", "LlamaForCausalLM"]


def data(case: str, first: int, count: int = 10) -> list[dict[str, Tensor]]:
    return [inputs(CASES[case]().double(), seed) for seed in range(first, first + count)]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASE)
def test_the_solution_has_zero_gradient_of_the_regression(case: str, count: int, tmp_path: Path) -> None:
    """With all of the Gram matrices (shrink 1): d/dW sum_i w_i mean |x W - x W_i|^2 over the inputs, by autograd."""
    found = opened(tmp_path, case, count)
    weights = [0.5, 0.3, 0.2][:count]
    stocks = [loaded_model(model, dtype=torch.float64) for model in found]
    batches = [data(case, 100 * i) for i in range(count)]
    grams = [input_grams(stock, some) for stock, some in zip(stocks, batches, strict=True)]
    solve = Regression([gram for gram, _, _ in grams], grams[0][1], shrink=1.0)
    named = dict(merged_tensors(Sources(found, weights), solve, Means(precision="float64", workers=1)))
    student = loaded_model(found[0], dtype=torch.float64)
    entries = student.signature.tensors
    seen = [inputs_of(stock, solve.jitter, some) for stock, some in zip(stocks, batches, strict=True)]
    assert len(solve.jitter) >= 7
    for role, jitter in solve.jitter.items():
        module = student.module(role)
        merged = named[entries[role].name].clone().requires_grad_()
        objective, scale = torch.zeros(()).double(), 0.0
        for weight, stock, rows in zip(weights, stocks, seen, strict=True):
            x, mask = rows[role]
            bias = torch.zeros(1).double()
            ours, theirs = (apply(module, x, matrix, bias) for matrix in (merged, stock.parameter[role]))
            gap = (ours - theirs)[mask] if mask is not None and mask.shape == ours.shape[:2] else ours - theirs
            gap = gap.flatten(2).mT if gap.dim() == 4 else gap
            rows_seen = gap.reshape(-1, gap.shape[-1])
            objective = objective + weight * rows_seen.square().sum(-1).mean()
            scale = max(scale, float(weight * theirs.square().mean()))
        (gradient,) = torch.autograd.grad(objective, merged)
        assert jitter == 1e-10
        assert gradient.abs().max() < 1e-6 * max(1.0, scale), role
    assert any(bool((named[entries[r].name] - sum(w * s.parameter[r] for w, s in zip(weights, stocks, strict=True)))
                    .abs().max() > 1e-3) for r in solve.jitter)  # fmt: skip


def apply(module: torch.nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    kind = type(module).__name__
    if kind == "Conv2d":
        return torch.nn.functional.conv2d(x, weight, stride=module.stride)  # type: ignore[arg-type]
    return x @ (weight if kind == "Conv1D" else weight.mT)


def inputs_of(stock, roles, batches) -> dict[str, tuple[Tensor, Tensor | None]]:  # type: ignore[no-untyped-def]
    """What every layer reads, all batches joined, and which positions are no padding."""
    seen: dict[str, list[Tensor]] = {role: [] for role in roles}
    looks = {stock.owner[role]: (lambda x, y, role=role: seen[role].append(x.detach().clone())) for role in roles}
    with hooks(stock, looks), torch.no_grad():
        for batch in batches:
            stock.model(**batch)
    mask = torch.cat([batch["attention_mask"] for batch in batches]).bool() if "attention_mask" in batches[0] else None
    return {role: (torch.cat(rows), mask) for role, rows in seen.items()}


def test_shrinking_and_inputs_that_never_come() -> None:
    """The gradient of the shrunk objective, by autograd; an input that is always zero keeps the average."""
    x = [torch.randn(30, 6).double() for _ in range(2)]
    for one in x:
        one[:, 2] = 0
    w = [torch.randn(6, 4).double() for _ in range(2)]
    grams = [one.mT @ one / 30 for one in x]
    solved, jitter = regression_mean(grams, w, [1.0, 3.0], shrink=0.9)
    free = solved.clone().requires_grad_()
    losses = []
    for share, gram, matrix in zip([0.25, 0.75], grams, w, strict=True):
        gap = free - matrix
        whole, diagonal = (gap * (gram @ gap)).sum(), (gram.diagonal()[:, None] * gap.square()).sum()
        losses.append(share * (0.9 * whole + 0.1 * diagonal))
    (gradient,) = torch.autograd.grad(sum(losses), free)
    assert jitter == 1e-10 and gradient.abs().max() < 1e-8
    assert torch.allclose(solved[2], 0.25 * w[0][2] + 0.75 * w[1][2])


def test_equal_grams_and_equal_models_give_the_average() -> None:
    x, w = torch.randn(30, 5).double(), [torch.randn(5, 3).double() for _ in range(3)]
    gram = x.mT @ x / 30
    solved, _ = regression_mean([gram] * 3, w, [1.0, 1.0, 2.0])
    assert torch.allclose(solved, (w[0] + w[1] + 2 * w[2]) / 4, atol=1e-8)


@pytest.mark.parametrize("level", ["paper", "full", "invertible"])
@pytest.mark.parametrize("case", [*CASE, "BartForConditionalGeneration", "Qwen3ForCausalLM-mha-biases"])
def test_grams_move_through_an_alignment_exactly(case: str, level: str, tmp_path: Path) -> None:
    """g G g^T is what the rewritten model's inputs give, for random elements in every space."""
    from onebasin.models import Canonical

    checkpoint = Canonical(opened(tmp_path, case, 1)[0], torch.float64)
    signature = checkpoint.signature
    alignment = scrambling(signature, level)
    batches = data(case, 0, 2)
    before, columns, count = input_grams(loaded_model(checkpoint, dtype=torch.float64), batches)
    after, _, _ = input_grams(
        loaded_model(Rewritten(checkpoint, alignment, torch.float64), dtype=torch.float64), batches
    )
    moved = measured("gram", before, count, columns, checkpoint).moved(signature, alignment)
    assert moved.tensors.keys() == after.keys()
    assert any(not torch.allclose(before[role], after[role]) for role in after)
    for role, gram in after.items():
        assert torch.allclose(moved.tensors[role], gram, atol=1e-8 * float(gram.abs().max())), role


def test_statistics_are_read_back_and_know_their_model(tmp_path: Path) -> None:
    one, other = opened(tmp_path, "GPT2LMHeadModel")
    grams, columns, count = input_grams(loaded_model(one, dtype=torch.float64), data("GPT2LMHeadModel", 0, 1))
    saved = measured("gram", grams, count, columns, one)
    saved.save(tmp_path / "s")
    back = Statistics.load(tmp_path / "s")
    assert (back.kind, back.samples, back.columns, back.model) == ("gram", 2, columns, Path(one.name).name)
    assert all(torch.equal(back.tensors[role], gram) for role, gram in grams.items())
    assert back.of(one) is back
    with pytest.raises(ValueError, match="were not measured on"):
        back.of(other)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot read the statistics"):
        Statistics.load(tmp_path / "junk")
    with pytest.raises(ValueError, match="contains no statistics"):
        Statistics.load(tmp_path / "0" / "model.safetensors")


def test_bad_data_end_in_one_sentence(tmp_path: Path) -> None:
    stock = loaded_model(opened(tmp_path, "BertForMaskedLM", 1)[0])
    with pytest.raises(ValueError, match="at least one batch"):
        input_grams(stock, [])
    batch = inputs(CASES["BertForMaskedLM"]())
    with pytest.raises(ValueError, match="padding alone"):
        input_grams(stock, [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}])
    with pytest.raises(ValueError, match=r"shrink .*: it must"):
        Regression([], frozenset(), 1.5)
