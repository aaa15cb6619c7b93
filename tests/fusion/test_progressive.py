# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from pairs import opened
from torch import Tensor
from zoo import CASES, inputs, named_outputs

from onebasin.engine import Means, Spill, spill
from onebasin.fusion.average import average
from onebasin.fusion.method import Sources
from onebasin.fusion.progressive import RIDGES, Fitting, Progressive, ProgressiveMerge, bagged, merge_progressively
from onebasin.fusion.ridge import Sums, best_solution, cross, gram, solution
from onebasin.fusion.tensors import merged_tensors
from onebasin.models import Folder
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Call, hooks, linear_calls, run

CASE = [
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "ViTForImageClassification",
    "AlbertForMaskedLM",
    "DebertaV2ForTokenClassification",
    "DistilBertForMaskedLM",
    "LlamaForCausalLM",
]
FLOAT64 = Means(precision="float64")
INSIDE = ("attention", "ffn")


def pair(case: str, folder: Path, count: int = 4) -> tuple[list[Folder], list[dict[str, Tensor]]]:
    """Two different models of one shape, and batches of their inputs."""
    like = CASES[case]().double()
    return opened(folder, case), [inputs(like, seed) for seed in range(count)]


def merge(
    models: list[Folder], batches: list[dict[str, Tensor]], weights: list[float], ridge: float, **how: bool
) -> Progressive:
    return merge_progressively(
        Sources(models, weights), batches, how=ProgressiveMerge(ridge=ridge, **how), means=FLOAT64
    )


def outputs(
    checkpoint: Folder, batch: dict[str, Tensor], tensors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    stock = loaded_model(checkpoint, dtype=torch.float64)
    if tensors:
        stock.fill(tensors.__getitem__)
    return named_outputs(stock.model, batch)


@pytest.mark.parametrize("case", CASE)
def test_equal_models_stay_what_they_are(case: str, tmp_path: Path) -> None:
    models, batches = pair(case, tmp_path)
    merged = merge([models[1], models[1]], batches, [0.5, 0.5], 1e-3)
    for role, tensor in merged.tensors.items():
        assert torch.allclose(tensor, models[1].read(role, torch.float64), atol=1e-9), role


@pytest.mark.parametrize("case", CASE)
@pytest.mark.parametrize("end", [0, 1])
def test_all_weight_on_one_model_gives_its_function(case: str, end: int, tmp_path: Path) -> None:
    models, batches = pair(case, tmp_path)
    merged = merge(models, batches, [1.0 - end, float(end)], 1e-3)
    fresh = inputs(CASES[case]().double(), 99)
    ours, theirs = outputs(models[0], fresh, merged.tensors), outputs(models[end], fresh)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-7), name


@pytest.mark.parametrize(
    "case", [case for case in CASE if not case.startswith(("Albert", "Deberta"))]
)  # layers run once
@pytest.mark.parametrize("spread", [False, True])
def test_every_layer_solves_its_equations_in_the_finished_model(case: str, spread: bool, tmp_path: Path) -> None:
    """X^T R = r D (W - W_average) with X, R measured in the merged model as it is written.

    With `spread`, what stays inside attention and feed-forward layers is asked to deviate from its mean as the models'
    outputs do.
    """
    models, batches = pair(case, tmp_path)
    ridge, weights = 0.05, [0.3, 0.7]
    merged = merge(models, batches, weights, ridge, spread=spread)
    student = loaded_model(models[0], dtype=torch.float64)
    calls = linear_calls(student, batches[0])
    by_name = {entry.name: role for role, entry in student.signature.tensors.items()}
    plain = merged_tensors(Sources(models, weights), average, FLOAT64)
    mean = {by_name[name]: tensor for name, tensor in plain}
    student.fill(merged.tensors.__getitem__)
    seen = [
        measured(stock, calls, batches) for stock in (*(loaded_model(m, dtype=torch.float64) for m in models), student)
    ]
    scaled = 0
    assert len(calls) > 6
    assert any(call.norm for call in calls)
    for call in calls:
        x, value, _ = seen[2][call.module]
        theirs = [some[call.module][1] for some in seen[:2]]
        target = weights[0] * theirs[0] + weights[1] * theirs[1]
        if spread and not call.norm and student.signature.part(student.signature.tensors[call.weight]) in INSIDE:
            wider = (weights[0] * theirs[0].std(0) + weights[1] * theirs[1].std(0)) / target.std(0)
            target = target.mean(0) + wider.clamp(max=2**0.5) * (target - target.mean(0))
            scaled += 1
        lacking = target - value
        change = student.parameter[call.weight] - mean[call.weight]
        change = change.mT if call.columns else change
        if call.bias:
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
            change = torch.cat([change, (student.parameter[call.bias] - mean[call.bias])[None]])
        wanted = ridge * x.square().sum(0).unsqueeze(1) * change
        assert change.abs().max() > 1e-3
        assert torch.allclose(x.mT @ lacking, wanted, atol=1e-6 * float(wanted.abs().max())), call.module
    assert scaled == 0 if not spread else scaled >= 2


