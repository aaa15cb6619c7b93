# SPDX-License-Identifier: Apache-2.0
"""Fisher diagonals against analytic ones, exact expectations over labels and gradients taken one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pairs import opened
from torch import Tensor, nn
from zoo import CASES, inputs, save

from onebasin.engine import Means
from onebasin.fusion.fisher import Fisher, fisher_diagonal, fisher_mean, unpadded
from onebasin.fusion.method import Sources
from onebasin.fusion.statistics import measured
from onebasin.fusion.tensors import merged_tensors
from onebasin.models import Folder, Rewritten
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.symmetry import Alignment, acting_groups

CASE = ["BertForSequenceClassification", "GPT2LMHeadModel", "ViTForImageClassification", "LlamaForCausalLM"]


def stock(case: str, folder: Path, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return loaded_model(Folder(save(CASES[case]().double(), folder)), dtype=dtype, attention="eager")


def data(case: str, count: int = 3) -> list[dict[str, Tensor]]:
    return [inputs(CASES[case]().double(), seed) for seed in range(count)]


class Linear(nn.Module):
    """y = W x + b, with logits, or without: a normal distribution around y."""

    def __init__(self, logits: bool, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs, dtype=torch.float64)
        self.config = SimpleNamespace()
        self.device, self.name = torch.device("cpu"), "logits" if logits else "last_hidden_state"

    def forward(self, pixel_values: Tensor, return_dict: bool) -> dict[str, Tensor]:
        return {self.name: self.layer(pixel_values)}


def linear(logits: bool = False, outputs: int = 3) -> LoadedModel:
    model = Linear(logits, outputs)
    parameters = {"weight": model.layer.weight, "bias": model.layer.bias}
    return LoadedModel(model, None, dict.fromkeys(parameters, "layer"), parameters)  # type: ignore[arg-type]


def test_a_linear_gaussian_model_has_its_analytic_information() -> None:
    """y ~ N(W x + b, 1): E (d log p / d W_oi)^2 = x_i^2 and 1 for b; the mean over all draws is within 5 sigma."""
    model, draws = linear(), 5000
    x = torch.randn(2, 4, dtype=torch.float64)
    found, count = fisher_diagonal(model, [{"pixel_values": x.repeat(draws // 2, 1)}], Fisher(draws=2), chunk=2500)
    assert count == draws
    expected = x.square().mean(0).expand(3, 4)
    error = 5 * (2 * x.pow(4).sum(0) / 4 / draws).sqrt()  # the variance of the square of a normal variable is 2
    assert ((found["weight"] - expected).abs() < error).all()
    assert ((found["bias"] - 1).abs() < 5 * (2 / 2 / draws) ** 0.5).all()


def test_labels_drawn_from_a_softmax_have_the_exact_expectation() -> None:
    model, draws = linear(logits=True), 5000
    x = torch.randn(2, 4, dtype=torch.float64)
    found, _ = fisher_diagonal(model, [{"pixel_values": x.repeat(draws, 1)}], chunk=2500)
    probability = model.model(x, True)["logits"].softmax(-1).detach()
    exact, variance = torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for row, p in zip(x, probability, strict=True):
        of_label = torch.stack([((one - p).unsqueeze(1) * row).square() for one in torch.eye(3).double()])
        mean = (p[:, None, None] * of_label).sum(0)
        exact += mean / 2
        variance += (p[:, None, None] * (of_label - mean).square()).sum(0) / 4 / draws
    assert ((found["weight"] - exact).abs() < 5 * variance.sqrt()).all()


def test_two_labels_at_once_are_drawn_each_by_itself() -> None:
    model, draws = linear(logits=True, outputs=2), 5000
    model.model.config.problem_type = "multi_label_classification"
    x = torch.randn(1, 4, dtype=torch.float64)
    found, _ = fisher_diagonal(model, [{"pixel_values": x.repeat(draws, 1)}], chunk=2500)
    p = model.model(x, True)["logits"][0].sigmoid().detach()
    spread = (p * (1 - p) * (1 - 2 * p).square() / draws).sqrt().unsqueeze(1) * x.square()
    assert ((found["weight"] - (p * (1 - p)).unsqueeze(1) * x.square()).abs() < 5 * spread + 1e-12).all()


@pytest.mark.parametrize("case", [*CASE, "BloomForCausalLM"])  # whose GELU cannot be vectorised
def test_given_labels_give_the_squares_of_single_gradients(case: str, tmp_path: Path) -> None:
    """Against plain backward passes with the class's own loss, example by example, on padded batches."""
    model, batches = stock(case, tmp_path), data(case)
    causal = "LM" in case
    for number, batch in enumerate(batches):
        if causal:
            batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
        else:
            batch["labels"] = torch.tensor([number, (number + 1) % 3]) % 3
    found, count = fisher_diagonal(model, batches, Fisher(labels="given"), causal=causal, chunk=2)
    expected = {role: torch.zeros_like(parameter) for role, parameter in model.parameter.items()}
    for parameter in model.parameter.values():
        parameter.requires_grad_()
    for batch in batches:
        for row in range(2):
            one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            counted = int((one["labels"][:, 1:] != -100).sum()) if causal else 1
            model.model.zero_grad()
            (counted * model.model(**one).loss).backward()
            for role, parameter in model.parameter.items():
                expected[role] += parameter.grad.square() / 6
    assert count == 6
    for role, tensor in expected.items():
        assert torch.allclose(found[role], tensor, atol=1e-9 * float(tensor.abs().max()) + 1e-14), role


