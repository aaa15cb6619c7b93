# SPDX-License-Identifier: Apache-2.0
"""Merging without saying how: what the models are to each other, candidates, budgets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from zoo import CASES, save

import onebasin
from onebasin.data.calibration import noised
from onebasin.data.teaching import divergence, forward_of
from onebasin.engine import Descent, Pace
from onebasin.fusion.progressive import ProgressiveMerge
from onebasin.jobs.frame import Frame, in_one_frame
from onebasin.jobs.options import Options
from onebasin.jobs.search.candidates import align, shortened
from onebasin.jobs.search.chosen import Candidate, Earlier
from onebasin.jobs.search.setup import BAGS, CHOOSING, CLOSE, FEWEST, SYNTHETIC, Setup
from onebasin.models import Common, Model
from onebasin.models.kinship import APART, ONE_BASE, SAME_FUNCTION, Kinship, kinship
from onebasin.running import twins
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.running.trace import Batch, examples_in
from onebasin.symmetry.groups.elements import Monomial


def models_of(case: str, folder: Path, count: int = 2, apart: float = 1.0) -> list[Path]:
    """Models that share nothing (apart 1) or nearly all (apart near 0)."""
    found = []
    for number in range(count):
        model = CASES[case]()
        generator = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            fresh = 0.3 * torch.randn(parameter.shape, generator=generator)
            if "norm" not in name.lower() and "ln_" not in name:
                parameter.data += apart * (fresh - parameter.data)
        found.append(save(model, folder / str(number)))
    return found


def divergence_of(merged: Path, models: list[Path], batches: list[dict[str, torch.Tensor]]) -> float:
    """Of a written folder from its sources, measured apart from the code under test."""
    own, *theirs = (loaded_model(onebasin.Folder(folder)) for folder in (merged, *models))
    losses = []
    for batch in batches:
        answers = [forward_of(model)(model.parameter, batch) for model in theirs]
        shares = [1 / len(models)] * len(models)
        losses.append(float(divergence(forward_of(own)(own.parameter, batch), answers, shares, batch)))
    return sum(losses) / len(losses)


@pytest.fixture
def no_picture_is_too_easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models of few classes agree on most pictures that they imagine. And there are few of these."""
    monkeypatch.setattr("onebasin.jobs.search.setup.JUDGED", (12, 24))
    monkeypatch.setattr("onebasin.jobs.verdict.EASY", 1.0)


