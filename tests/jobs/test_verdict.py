# SPDX-License-Identifier: Apache-2.0
"""The verdict on a merge: agreement beyond chance, for every kind of output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import CASES, save

import onebasin
from onebasin.jobs.verdict import GUESSED, IMAGINED, ROWS, SHORT, judge

BATCHES = [{"input_ids": torch.zeros(500, 1, dtype=torch.long)}] * 2


def answering(logits: Tensor, name: str = "logits") -> Any:
    """A model that gives these answers, half of them for each batch."""
    halves = iter(logits.chunk(2))
    return lambda: lambda _: {name: next(halves)}


def choosing(shares: list[float], *, flipped: float = 0.0, like: Tensor | None = None, seed: int = 0) -> Tensor:
    """Logits of 1,000 examples whose first choice is `like`'s but for a share `flipped`, which is drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(torch.tensor(shares), 1000, replacement=True, generator=generator)
    if like is not None:
        drawn = torch.where(torch.rand(1000, generator=generator) < flipped, drawn, like.argmax(-1))
    return 5 * torch.nn.functional.one_hot(drawn, len(shares)).float()


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1], [0.1] * 10])
def test_chance_does_not_count_as_agreement(shares: list[float]) -> None:
    """Two models that share nothing but how often they say each class agree on 50, 82 or 10 %: all three are broken."""
    a = choosing(shares)
    b = choosing(shares, like=a, flipped=0.1, seed=1)
    good = choosing(shares, like=a, flipped=0.1, seed=2)
    bad = choosing(shares, seed=3)
    assert judge(answering(good), [answering(a), answering(b)], BATCHES, "these").works is True
    verdict = judge(answering(bad), [answering(a), answering(b)], BATCHES, "these")
    assert verdict.works is False and verdict.sentence.startswith("BROKEN")


def test_what_the_sources_agree_on_must_be_kept() -> None:
    """Sources that agree in 60 % of cases allow many other answers, but not where they agree."""
    a = choosing([0.25] * 4)
    b = choosing([0.25] * 4, like=a, flipped=0.55, seed=1)
    same = a.argmax(-1) == b.argmax(-1)
    other = choosing([0.25] * 4, like=a, flipped=0.8, seed=2)
    for kept, where in ((True, same), (False, ~same)):  # where it answers as they do
        merged = torch.where(where[:, None], a, other)
        verdict = judge(answering(merged), [answering(a), answering(b)], BATCHES, "these")
        assert verdict.works is kept
    assert verdict.agreement[0] > 0.9 * verdict.sources_agree  # only what it agrees on tells


def test_a_few_choices_beyond_chance_say_nothing() -> None:
    """Where all but three of a thousand choices are of one class, three mistakes are neither good nor bad."""
    a = choosing([1.0, 0.0])
    a[:3] = a[:3].flip(-1)
    merged = a.clone()
    merged[2:5] = merged[2:5].flip(-1)
    assert judge(answering(merged), [answering(a), answering(a)], BATCHES, "these").works is None


def test_the_numbers_are_what_they_say() -> None:
    a = choosing([0.2] * 5)
    b = choosing([0.2] * 5, like=a, flipped=0.5, seed=1)
    verdict = judge(answering(b), [answering(a), answering(b)], BATCHES, "these")
    same = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    assert verdict.agreement == [pytest.approx(same), 1.0] and verdict.sources_agree == pytest.approx(same)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    assert verdict.divergence == [pytest.approx(float((p * (p / q).log()).sum(-1).mean())), pytest.approx(0, abs=1e-9)]
    assert verdict.predictions == 1000


def test_guessed_inputs_can_show_that_a_merge_is_broken_but_not_that_it_works(tmp_path: Path) -> None:
    a, other = choosing([0.2] * 5), choosing([0.2] * 5, seed=3)
    good = judge(answering(a), [answering(a), answering(a)], BATCHES, GUESSED)
    assert good.works is None and good.agreement == [1.0, 1.0]
    assert "agrees with A on 100.0 %" in good.sentence and "which proves nothing about other inputs" in good.sentence
    assert judge(answering(other), [answering(a), answering(a)], BATCHES, GUESSED).works is False
    model = save(CASES["BertForMaskedLM"](), tmp_path / "model")  # no tokenizer
    assert onebasin.merge([model, model], verify=False).verdict.judged_on == GUESSED


def test_pictures_that_are_too_easy_cannot_show_that_a_merge_works() -> None:
    """Models that were made to see a class in every picture agree there, whatever they do on real ones."""
    a, other = choosing([0.2] * 5), choosing([0.2] * 5, seed=3)
    for flipped, works in ((0.02, None), (0.2, True)):  # the sources agree on 98 and 84 %
        b = choosing([0.2] * 5, like=a, flipped=flipped, seed=1)
        verdict = judge(answering(a), [answering(a), answering(b)], BATCHES, IMAGINED)
        assert verdict.works is works and ("--data FILE" in verdict.sentence) == (works is None)
        assert judge(answering(other), [answering(a), answering(b)], BATCHES, IMAGINED).works is False


def test_sources_that_agree_by_chance_alone_tell_nothing() -> None:
    verdict = judge(*_three([0.5, 0.5]), BATCHES, "these")
    assert verdict.works is None and "--data FILE" in verdict.sentence