@pytest.mark.parametrize("case", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_the_size_of_batches_and_chunks_changes_nothing(case: str, tmp_path: Path) -> None:
    model, batches = stock(case, tmp_path), data(case)
    for batch in batches:
        batch["labels"] = batch["input_ids"]
    whole, _ = fisher_diagonal(model, batches, Fisher(labels="given"), chunk=6)
    parts, _ = fisher_diagonal(model, batches, Fisher(labels="given"), chunk=1)
    for role in whole:
        assert torch.allclose(whole[role], parts[role], atol=1e-10 * float(whole[role].max()) + 1e-20)


def test_one_by_one_where_the_model_cannot_be_vectorised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = stock("BertForSequenceClassification", tmp_path), data("BertForSequenceClassification")
    for batch in batches:
        batch["labels"] = torch.tensor([0, 2])
    expected, _ = fisher_diagonal(model, batches, Fisher(labels="given"))
    forward = type(model.model).forward

    def looking(self, **given):  # type: ignore[no-untyped-def]
        assert float(given["input_ids"].sum()) >= 0
        return forward(self, **given)

    monkeypatch.setattr(type(model.model), "forward", looking)
    found, _ = fisher_diagonal(model, batches, Fisher(labels="given"))
    for role in expected:
        assert torch.allclose(found[role], expected[role], atol=1e-10 * float(expected[role].max()) + 1e-20)


def test_permutations_and_scales_carry_a_diagonal_along(tmp_path: Path) -> None:
    """F moved through an alignment is F measured on the aligned model; a rotation is refused."""
    checkpoint = Folder(save(CASES["BertForMaskedLM-relu"]().double(), tmp_path))
    signature, generator = checkpoint.signature, torch.Generator().manual_seed(1)
    groups = {
        root: group
        for root, group in acting_groups(signature, "full").items()
        if group.dimension(3) < 2 or signature.spaces[root].part == "ffn"
    }
    assert any(type(group).__name__ == "ScaledPermutation" for group in groups.values())
    batches = data("BertForMaskedLM-relu")
    for batch in batches:
        batch["labels"] = batch["input_ids"]
    elements = {root: group.random(signature.spaces[root].size,
                                   tuple(signature.sizes[outer] for outer in signature.spaces[root].batch), generator)
                for root, group in groups.items()}  # fmt: skip
    alignment = Alignment(elements, {root: signature.spaces[root].batch for root in elements})
    before, after = (
        fisher_diagonal(
            loaded_model(Rewritten(checkpoint, moved, torch.float64), dtype=torch.float64, attention="eager"),
            batches,
            Fisher(labels="given"),
        )
        for moved in (Alignment(), alignment)
    )
    moved = measured("fisher", before[0], before[1], (), checkpoint).moved(signature, alignment)
    assert any(not torch.allclose(before[0][role], after[0][role]) for role in after[0])
    for role, tensor in after[0].items():
        assert torch.allclose(moved.tensors[role], tensor, rtol=1e-7, atol=1e-20), role
    root, group = next((r, g) for r, g in acting_groups(signature, "paper").items() if g.dimension(3) == 3)
    rotation = Alignment({root: group.random(4, (3,), generator)}, {root: signature.spaces[root].batch})
    with pytest.raises(ValueError, match="does not survive the rotation"):
        measured("fisher", before[0], before[1], (), checkpoint).moved(signature, rotation)


@pytest.mark.parametrize("count", [2, 3])
def test_the_merged_model_minimises_the_sum_of_quadratic_losses(count: int, tmp_path: Path) -> None:
    """The gradient of sum_i w_i (F_i + eps m) (theta - theta_i)^2 is zero; where nothing was seen, the average."""
    models = opened(tmp_path, "GPT2LMHeadModel", count, apart=0.1)
    diagonals = [fisher_diagonal(loaded_model(model, dtype=torch.float64, attention="eager"),
                                 data("GPT2LMHeadModel"))[0] for model in models]  # fmt: skip
    for diagonal in diagonals:
        diagonal["wpe.weight"][3:] = 0
    weights = [0.2, 0.5, 0.3][:count]
    roles = {role for role, entry in models[0].signature.tensors.items() if entry.alias is None}
    named = dict(
        merged_tensors(Sources(models, weights), fisher_mean(diagonals, 1e-6), Means(precision="float64", workers=1))
    )
    every = torch.cat([f.flatten() for diagonal in diagonals for f in diagonal.values()])
    for role in roles:
        merged = named[models[0].signature.tensors[role].name]
        pull = sum(
            w * (d[role] + 1e-6 * every.mean()) * (merged - model.read(role, torch.float64))
            for w, d, model in zip(weights, diagonals, models, strict=True)
        )
        assert torch.allclose(pull, torch.zeros_like(pull), atol=1e-12 * max(1.0, float(diagonals[0][role].max())))
    table = [model.read("wpe.weight", torch.float64) for model in models]
    plain = sum(w * t for w, t in zip(weights, table, strict=True)) / sum(weights)
    assert torch.allclose(named["transformer.wpe.weight"][3:], plain[3:], atol=1e-12)


def test_normalised_diagonals_do_not_depend_on_their_scale() -> None:
    """A model that is a hundred times surer counts the same; without it, the other wins."""
    tensors = [torch.zeros(6).double(), torch.ones(6).double()]
    diagonals = [{"w": torch.rand(6).double() + 0.5} for _ in tensors]
    entry, weights = SimpleNamespace(role="w", alias=None), [0.5, 0.5]
    found = [
        fisher_mean([diagonals[0], {"w": scale * diagonals[1]["w"]}], 1e-6, normalize)(tensors, weights, None, entry)
        for scale in (1.0, 0.01)
        for normalize in (True, False)
    ]
    assert torch.allclose(found[0], found[2], atol=1e-5)
    assert (found[3] < found[1] / 10).all()


def test_bad_data_end_in_one_sentence() -> None:
    model = linear(logits=True)
    x = {"pixel_values": torch.randn(2, 4, dtype=torch.float64)}
    with pytest.raises(ValueError, match="at least one example"):
        fisher_diagonal(model, [])
    with pytest.raises(ValueError, match="given labels need data with labels"):
        fisher_diagonal(model, [x], Fisher(labels="given"))
    with pytest.raises(ValueError, match="labels 'true': choose from"):
        Fisher(labels="true")
    with pytest.raises(ValueError, match="nothing to predict"):
        fisher_diagonal(model, [{**x, "labels": torch.tensor([-100, -100])}], Fisher(labels="given"))
    with pytest.raises(ValueError, match="padding alone"):
        list(unpadded({"input_ids": torch.ones(1, 3), "attention_mask": torch.zeros(1, 3)}))
    with pytest.raises(ValueError, match="12 rows for 3 examples"):
        list(unpadded({"pixel_values": torch.ones(12, 2), "grid_thw": torch.ones(3, 3)}))
    with pytest.raises(ValueError, match=r"eps .*: it must"):
        fisher_mean([], 0)
