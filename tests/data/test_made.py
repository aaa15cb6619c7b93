# SPDX-License-Identifier: Apache-2.0
"""Inputs that models make themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from zoo import CASES, save

import onebasin
from onebasin.data.made import DECODED, LENGTH, STEPS, SURE, imagined, made, pictures, self_generated
from onebasin.data.masked_text import EXPONENTS, PROBES, coherence, guessed_text, ranks, repeating, zipf
from onebasin.running import twins
from onebasin.running.verification import output_of, outward
from onebasin.settings import Reading

MASK, PREDICTED = 4, (10, 11, 12)  # tokens: the one that hides, and those that the models were asked for


def test_models_that_predict_a_few_kinds_of_tokens_see_others_beside_them(tmp_path: Path) -> None:
    """Such as the atoms of molecules, among brackets and bonds that are never hidden."""
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = CASES["BertForMaskedLM"]()
        bias = model.cls.predictions.bias
        bias.data = torch.where(torch.isin(torch.arange(len(bias)), torch.tensor(PREDICTED)), 50.0, 0.0)
        folders.append(onebasin.Folder(save(model, tmp_path / str(seed))))
    batches = made(folders, 64, Reading(context=12, mask_id=MASK))
    shown = torch.cat([batch["input_ids"] for batch in batches])
    others = ~torch.isin(shown, torch.tensor([*PREDICTED, MASK]))
    assert 0.05 < others.float().mean() < 0.95
    assert len(shown.unique()) > 2 * len(PREDICTED)
    hidden = torch.cat([batch["labels"] for batch in batches])
    assert set(hidden[shown == MASK].tolist()) == set(PREDICTED)


def test_the_guess_follows_ranks_in_the_vocabulary_and_in_norm() -> None:
    model = CASES["BertForMaskedLM"]()
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(torch.eye(*table.shape) * 0.01 + torch.arange(len(table))[:, None])  # frequent ones come first
    order = ranks([model])
    assert order.tolist() == list(range(len(table)))
    chances = zipf(order, 1.5, MASK)
    assert chances[MASK] == 0 and float(chances[0] / chances[8]) == pytest.approx(27.0)  # Zipf's law: 9 ** 1.5


class Knows:
    """A model that sees what it should: the token before a hidden one, repeated; or one of a few that it predicts."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int, few: int | None = None) -> None:
        self.embeddings = torch.nn.Embedding(vocabulary, 4)
        self.embeddings.weight.data = 1.0 + torch.arange(vocabulary)[:, None].expand(-1, 4).clone()
        self.few = few

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embeddings

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        seen = torch.where(input_ids == MASK, input_ids.roll(1, 1), input_ids)
        seen = seen if self.few is None else 5 + seen % self.few
        return SimpleNamespace(logits=50.0 * torch.nn.functional.one_hot(seen, len(self.embeddings.weight)))


def test_coherent_text_is_told_from_text_that_the_models_do_not_know_and_from_monotony() -> None:
    generator, models, every = torch.Generator().manual_seed(0), [Knows(64), Knows(64)], torch.ones(64).bool()
    tokens = torch.randint(5, 64, (32, 12), generator=generator)
    texts = {"known": tokens.repeat_interleave(2, 1), "unknown": torch.randint(5, 64, (32, 24), generator=generator)}
    texts["monotonous"] = torch.full((32, 24), 7)
    found = {name: coherence(models, ids, every, MASK, generator) for name, ids in texts.items()}
    assert found["known"] > 0.5 > found["unknown"] and found["known"] > found["monotonous"]
    assert coherence(models, texts["monotonous"], every, 7, generator) <= 0.0
    assert coherence(models, texts["known"], ~every, MASK, generator) == 0.0  # they were asked for nothing