def _three(shares: list[float]) -> tuple[Any, list[Any]]:
    first, *others = (answering(choosing(shares, seed=seed)) for seed in range(3))
    return first, others


def test_numbers_that_are_not_finite_are_broken() -> None:
    a = choosing([0.5, 0.5])
    verdict = judge(answering(a * torch.nan), [answering(a), answering(a)], BATCHES, "these")
    assert verdict.works is False


@pytest.mark.parametrize(("name", "width"), [("logits", 1), ("last_hidden_state", 16)])
def test_models_without_classes_are_asked_for_an_order(name: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200, width, generator=generator)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0] if width > 1 else torch.ones(1, 1)
    near, other = 3 * a @ turn, torch.randn(200, width, generator=generator)
    sources = [answering(a, name), answering(a + 0.01 * torch.randn(a.shape, generator=generator), name)]
    batches = [{"input_ids": torch.zeros(100, 1, dtype=torch.long)}] * 2
    assert judge(answering(near, name), sources, batches, "these").works is True
    sources = [answering(a, name), answering(a, name)]
    assert judge(answering(other, name), sources, batches, "these").works is False


def test_a_pooler_that_nobody_trained_does_not_count() -> None:
    """An encoder is known by its hidden states, averaged over each text's own tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < torch.randint(1, 7, (50, 1), generator=generator)).long()
    batches = [{"input_ids": torch.zeros(50, 6, dtype=torch.long), "attention_mask": mask}]
    hidden = torch.randn(50, 6, 8, generator=generator)

    def encoder(padding: float) -> Any:
        states = torch.where(mask[..., None] > 0, hidden, padding * torch.randn(50, 6, 8, generator=generator))
        outputs = {"pooler_output": torch.randn(50, 8, generator=generator), "last_hidden_state": states}
        return lambda: lambda _: outputs

    assert judge(encoder(1), [encoder(3), encoder(9)], batches, "these").agreement == [1.0, 1.0]


def test_hidden_words_alone_count() -> None:
    """What a masked language model says of words that it sees was never trained."""
    labels = torch.full((500, 4), -100)
    labels[:, 1] = 7
    batches = [{"input_ids": torch.zeros(500, 4, dtype=torch.long), "labels": labels}] * 2
    a = torch.randn(1000, 4, 5, generator=torch.Generator().manual_seed(0))
    b = torch.randn(1000, 4, 5, generator=torch.Generator().manual_seed(1))
    b[:, 1] = a[:, 1]
    assert judge(answering(b), [answering(a), answering(a)], batches, "these").agreement == [1.0, 1.0]


def test_every_merge_is_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = save(CASES["GPT2LMHeadModel"](), tmp_path / "a")
    same = onebasin.merge([model, model], tmp_path / "out", match="none")
    assert same["verdict"]["works"] and same["verdict"]["agreement"] == [1.0, 1.0]
    assert any(note.startswith("works: ") for note in same["notes"])
    assert "works: agrees" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "onebasin.json").read_text())["result"]["verdict"] == same["verdict"]
    assert "verdict" not in onebasin.merge([model, model], match="none", verdict=False)
    assert onebasin.merge([model, model], match="none", require=0.9)["required"] is True


def test_nothing_is_required_of_a_merge_without_a_verdict(tmp_path: Path) -> None:
    """It would pass unseen."""
    model = save(CASES["GPT2LMHeadModel"](), tmp_path / "a")
    file = tmp_path / "merge.yml"
    whole, part = f"{{model: {model}}}", f"{{model: {model}, layer_range: [0, 1]}}"
    file.write_text(f"merge_method: linear\nparameters: {{weight: 1}}\nmodels: [{whole}, {whole}]\n")
    with pytest.raises(ValueError, match="leave out require, or --no-verdict"):
        onebasin.merge([model, model], tmp_path / "out", match="none", require=0.9, verdict=False)
    with pytest.raises(ValueError, match="leave out require, or --no-verdict"):
        onebasin.merge_config(file, tmp_path / "out", require=0.9, verdict=False)
    file.write_text(f"merge_method: linear\nparameters: {{weight: 1}}\nslices: [{{sources: [{part}]}}]\n")
    with pytest.raises(ValueError, match="which gets no verdict"):
        onebasin.merge_config(file, tmp_path / "out", require=0.9)
    assert not (tmp_path / "out").exists()


def test_a_large_model_is_read_as_it_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are too large to make inputs are judged on few tokens, in one pass that holds no model."""
    asked: list[int] = []

    def counted(model: Any, sources: Any, batches: Any, judged_on: str) -> Any:
        asked.extend(batch["input_ids"].numel() for batch in batches)
        return judge(model, sources, batches, judged_on)

    def holds(*_: Any) -> Any:
        raise AssertionError("a model is held")

    monkeypatch.setattr("onebasin.data.calibration.LARGE", 0)
    monkeypatch.setattr("onebasin.jobs.verdict.judge", counted)
    monkeypatch.setattr("onebasin.jobs.verdict._numel", lambda _: 2**30)
    monkeypatch.setattr("onebasin.jobs.verdict.held", holds)
    model = save(CASES["GPT2LMHeadModel"](), tmp_path / "a")
    verdict = onebasin.merge([model, model], match="none")["verdict"]
    assert verdict["works"] and verdict["judged_on"] == "random inputs" and asked == [ROWS * SHORT]
