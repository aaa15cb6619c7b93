# SPDX-License-Identifier: Apache-2.0
"""Models with experts: what each expert is sent, counted by hand, and merging by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import opened, scrambled
from torch import Tensor, nn
from zoo import CASES, inputs

import onebasin
from onebasin.engine import Means
from onebasin.fusion.couplings import OptimalTransport, transport
from onebasin.fusion.fisher import Fisher, fisher_diagonal
from onebasin.fusion.method import Sources
from onebasin.fusion.progressive import ProgressiveMerge, merge_progressively
from onebasin.fusion.regmean import Regression, input_grams
from onebasin.fusion.statistics import measured
from onebasin.fusion.tensors import merged_tensors
from onebasin.jobs.aligning import align_all
from onebasin.jobs.options import Options
from onebasin.models import Canonical, Folder, ModelError, Rewritten
from onebasin.running import twins
from onebasin.running.float64 import OnlyFloat64
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trial import scrambling

CASE = ["MixtralForCausalLM", "OlmoeForCausalLM"]


def stock(model: Folder) -> LoadedModel:
    return loaded_model(model, dtype=torch.float64, attention="eager")


def data(case: str, first: int = 0, count: int = 3) -> list[dict[str, Tensor]]:
    """Padded batches."""
    return [inputs(CASES[case]().double(), first + seed) for seed in range(count)]


def layers_of_experts(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def read(stock: LoadedModel, batches: list[dict[str, Tensor]]) -> dict[tuple[int, int, str], Tensor]:
    """(layer, expert, up or down) -> rows, by the router's choice and the formula of a gated FFN, without padding."""
    rows: dict[tuple[int, int, str], list[Tensor]] = {}
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            seen: list[tuple[int, Tensor, Tensor]] = []

            def note(layer: int, seen: list[tuple[int, Tensor, Tensor]] = seen) -> Any:
                return lambda module, args: seen.append((layer, args[0], args[1]))

            experts = enumerate(layers_of_experts(stock.model))
            handles = [module.register_forward_pre_hook(note(layer)) for layer, module in experts]
            with OnlyFloat64():
                stock.model(input_ids=batch["input_ids"][row : row + 1, : int(batch["attention_mask"][row].sum())])
            for handle in handles:
                handle.remove()
            for layer, hidden, chosen in seen:
                module = layers_of_experts(stock.model)[layer]
                for expert in range(module.num_experts):
                    x = hidden[(chosen == expert).any(-1)]
                    gate, up = (x @ module.gate_up_proj[expert].mT).chunk(2, -1)
                    rows.setdefault((layer, expert, "up"), []).append(x)
                    rows.setdefault((layer, expert, "down"), []).append(module.act_fn(gate) * up)
    return {key: torch.cat(found).detach() for key, found in rows.items()}


def place(role: str) -> tuple[int, str]:
    """A role's layer, and whether its matrix leads up or down."""
    return int(role.split(".")[1]), "down" if "w2" in role or "down_proj" in role else "up"


@pytest.mark.parametrize("case", CASE)
def test_parts_are_where_the_tensors_lie(case: str, tmp_path: Path) -> None:
    """A model given its own tensors by role has its own parameters; other jobs still refuse such a model."""
    model = opened(tmp_path, case, 1)[0]
    found = stock(model)
    assert found.parts and set(found.roles) == {r for r, entry in model.signature.tensors.items() if entry.stored}
    held = dict(found.model.named_parameters())
    again = found.state({role: model.read(role, torch.float64) for role in found.roles})
    assert again.keys() == held.keys() and all(torch.equal(again[name], tensor) for name, tensor in held.items())
    assert all(torch.equal(found.tensor(role), model.read(role, torch.float64)) for role in found.roles)
    with pytest.raises(ModelError, match="in another form than the folder"):
        loaded_model(model, experts=False)


@pytest.mark.parametrize("case", CASE)
def test_grams_of_experts_are_those_of_the_tokens_that_they_are_sent(case: str, tmp_path: Path) -> None:
    found, batches = stock(opened(tmp_path, case, 1)[0]), data(case)
    grams, columns, count = input_grams(found, batches)
    rows, tokens = read(found, batches), sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert count == sum(len(batch["input_ids"]) for batch in batches) and found.parts.keys() <= columns
    for role in found.parts:
        layer, kind = place(role)
        for expert, gram in enumerate(grams[role]):
            x = rows[layer, expert, kind]
            assert torch.allclose(gram, x.mT @ x / tokens, atol=1e-12), (role, expert)


@pytest.mark.parametrize("case", CASE)
def test_grams_of_experts_move_through_an_alignment_exactly(case: str, tmp_path: Path) -> None:
    model = Canonical(opened(tmp_path, case, 1)[0], torch.float64)
    signature = model.signature
    alignment = scrambling(signature, "full")
    how = {"dtype": torch.float64}
    before, columns, count = input_grams(loaded_model(model, **how), data(case))
    after, _, _ = input_grams(loaded_model(Rewritten(model, alignment, torch.float64), **how), data(case))
    moved = measured("gram", before, count, columns, model).moved(signature, alignment)
    assert any(gram.dim() == 3 and not torch.allclose(gram, before[role]) for role, gram in after.items())
    for role, gram in after.items():
        assert torch.allclose(moved.tensors[role], gram, atol=1e-8 * float(gram.abs().max())), role