def measured(
    stock: LoadedModel, calls: list[Call], batches: list[dict[str, Tensor]]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer -> its inputs, what it is compared by, and its own outputs in all its calls, without padding."""
    rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    last: dict[str, tuple[Call, Tensor, Tensor]] = {}
    mask: Tensor | None = None

    def kept(x: Tensor) -> Tensor:
        return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x.reshape(-1, x.shape[-1]).clone()

    def note(call: Call, x: Tensor, y: Tensor, value: Tensor) -> None:
        rows.setdefault(call.module, []).append((kept(x), kept(value).clone(), kept(y).clone()))

    after, before = {}, {}
    for call in calls:
        if call.norm:
            after[call.module] = lambda x, y, call=call: last.__setitem__(call.norm, (call, x, y))
            before[call.norm] = lambda n, name=call.norm: note(*last.pop(name), n) if name in last else None
        else:
            after[call.module] = lambda x, y, call=call: note(call, x, y, y)
    with hooks(stock, after, before):
        for batch in batches:
            mask = batch.get("attention_mask")
            run(stock, batch)
    return {name: tuple(map(torch.cat, zip(*some, strict=True))) for name, some in rows.items()}


@pytest.mark.parametrize("case", ["AlbertForMaskedLM", "DebertaV2ForTokenClassification"])
def test_layers_called_again_and_again_settle_where_all_calls_are_solved_together(case: str, tmp_path: Path) -> None:
    """sum over calls of X^T R = r D (W - W_average), a call being asked for its share of what it inherits."""
    models, batches = pair(case, tmp_path)
    batches = [
        {name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]
    weights, ridge = [0.3, 0.7], 0.05
    teachers = [loaded_model(model, dtype=torch.float64) for model in models]
    student = loaded_model(models[0], dtype=torch.float64)
    student.fill(lambda role: 0.3 * teachers[0].parameter[role] + 0.7 * teachers[1].parameter[role])
    calls = [call for call in linear_calls(student, batches[0]) if not student.shared(call.weight)]
    fitting = Fitting(teachers, student, weights, [ridge], calls, batches)
    fitting.walk()
    for _ in range(32):
        fitting.walk(settled=True)
        fitting.change_repeated(0.5)
    fitting.walk(settled=True)
    seen = [measured(stock, calls, batches) for stock in (*teachers, student)]
    assert fitting.repeated
    for call in calls:
        share = 1 / sum(other.module == call.module for other in calls)
        asked = [own.lerp(value, share) for _, value, own in (some[call.module] for some in seen)]
        lacking = weights[0] * asked[0] + weights[1] * asked[1] - asked[2]
        x = seen[2][call.module][0]
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if call.bias else x
        wanted = ridge * x.square().sum(0).unsqueeze(1) * fitting.made[call.module]
        assert wanted.abs().max() > 1e-3
        assert torch.allclose(x.mT @ lacking, wanted, atol=1e-4 * float(wanted.abs().max())), call.module


def fitting(models: list[Folder], batches: list[dict[str, Tensor]], room: int, spread: bool = False) -> Fitting:
    """The fit of the models' mean, of which the last two batches are held out, after one walk."""
    teachers = [loaded_model(model, dtype=torch.float64) for model in models]
    student = loaded_model(models[0], dtype=torch.float64)
    student.fill(lambda role: 0.3 * teachers[0].parameter[role] + 0.7 * teachers[1].parameter[role])
    calls = [call for call in linear_calls(student, batches[0]) if not student.shared(call.weight)]
    done = Fitting(teachers, student, [0.3, 0.7], RIDGES, calls, batches[:-2], batches[-2:], spread, room=room)
    done.walk()
    return done


@pytest.mark.parametrize("case", CASE)
@pytest.mark.parametrize("spread", [False, True])
def test_passes_that_lie_on_disk_give_the_same_fit(
    case: str, spread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "LEAST", 1)
    models, batches = pair(case, tmp_path)
    inside, outside = (fitting(models, batches, room, spread) for room in (2**30, 0))
    assert inside.chosen == outside.chosen
    for role, parameter in inside.student.parameter.items():
        assert torch.equal(parameter, outside.student.parameter[role]), role


def test_memory_does_not_grow_with_the_number_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most bytes of activations at the moment when the passes over a batch pause."""
    monkeypatch.setattr(spill, "LEAST", 1)
    rest, peak, earlier = Spill.rest, 0, set[int]()

    def watched(some: Spill, number: int) -> None:
        nonlocal peak
        if number == 1:  # looking takes its time
            peak = max(peak, sum(size for place, size in storages().items() if place not in earlier))
        rest(some, number)

    monkeypatch.setattr(Spill, "rest", watched)
    models, batches = pair("LlamaForCausalLM", tmp_path)
    peaks = {}
    for room in (0, 2**30):
        for count in (2, 4):
            gc.collect()  # what another test has left in cycles could go at any moment
            peak, earlier = 0, set(storages())
            gc.freeze()  # what is there already is not looked at again and again
            fitting(models, batches[:count], room)
            gc.unfreeze()
            peaks[room, count] = peak
    one = (peaks[2**30, 4] - peaks[2**30, 2]) / 2
    assert peaks[0, 4] - peaks[0, 2] < one / 4
    assert one > batches[0]["input_ids"].numel() * 8 * models[0].config["hidden_size"]  # a hidden state at least


def storages() -> dict[int, int]:
    """Bytes of all floating-point storages that are in use, by their addresses."""
    tensors = (x for x in gc.get_objects() if type(x) is Tensor and x.layout == torch.strided)
    found = [x.untyped_storage() for x in tensors if x.is_floating_point()]
    return {storage._cdata: storage.nbytes() for storage in found}


def test_the_solution_is_stationary() -> None:
    x, r = torch.randn(40, 7, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    x[:, 2] = x[:, 0] - x[:, 1]  # dependent inputs
    found = solution(Sums(x.mT @ x, x.mT @ r), 0.01).requires_grad_()
    loss = (x @ found - r).square().sum() + 0.01 * (x.square().sum(0).unsqueeze(1) * found.square()).sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() < 1e-9


def test_an_input_that_is_always_zero_gets_no_weight() -> None:
    x, r = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    x[:, 2] = 0
    found = solution(Sums(x.mT @ x, x.mT @ r), 0.01)
    assert torch.equal(found[2], torch.zeros(3, dtype=torch.float64))
    assert found.isfinite().all()


@pytest.mark.parametrize("columns", [3, 700])  # one block, several
@pytest.mark.parametrize("constant", [False, True])
def test_sums_are_those_of_the_whole_product(columns: int, constant: bool) -> None:
    x, r = torch.randn(20, columns, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    whole = torch.cat([x, torch.ones(20, int(constant), dtype=x.dtype)], 1)
    assert torch.allclose(gram(x, constant), whole.mT @ whole)
    assert torch.allclose(cross(x, r, constant), whole.mT @ r)


@pytest.mark.parametrize("first", range(4))
def test_no_neighbour_of_the_ridge_found_is_better(first: int) -> None:
    """From wherever the search begins."""
    ridges = [1e-4, 1e-2, 1.0, 100.0]
    x, noise = torch.randn(60, 20, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)
    r = x @ torch.randn(20, 3, dtype=torch.float64) + 6 * noise
    fit, held = (Sums(x[rows].mT @ x[rows], x[rows].mT @ r[rows]) for rows in (slice(0, 30), slice(30, 60)))
    errors = [held.error(solution(fit, ridge)) for ridge in ridges]
    place, found, error = best_solution(fit, held, ridges, first)
    assert error == errors[place] == min(errors[max(0, place - 1) : place + 2])
    assert error <= errors[first]
    assert torch.equal(found, solution(fit, ridges[place]))


def test_what_stands_under_padding_does_not_matter(tmp_path: Path) -> None:
    models, batches = pair("BertForMaskedLM", tmp_path)
    changed = [{**b, "input_ids": torch.where(b["attention_mask"] == 1, b["input_ids"], 9)} for b in batches]
    first, second = (merge(models, some, [0.5, 0.5], 1e-2).tensors for some in (batches, changed))
    for role, tensor in first.items():
        assert torch.allclose(tensor, second[role], atol=1e-8), role


def test_each_layer_takes_the_ridge_with_the_least_error_on_held_back_data(tmp_path: Path) -> None:
    """Of the first layer that is fitted: its inputs and targets depend on no other choice."""
    models, batches = pair("GPT2LMHeadModel", tmp_path, 10)
    fit, held, ridges = batches[:6], batches[6:], (10.0, 0.1, 1e-3)
    merged = merge_progressively(Sources(models, [0.5, 0.5]), fit, held, ProgressiveMerge(ridge=ridges), FLOAT64)
    a, b, student = (loaded_model(model, dtype=torch.float64) for model in (*models, models[0]))
    by_name = {entry.name: role for role, entry in student.signature.tensors.items()}
    pairs = merged_tensors(Sources(models, [0.5, 0.5]), average, FLOAT64)
    mean = {by_name[name]: tensor for name, tensor in pairs}
    student.fill(mean.__getitem__)
    call = linear_calls(student, fit[0])[0]
    errors = {}
    for ridge in ridges:
        sums = []
        for some in (fit, held):
            (x, mine, _), (_, first, _), (_, second, _) = (
                measured(s, [call], some)[call.module] for s in (student, a, b)
            )
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
            sums.append((x, (first + second) / 2 - mine))
        (x, r), (x_held, r_held) = sums
        found = solution(Sums(x.mT @ x, x.mT @ r), ridge)
        errors[ridge] = float((x_held @ found - r_held).square().sum())
    assert merged.ridges[call.module] == [min(errors, key=errors.__getitem__)]
    assert min(errors.values()) < float(r_held.square().sum())
    assert set(merged.ridges) == {call.module for call in linear_calls(student, fit[0])}


def test_the_losses_are_those_of_the_average_and_of_what_is_returned(tmp_path: Path) -> None:
    models, batches = pair("GPT2LMHeadModel", tmp_path, 10)
    merged = merge_progressively(Sources(models, [0.5, 0.5]), batches[:6], batches[6:], means=FLOAT64)
    assert merged.fitted == (merged.losses["progressive"] < merged.losses["average"])
    means = []
    for batch in batches[6:]:
        own = outputs(models[0], batch, merged.tensors)["logits"].log_softmax(-1)
        mixture = sum(outputs(model, batch)["logits"].softmax(-1) for model in models) / 2
        divergence = (mixture * (mixture.log() - own)).sum(-1)[batch["attention_mask"].bool()]
        means.append(float(divergence.mean()))
    assert min(merged.losses.values()) == pytest.approx(sum(means) / len(means))


def test_with_bags_the_result_is_the_mean_of_the_fits_to_each(tmp_path: Path) -> None:
    models, batches = pair("GPT2LMHeadModel", tmp_path, 16)
    sources, bags = Sources(models, [0.3, 0.7]), 3
    found = merge_progressively(sources, batches[:12], batches[12:], ProgressiveMerge(bags=bags), FLOAT64)
    parts = zip(bagged(batches[:12], bags), bagged(batches[12:], bags), strict=True)
    fits = [merge_progressively(sources, *part, ProgressiveMerge(), FLOAT64) for part in parts]
    assert found.fitted and all(fit.fitted for fit in fits)
    for role, tensor in found.tensors.items():
        assert torch.allclose(tensor, sum(fit.tensors[role] for fit in fits) / bags, rtol=1e-12, atol=1e-14), role
    assert found.ridges == {module: [fit.ridges[module][0] for fit in fits] for module in fits[0].ridges}


@pytest.mark.parametrize(
    "sizes, bags", [([27] * 6, 4), ([8, 8], 4), ([5], 5), ([5], 4), ([32] * 8 + [3], 2), ([1] * 7, 3)]
)
def test_every_example_is_in_one_bag(sizes: list[int], bags: int) -> None:
    numbers = iter(torch.arange(sum(sizes)).split(sizes))
    found = [torch.cat([batch["x"] for batch in bag]) for bag in bagged([{"x": next(numbers)} for _ in sizes], bags)]
    assert torch.cat(found).sort().values.tolist() == list(range(sum(sizes)))
    counts = [len(bag) for bag in found]
    assert len(counts) == bags and max(counts) - min(counts) <= 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    models, batches = pair("GPT2LMHeadModel", tmp_path, 5)
    for some, ridge, words in (
        ([], 0.1, "needs calibration data"),
        (batches, 0.0, "must be positive"),
        (batches[:1], (0.1, 0.01), "at least two batches"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_progressively(Sources(models, [0.5, 0.5]), some, how=ProgressiveMerge(ridge=ridge))
    with pytest.raises(ValueError, match="cannot be divided into 9 bags"):
        merge_progressively(Sources(models, [0.5, 0.5]), batches[:4], batches[4:5], ProgressiveMerge(bags=9))