@pytest.mark.parametrize("budget", [None, "1h"])
@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_what_is_chosen_is_written(budget: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of("GPT2LMHeadModel", tmp_path)
    split = list[tuple[list[Batch], list[Batch]]]()  # what was fitted on, and what was held out

    def kept(*given: Any) -> tuple[list[Batch], list[Batch]]:
        split.append(noised(*given))
        return split[-1]

    monkeypatch.setattr("onebasin.jobs.search.setup.noised", kept)
    found = onebasin.merge(models, tmp_path / "out", budget=budget, samples=48, anchor=0)
    report = found["search"]
    tried = {name.split(",")[0].split(" ")[0] for name in report["candidates"]}
    assert tried == {"weights", "activations", "unmatched"}
    assert any(name.endswith("distilled") for name in report["candidates"])
    losses = {name: one["loss"] for name, one in report["candidates"].items()}
    assert losses[report["chosen"]] == min(losses.values())
    wanted = pytest.approx(losses[report["chosen"]], rel=1e-3)
    assert divergence_of(tmp_path / "out", models, split[-1][1]) == wanted
    assert report["chosen"] in " ".join(found["notes"])
    assert (found["match"] == "none") == report["chosen"].startswith("unmatched")
    assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["result"]["search"] == report


def test_models_are_related_by_their_layers_not_by_their_tables(tmp_path: Path) -> None:
    far, near = (models_of("GPT2LMHeadModel", tmp_path / str(apart), apart=apart) for apart in (1.0, 0.01))
    folders = {name: [onebasin.Folder(folder) for folder in pair] for name, pair in (("far", far), ("near", near))}
    assert kinship(folders["far"]).kind == APART
    assert kinship(folders["near"]).kind == ONE_BASE
    assert kinship([folders["far"][0], onebasin.Folder(far[0])]).kind == SAME_FUNCTION
    model = CASES["GPT2LMHeadModel"]()
    for layer in model.transformer.h:  # the neurons in another order: the tables stay as they are
        order = torch.randperm(layer.mlp.c_fc.weight.shape[1], generator=torch.Generator().manual_seed(1))
        layer.mlp.c_fc.weight.data = layer.mlp.c_fc.weight.data[:, order]
        layer.mlp.c_proj.weight.data = layer.mlp.c_proj.weight.data[order]
        layer.attn.c_attn.weight.data = layer.attn.c_attn.weight.data.flip(0)
    original = save(CASES["GPT2LMHeadModel"](), tmp_path / "original")
    assert kinship([onebasin.Folder(original), onebasin.Folder(save(model, tmp_path / "moved"))]).kind == APART


def test_models_of_one_base_are_averaged_as_they_are(tmp_path: Path) -> None:
    models = models_of("BertForMaskedLM", tmp_path, apart=0.01)
    found = onebasin.merge(models, tmp_path / "out", anchor=0)
    onebasin.merge(models, tmp_path / "plain", match="none", anchor=0)
    assert found["kinship"]["kind"] == ONE_BASE and found["match"] == "none" and found["method"] == "average"
    first, second = (loaded_model(onebasin.Folder(tmp_path / name)).parameter for name in ("out", "plain"))
    assert all(torch.equal(first[role], second[role]) for role in first)


def test_with_data_models_of_one_base_may_be_fitted(tmp_path: Path) -> None:
    models = models_of("GPT2LMHeadModel", tmp_path, apart=0.01)
    found = onebasin.merge(models, data="self", samples=32)
    assert {name.split(",")[0] for name in found["search"]["candidates"]} == {"unmatched"}


KINDS = ("ViTForImageClassification", "BertForMaskedLM", "BertForSequenceClassification", "BertModel",
         "MixtralForCausalLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration")  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.usefixtures("half_a_second_left", "three_sweeps", "no_picture_is_too_easy")
def test_models_of_every_kind_merge_without_data(case: str, tmp_path: Path) -> None:
    found = onebasin.merge(models_of(case, tmp_path), tmp_path / "out", samples=24, anchor=0)
    assert found["kinship"]["kind"] == APART
    learned = {"learned from activations"} if case.startswith("ViT") else set()
    tried = {name.split(",")[0] for name in found["search"]["candidates"]}
    selected = any(", select" in name for name in found["search"]["candidates"])
    blind = case == "BertForMaskedLM"  # no tokenizer: guesses choose nothing
    assert selected == (not blind)
    even = {"BertForMaskedLM": ["activations"], "BertForSequenceClassification": ["activations", "weights"]}.get(
        case, []
    )
    assert tried == (set() if blind else {"weights", "activations", "unmatched"}) | learned | {
        f"{way} with even norms" for way in even
    }
    assert found["verdict"]["agreement"] != [None, None]


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_towers_that_take_the_patches_of_all_images_in_one_sequence_are_fitted(tmp_path: Path) -> None:
    for seed in (0, 1):
        twins.build("hunyuan_vl_vision", seed=seed)[0].float().save_pretrained(tmp_path / str(seed))
    found = onebasin.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", samples=9)
    tried = {name.split(",")[0] for name in found["search"]["candidates"]}
    assert tried == {"weights", "activations", "unmatched", "learned from activations"}
    assert not [note for note in found["notes"] if "no candidate" in note]


@pytest.mark.parametrize(
    ("case", "works", "seconds"),
    [("GPT2LMHeadModel", True, 60.0), ("GPT2LMHeadModel", False, 100.0), ("T5ForConditionalGeneration", True, None),
     ("T5ForConditionalGeneration", False, 100.0), ("BertForMaskedLM", True, 100.0)],
)  # fmt: skip
@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_what_is_broken_is_distilled_for_all_of_the_time(
    case: str, works: bool, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What works for a minute, and only where the models know the inputs; on guesses, which prove nothing, for all of
    the time, too."""
    given: list[float] = []

    def distilled(setup: Setup, best: Candidate, seconds: float) -> Candidate:
        given.append(seconds)
        return best

    monkeypatch.setattr("onebasin.jobs.search.Setup.left", 100.0)
    monkeypatch.setattr("onebasin.jobs.search.Setup.has_time", lambda *_: False)  # for more than one closed form
    monkeypatch.setattr("onebasin.jobs.search.setup.judge", lambda *_: SimpleNamespace(works=works, sources_agree=0.5))
    monkeypatch.setattr("onebasin.jobs.search.trials.distilled", distilled)
    onebasin.merge(models_of(case, tmp_path), samples=24)
    assert given == ([] if seconds is None else [seconds])


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_a_search_loads_its_models_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def counted(model: Model, **how: Any) -> LoadedModel:
        loaded.append(model.name)
        return loaded_model(model, **how)

    monkeypatch.setattr("onebasin.jobs.search.setup.loaded_model", counted)
    found = onebasin.merge(models_of("GPT2LMHeadModel", tmp_path), samples=24, budget="1h")
    assert any(name.endswith("distilled") for name in found["search"]["candidates"])
    assert sorted(loaded) == sorted(set(loaded)) and len(loaded) == 2


def test_distillation_has_the_data_that_closed_forms_leave() -> None:
    batches = [{"input_ids": torch.full((4 if number < 19 else 1, 3), number)} for number in range(20)]
    frame = Frame([], [], 0, Common([], []), "none")
    setup = Setup(frame, 0, [], Kinship(0.0, APART), Options(samples=32, data="builtin:digits"), None, 0.0, None)
    setup.__dict__["gathered"] = batches, 0.0
    fit, held = setup.split
    numbers = [[int(batch["input_ids"][0, 0]) for batch in some] for some in (fit, held, setup.spare(60.0))]
    assert list(map(len, numbers)) == [6, 2, 12]  # a quarter of eight batches, which are 32 examples, is held out
    assert [number for some in numbers for number in some] == list(range(20))
    assert sum(map(len, (batch["input_ids"] for batch in held))) == 8  # the rest at the end of a file is no such batch


@pytest.mark.parametrize(("case", "more"), [("GPT2LMHeadModel", 40), ("BertForSequenceClassification", 0)])
def test_causal_models_write_more_for_distillation(
    case: str, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebasin.jobs.search.setup.WRITTEN", 40)
    opt = Options(samples=24)
    given = [onebasin.Folder(folder) for folder in models_of(case, tmp_path)]
    frame = in_one_frame(given, 0, "full", opt, None, verify=False)
    setup = Setup(frame, 0, [1.0, 1.0], Kinship(0.0, APART), opt, None, 0.0, None)
    fitted = [len(batch["input_ids"]) for some in setup.split for batch in some]
    assert sum(fitted) == 24 and sum(len(batch["input_ids"]) for batch in setup.spare(60.0)) == more


def test_encoders_with_a_tokenizer_know_the_sentences_that_they_read(tmp_path: Path) -> None:
    opt, folders = Options(samples=24), models_of("BertForSequenceClassification", tmp_path)

    def known() -> bool:
        frame = in_one_frame([onebasin.Folder(folder) for folder in folders], 0, "full", opt, None, verify=False)
        return Setup(frame, 0, [1.0, 1.0], Kinship(0.0, APART), opt, None, 0.0, None).known

    assert not known()
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folders[0])
    assert known()


def test_matches_with_even_norms_are_kept_apart_from_exact_ones(tmp_path: Path) -> None:
    given = [onebasin.Folder(folder) for folder in models_of("BertForSequenceClassification", tmp_path)]
    opt = Options(symmetry="full", units=str(tmp_path / "units"))
    frame = in_one_frame(given, 0, "full", opt, None, verify=False)
    setup = Setup(frame, 0, [], Kinship(0.0, APART), opt, None, 0.0, None)
    setup.__dict__["split"] = [], []
    assert setup.even is not None
    turned = align(setup, "full", "weights with even norms", match_with="weights").found[0].alignment
    exact = align(setup, "full", "weights", match_with="weights").found[0].alignment
    assert "stream" in turned.elements and "stream" in exact.elements
    assert not isinstance(turned.elements["stream"], Monomial) and isinstance(exact.elements["stream"], Monomial)


def test_long_texts_are_distilled_a_few_at_a_time() -> None:
    texts = [{"input_ids": torch.arange(32 * length).view(32, length)} for length in (100, 256, 512, 2000)]
    cut = [shortened([text]) for text in texts]
    assert [[len(one["input_ids"]) for one in some] for some in cut] == [[16] * 2, [8] * 4, [4] * 8, [1] * 32]
    for text, some in zip(texts, cut, strict=True):
        assert torch.equal(torch.cat([one["input_ids"] for one in some]), text["input_ids"])


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_a_budget_goes_on_from_what_an_earlier_one_found(tmp_path: Path) -> None:
    models, out = models_of("GPT2LMHeadModel", tmp_path), tmp_path / "out"
    first = onebasin.merge(models, out, budget="1m", samples=48)["search"]
    found = onebasin.merge(models, out, budget="2m", samples=48, resume=True)["search"]
    start, *more = found["candidates"]
    assert start == first["chosen"] and [name.endswith("distilled again") for name in more] == [True]
    assert found["candidates"][start]["loss"] == pytest.approx(first["candidates"][start]["loss"], rel=1e-5)
    best = min(one["loss"] for one in found["candidates"].values())
    assert found["candidates"][found["chosen"]]["loss"] == best <= found["candidates"][start]["loss"]
    other = models_of("GPT2LMHeadModel", tmp_path / "others", 3)
    with pytest.raises(ValueError, match="was merged from other models"):
        onebasin.merge(other[1:], out, budget="1m", resume=True)
    with pytest.raises(ValueError, match="exists"):
        onebasin.merge(models, out, budget="1m")


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps", "no_picture_is_too_easy")
def test_three_models_are_learned_together_on_pictures_that_they_imagine(tmp_path: Path) -> None:
    models = models_of("ViTForImageClassification", tmp_path, 3)
    found = onebasin.merge(models, tmp_path / "out", budget=40, samples=16)
    assert any(name.startswith("learned from") for name in found["search"]["candidates"])
    assert not any(name.endswith("distilled") for name in found["search"]["candidates"])
    assert len(found["distance_after"]) == 2


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps", "no_picture_is_too_easy")
def test_without_time_to_learn_imagined_pictures_neither_match_nor_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setup, "learns", lambda *_: False)
    models = models_of("ViTForImageClassification", tmp_path)
    found = onebasin.merge(models, tmp_path / "out", samples=16)
    assert {name.split(",")[0] for name in found["search"]["candidates"]} == {"weights", "unmatched"}
    assert not any("spread" in name for name in found["search"]["candidates"])
    assert "progressive" in found["search"]["chosen"]
    assert all(len(ridges) == BAGS for ridges in found["ridges"].values())
    earlier = Earlier.of(tmp_path / "out", None)
    assert earlier is not None and earlier.method == ProgressiveMerge(bags=BAGS, select=", select" in earlier.chosen)


@pytest.mark.usefixtures("three_sweeps")
def test_nothing_is_fitted_to_pictures_that_are_too_easy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of("ViTForImageClassification", tmp_path)
    monkeypatch.setattr("onebasin.jobs.verdict.EASY", -1.0)

    def imagined(setup: Setup) -> None:
        raise AssertionError("pictures to fit to were made")

    monkeypatch.setattr(Setup, "gathered", property(imagined))
    found = onebasin.merge(models, tmp_path / "out", samples=16, anchor=0)
    onebasin.merge(models, tmp_path / "full", match="full", method="circuit", anchor=0, tolerance=CLOSE)
    assert not found["verdict"]["works"] and any("give --data FILE" in note for note in found["notes"])
    first, second = (loaded_model(onebasin.Folder(tmp_path / name)).parameter for name in ("out", "full"))
    assert all(torch.equal(first[role], second[role]) for role in first)


def test_models_of_many_small_operations_imagine_few_pictures(tmp_path: Path) -> None:
    given, opt = [onebasin.Folder(folder) for folder in models_of("ViTForImageClassification", tmp_path)], Options()
    frame = in_one_frame(given, 0, "full", opt, None, verify=False)
    wanted = round(opt.samples / (1 - CHOOSING) * SYNTHETIC["pixel_values"])
    for seconds, few in ((1e-6, wanted), (10.0, FEWEST)):  # that a model takes for several pictures
        setup = Setup(frame, 0, [], Kinship(0.0, APART), opt, None, 0.0, None)
        setup.__dict__["timed"] = 1, seconds
        made = examples_in(setup.several) * setup.measured[1] / seconds  # FLOP per second
        assert made / 2 <= setup.speed <= made
        assert setup.affordable() == few


@pytest.mark.usefixtures("half_a_second_left", "three_sweeps")
def test_guesses_neither_fit_nor_choose_where_norms_can_be_even(tmp_path: Path) -> None:
    models = models_of("BertForMaskedLM", tmp_path)  # no tokenizer: its inputs begin as guesses
    found = onebasin.merge(models, tmp_path / "out", samples=16)["search"]
    names = [name for name in found["candidates"] if not name.endswith("distilled")]
    assert names == ["activations with even norms, average"]
    assert found["candidates"][found["chosen"]]["loss"] == min(one["loss"] for one in found["candidates"].values())
    given = tmp_path / "given.jsonl"
    given.write_text("".join(f'{{"input_ids": {[5 + (n + i) % 17 for i in range(8)]}}}\n' for n in range(64)))
    found = onebasin.merge(models, tmp_path / "fitted", samples=16, data=str(given), mask_id=4)["search"]
    assert any("progressive" in name for name in found["candidates"])


def test_heads_of_different_tasks_cannot_be_compared(tmp_path: Path) -> None:
    models = models_of("BertForSequenceClassification", tmp_path)
    other = save(CASES["BertForMaskedLM"](), tmp_path / "other")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": {list(range(5, 7 + n % 9))}}}\n' for n in range(64)))
    with pytest.raises(ValueError, match="their heads have no output in common"):
        onebasin.merge([models[0], other], tmp_path / "out", quality="balanced", data=str(rows), mask_id=4)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (dict(quality="good"), "choose from fast, balanced, best"),
        (dict(budget="soon"), "write it like 30s, 5m or 2h"),
        (dict(budget="5m", quality="best"), "quality is a name for a budget"),
        (dict(quality="fast", match="full"), "a budget chooses match by itself"),
        (dict(budget="1m", method="progressive"), "a budget chooses method by itself"),
        (dict(quality="best", match_with="activations"), "a budget chooses match-with by itself"),
        (dict(require=1.5), "require 1.5"),
    ],
)
def test_what_a_budget_settles_is_not_told_twice(how: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        onebasin.merge(models_of("GPT2LMHeadModel", tmp_path), **how)


@pytest.mark.usefixtures("three_sweeps")
def test_ctrl_c_ends_a_search_with_the_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of("GPT2LMHeadModel", tmp_path)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onebasin.jobs.search.trials.distilled", interrupted)
    found = onebasin.merge(models, tmp_path / "out", budget="60s", samples=32)
    assert "stopped by Ctrl-C: the best so far is written" in found["notes"] and (tmp_path / "out").exists()
    with pytest.raises(KeyboardInterrupt):  # without a budget nothing was asked to end early
        monkeypatch.setattr("onebasin.jobs.search.trials.closed_form", interrupted)
        onebasin.merge(models, tmp_path / "none", samples=32)
    assert not (tmp_path / "none").exists()


def test_a_descent_that_is_bounded_by_time_keeps_its_best_and_ends_by_ctrl_c() -> None:
    number = torch.tensor([4.0], requires_grad=True)
    steps = []

    def loss_at(step: int) -> torch.Tensor:
        steps.append(step)
        if step == 50:
            raise KeyboardInterrupt
        return number.square().sum()

    run = Descent([number], Pace(10**6, 0.1, looks=4, seconds=3600))
    run.descend(loss_at, lambda: float(number.detach().square()))
    assert len(steps) == 50 and float(number) == 4.0  # no look was due yet: the start is the best that is known
    run = Descent([number], Pace(10**6, 0.1, looks=4, seconds=0.2))
    run.descend(lambda _: number.square().sum(), lambda: float(number.detach().square()))
    assert run.losses[run.best_step] < run.losses[0]