def test_every_expert_has_zero_gradient_of_its_regression(tmp_path: Path) -> None:
    case = CASE[0]
    models = opened(tmp_path, case)
    stocks, batches, weights = [stock(model) for model in models], [data(case, 100 * i) for i in (0, 1)], [0.7, 0.3]
    grams = [input_grams(one, some) for one, some in zip(stocks, batches, strict=True)]
    solve = Regression([gram for gram, _, _ in grams], grams[0][1], shrink=1.0)
    named = dict(merged_tensors(Sources(models, weights), solve, Means(precision="float64", workers=1)))
    seen = [read(one, some) for one, some in zip(stocks, batches, strict=True)]
    tokens = [sum(int(batch["attention_mask"].sum()) for batch in some) for some in batches]
    for role in stocks[0].parts:
        layer, kind = place(role)
        entry = models[0].signature.tensors[role]
        for expert, name in enumerate(entry.names):
            merged = named[name].clone().requires_grad_()
            objective = torch.zeros(()).double()
            for weight, one, rows, count in zip(weights, stocks, seen, tokens, strict=True):
                x, own = rows[layer, expert, kind], one.parts[role][expert].of(one.model)
                objective = objective + weight * (x @ (merged - own).mT).square().sum() / count
            (gradient,) = torch.autograd.grad(objective, merged)
            assert gradient.abs().max() < 1e-7, (role, expert)
            assert not torch.allclose(merged, sum(w * s.parts[role][expert].of(s.model) for w, s in zip(
                weights, stocks, strict=True)), atol=1e-3)  # fmt: skip


def test_fisher_diagonals_of_experts_are_the_squares_of_single_gradients(tmp_path: Path) -> None:
    case = CASE[0]
    found, batches = stock(opened(tmp_path, case, 1)[0]), data(case, count=2)
    for batch in batches:
        batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
    diagonal, count = fisher_diagonal(found, batches, Fisher(labels="given"), causal=True)
    assert diagonal.keys() == set(found.roles)
    expected = {role: torch.zeros_like(tensor) for role, tensor in diagonal.items()}
    found.model.requires_grad_(True)
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            ids = batch["input_ids"][row : row + 1, :length]
            found.model.zero_grad()
            logits = found.model(input_ids=ids).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
            for role, parts in found.parts.items():
                pieces = [part.cut(found.model.get_parameter(part.parameter).grad).square() for part in parts]
                expected[role] += torch.cat(pieces, found.signature.tensors[role].joint) / count
            for role, parameter in found.parameter.items():
                expected[role] += parameter.grad.square() / count
    for role, tensor in expected.items():
        assert torch.allclose(diagonal[role], tensor, atol=1e-9 * float(tensor.abs().max()) + 1e-14), role


def test_transport_by_activations_is_refused_where_experts_choose_their_tokens(tmp_path: Path) -> None:
    models = opened(tmp_path, CASE[0])
    with pytest.raises(ValueError, match="experts see only those that their own router sends them"):
        transport(models[0], models[1], OptimalTransport(ground="acts"), data(CASE[0]))
    assert transport(models[0], models[1]).maps


@pytest.mark.parametrize("method", ["fisher", "regmean"])
@pytest.mark.parametrize("match", ["none", "full"])
def test_merging_a_model_with_itself_gives_its_function(tmp_path: Path, method: str, match: str) -> None:
    """Its experts and neurons have changed places, which `full` finds again; `none` merges two equal models."""
    one = opened(tmp_path, CASE[0], 1)[0].folder
    two = scrambled(one, tmp_path / "two", "permutation") if match == "full" else one
    rows = "".join(json.dumps({"input_ids": [(3 * i + 5 * j) % 17 for j in range(6)]}) + "\n" for i in range(8))
    (tmp_path / "data.jsonl").write_text(rows)
    found = onebasin.merge([one, two], method=method, match=match, anchor=0, data=str(tmp_path / "data.jsonl"),
                           task="causal-lm", precision="float64")["model"]  # fmt: skip
    ids = torch.tensor([[1, 5, 2, 9]])
    with torch.no_grad():
        outputs = [m.double()(ids).logits for m in (found, loaded_model(Folder(one)).model)]
    assert torch.allclose(*outputs, atol=1e-3 * float(outputs[1].abs().max()))


def test_experts_that_are_called_by_themselves_are_neither_measured_nor_fitted(tmp_path: Path) -> None:
    """Each model sends them other tokens, whose numbers differ."""
    made, given = twins.build("switch_transformers")
    folders = []
    for seed in (0, 1):
        twins.random_model(made.config, type(made), seed).save_pretrained(tmp_path / str(seed))
        folders.append(Canonical(Folder(tmp_path / str(seed)), torch.float64))
    opt = Options(match_with="activations", symmetry="permutation", precision="float64")
    batches = [given, given]
    found = align_all(folders, 0, "permutation", opt, None, batches)
    sources = Sources(found.models, [0.5, 0.5], 0, 0)
    fitted = merge_progressively(sources, batches, how=ProgressiveMerge(settle=False), means=opt)
    layers = set(fitted.ridges)
    assert layers and not any("expert" in name for name in layers)