@pytest.mark.parametrize("planted", [None, *EXPONENTS])
def test_guesses_have_the_frequencies_that_are_most_coherent(
    planted: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models predict the tokens from 5 to 12, so that these stand in half of the places, or everywhere."""
    models, generator, few = [Knows(64, few=8)], torch.Generator().manual_seed(0), torch.arange(5, 13)
    others = torch.ones(64).bool()
    others[[MASK, *few.tolist()]] = False
    rank = torch.cat([torch.arange(5), torch.tensor([60] * 8), torch.arange(5, 56)])  # among those, by the vocabulary
    laws = {exponent: (1.0 + rank) ** -exponent * others for exponent in EXPONENTS}

    def distances(ids: torch.Tensor) -> dict[float | None, float]:
        share = torch.bincount(ids.flatten(), minlength=64) / ids.numel()
        found: dict[float | None, float] = {None: float(share[others].sum())}
        return found | {one: float((share - law / law.sum() / 2)[others].abs().sum()) for one, law in laws.items()}

    monkeypatch.setattr("onebasin.data.masked_text.coherence", lambda _, ids, *__: -distances(ids)[planted])
    ids, asked = guessed_text(models, PROBES, 64, MASK, generator)
    assert set(asked) == set(few.tolist()) and not (ids == MASK).any()
    found = distances(ids)
    assert min(found, key=lambda one: found[one]) == planted
    found = distances(guessed_text(models, PROBES - 1, 64, MASK, generator)[0])
    assert min(found, key=lambda one: found[one]) == EXPONENTS[0]


def test_texts_repeat_parts_of_themselves() -> None:
    ids = torch.arange(240).expand(64, 240)
    found = repeating(ids, torch.Generator().manual_seed(0))
    assert torch.equal(found[:, :80], ids[:, :80])
    follows = found[:, 1:] == found[:, :-1] + 1
    begins = [(~row).nonzero().flatten() + 1 for row in follows]  # of the parts
    for row, places in zip(found, begins, strict=True):
        assert 80 <= int(places[0]) <= 160 and torch.equal(row[: places[0]], ids[0, : places[0]])
        assert bool((row[places[0] :] < places[0]).all())
    sizes = torch.cat([places.diff() for places in begins]).float()
    assert 8 < sizes.mean() < 16  # parts of parts are shorter


def test_the_guess_is_of_tokens_where_the_stated_inputs_of_a_class_are_others() -> None:
    model = twins.build("perceiver")[0]
    assert len(ranks([model])) == model.config.vocab_size


def test_language_models_that_take_images_write_text_too(tmp_path: Path) -> None:
    """Their vocabulary stands in the configuration of the language model."""
    model = twins.build("llava", "LlavaForConditionalGeneration")[0].float()
    model.save_pretrained(tmp_path / "model")
    size = model.config.text_config.vocab_size
    (written, *_) = made([onebasin.Folder(tmp_path / "model")], 8, Reading(context=12))
    assert written.keys() == {"input_ids"} and written["input_ids"].shape[1] == 12
    assert int(written["input_ids"].min()) >= 0 and int(written["input_ids"].max()) < size


@pytest.mark.parametrize("kind", ["dia", "nllb-moe", "florence2", "cohere_asr"])
def test_decoders_write_in_the_shape_that_their_class_accepts(kind: str, tmp_path: Path) -> None:
    """Several codes at one time, and encoders whose output is read by name, has the logits of routers, or a mask."""
    model = twins.build(kind)[0].float()
    model.save_pretrained(tmp_path)
    (written,) = made([onebasin.Folder(tmp_path)], 3, batch=3)
    ids = written["decoder_input_ids"]
    assert ids.shape[:2] == (3, DECODED) and model(**written).logits[..., 0].numel() == ids.numel()


def test_models_are_surer_of_pictures_after_more_steps() -> None:
    """Of the classes that were drawn for them, which is the first draw."""
    torch.manual_seed(0)
    models = [CASES["ViTForImageClassification"]().eval() for _ in range(2)]
    textures = {"pixel_values": pictures((64, 2, *[models[0].config.image_size] * 2), torch.Generator().manual_seed(0))}
    classes = torch.randint(models[0].config.num_labels, (64,), generator=torch.Generator().manual_seed(1))
    losses = []
    for steps in (0, STEPS, SURE):
        shown = imagined(models, textures, torch.Generator().manual_seed(1), steps)
        losses.append(sum(float(cross_entropy(model(**shown).logits, classes)) for model in models))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("kind", ["mpnet", "roberta", "ibert"])
def test_texts_end_where_positions_do_that_begin_behind_the_padding_token(kind: str, tmp_path: Path) -> None:
    model = twins.build(kind)[0].float()
    model.save_pretrained(tmp_path)
    assert model.config.max_position_embeddings < LENGTH
    (written, *_) = made([onebasin.Folder(tmp_path)], 8)
    assert written["input_ids"].shape[1] == model.config.max_position_embeddings - model.config.pad_token_id - 1


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "openai-gpt", "xlstm"])
def test_what_a_model_writes_does_not_depend_on_what_it_caches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, states, nothing, or something that cannot be made from an empty start."""
    model = twins.build(kind)[0]
    found = self_generated([model], 4, 12)[0]["input_ids"]
    monkeypatch.setattr("onebasin.data.made.CACHES", ())
    assert torch.equal(self_generated([model], 4, 12)[0]["input_ids"], found)


def test_a_decoder_that_does_not_write_token_by_token_reads_random_ones(tmp_path: Path) -> None:
    model = twins.build("parakeet_tdt")[0].float()
    model.save_pretrained(tmp_path)
    for batch in made([onebasin.Folder(tmp_path)], 3, batch=3):
        assert outward(output_of(model, batch))
