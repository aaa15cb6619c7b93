# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from zoo import CASES, GPT2, save

from onebasin.data import load_task
from onebasin.data.calibration import NOISY_COPIES, from_file, noisy, recut
from onebasin.data.made import self_generated
from onebasin.running.trace import examples, examples_in


def certain(seed: int) -> PreTrainedModel:
    """A language model that is sure of each next token, so that sampling has one outcome."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    model.lm_head.weight.data *= 1e4
    return model


def test_models_take_turns_and_each_follows_its_own_predictions() -> None:
    models = [certain(1), certain(2)]
    ids = torch.cat([batch["input_ids"] for batch in self_generated(models, 10, 9, seed=3, batch=4)])
    assert ids.shape == (10, 9)
    for turn, model in enumerate(models):
        own, other = ids[turn::2], ids[1 - turn :: 2]
        with torch.no_grad():
            follows = [(model(input_ids=x).logits[:, :-1].argmax(-1) == x[:, 1:]).float().mean() for x in (own, other)]
        assert follows[0] == 1
        assert follows[1] < 0.5


def test_sequences_depend_on_the_seed_alone() -> None:
    model = CASES["GPT2LMHeadModel"]()
    runs = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        runs.append(
            torch.cat([batch["input_ids"] for batch in self_generated([model, model], 8, 6, seed=seed, batch=3)])
        )
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_text_is_sampled_at_temperature_one() -> None:
    model = CASES["GPT2LMHeadModel"]()
    ids = torch.cat([batch["input_ids"] for batch in self_generated([model], 4000, 2, seed=0, batch=1000)])
    first = ids[:, 0].bincount(minlength=23) / 4000
    assert (first - 1 / 23).abs().max() < 4 * (1 / 23 / 4000) ** 0.5  # uniform within four standard errors
    with torch.no_grad():
        expected = model(input_ids=ids[:, :1]).logits[:, -1].softmax(-1).mean(0)
    second = ids[:, 1].bincount(minlength=23) / 4000
    assert bool(((second - expected).abs() < 4.5 * (expected / 4000).sqrt() + 1e-3).all())


@pytest.mark.parametrize("case", ["BertForMaskedLM", "BertLMHeadModel", "ViTForImageClassification", "GPT2Model"])
def test_models_that_write_nothing_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match="writes no text of its own"):
        self_generated([CASES[case]()], 4, 6)


def test_a_length_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="a length from 2 to 12"):
        self_generated([CASES["GPT2LMHeadModel"]()], 4, 13)


def test_examples_that_are_evaluated_are_left_out(tmp_path: Path) -> None:
    model = save(CASES["GPT2LMHeadModel"](), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(ord("a") + (i * i // 7) % 20) for i in range(400)))
    options = {"context": 8, "vocabulary": {chr(ord("a") + i): i for i in range(20)}}
    evaluated = load_task("causal-lm", text, model, split="all", limit=20, **options)
    seen = {tuple(row) for batch in evaluated.batches for row in batch["input_ids"].tolist()}
    found = from_file(text, model, "causal-lm", 1000, split="all", evaluation=evaluated, **options)
    kept = [tuple(row) for batch in found for row in batch["input_ids"].tolist()]
    assert kept
    assert not seen & set(kept)
    assert all("labels" not in batch for batch in found)
    with pytest.raises(ValueError, match="are evaluated on too; give other calibration data"):
        from_file(
            text,
            model,
            "causal-lm",
            split="all",
            evaluation=load_task("causal-lm", text, model, split="all", **options),
            **options,
        )


def test_rows_need_no_labels(tmp_path: Path) -> None:
    model = save(CASES["BertForSequenceClassification"](), tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [3, 4, 5]}\n{"input_ids": [6, 7, 8, 9]}\n{"input_ids": [5]}\n')
    (batch,) = from_file(rows, model, "text-classification", 3)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 0], [6, 7, 8, 9], [5, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 4, 1]


def test_examples_are_cut_anew_without_loss(tmp_path: Path) -> None:
    model = save(CASES["BertForMaskedLM"](), tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    lengths = (3, 5, 2, 4, 6)
    rows.write_text("".join(f'{{"input_ids": {list(range(5, 5 + n))}}}\n' for n in lengths))
    for labels in (False, True):
        batches = from_file(rows, model, "masked-lm", 5, mask_id=4, batch=2, labels=labels)
        assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
        (whole,) = recut(batches, 5)
        for name, filler in (("input_ids", 0), ("attention_mask", 0), *([("labels", -100)] if labels else [])):
            assert whole[name].shape == (5, 6)
            own = [row for batch in batches for row in batch.get(name, torch.ones_like(batch["input_ids"]))]
            for row, mine, length in zip(own, whole[name], lengths, strict=True):
                assert torch.equal(mine[:length], row[:length]) and bool((mine[length:] == filler).all())
        assert ("labels" in whole) == labels
        again = recut([whole], 2)
        for before, after in zip(batches, again, strict=True):
            assert torch.equal(before["input_ids"], after["input_ids"])


def test_one_label_for_each_example_stays_with_it() -> None:
    ids = torch.arange(10).view(5, 2)
    batches = [{"input_ids": ids[:3], "labels": torch.tensor([7, 8, 9])}, {"input_ids": ids[3:], "labels": ids[3:, 0]}]
    first, second = recut(batches, 4)
    assert first["labels"].tolist() == [7, 8, 9, 6] and second["labels"].tolist() == [8]
    assert torch.equal(torch.cat([first["input_ids"], second["input_ids"]]), ids) and "attention_mask" not in first


def test_noise_makes_copies_of_images_and_leaves_the_rest() -> None:
    batches = [{"pixel_values": torch.full((3, 1, 8, 8), float(i)), "labels": torch.arange(3)} for i in range(2)]
    found = noisy(batches, 0.5, seed=1)
    assert len(found) == NOISY_COPIES * len(batches)
    for place, batch in enumerate(found):
        more = batch["pixel_values"] - batches[place % 2]["pixel_values"]
        assert 0.3 < float(more.std()) < 0.7 and float(more.mean().abs()) < 0.2
        assert torch.equal(batch["labels"], torch.arange(3))
    assert not torch.equal(found[0]["pixel_values"], found[2]["pixel_values"])


def test_tokens_take_no_noise() -> None:
    with pytest.raises(ValueError, match="not to tokens"):
        noisy([{"input_ids": torch.zeros(2, 4, dtype=torch.long)}], 0.1)
    with pytest.raises(ValueError, match=r"noise .*: it must"):
        noisy([{"pixel_values": torch.zeros(2, 1, 8, 8)}], -0.1)


def test_images_stay_as_they_are_beside_texts_of_other_lengths() -> None:
    pixels = torch.randn(2, 3, 4, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids = torch.arange(10).view(2, 5) * mask
    (again,) = recut([{"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}], 2)
    assert torch.equal(again["pixel_values"], pixels) and torch.equal(again["input_ids"], ids)


def test_sounds_stay_as_they_are_beside_texts_of_other_lengths() -> None:
    sounds, texts = torch.randn(2, 40), torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"input_values": sounds, "decoder_input_ids": texts, "decoder_attention_mask": mask, "labels": texts}
    (again,) = recut([batch], 2)
    assert torch.equal(again.pop("input_values"), sounds) and "attention_mask" not in again
    assert all(value.shape == (2, 3) for value in again.values())


def test_what_a_decoder_reads_has_its_own_length() -> None:
    read, written = torch.arange(1, 15).view(2, 7), torch.arange(1, 11).view(2, 5)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    (again,) = recut([{"input_ids": read * mask, "attention_mask": mask, "decoder_input_ids": written}], 2)
    assert torch.equal(again["input_ids"], read * mask) and torch.equal(again["decoder_input_ids"], written)
    (longer,) = recut([{"input_ids": written, "decoder_input_ids": read}], 2)
    assert torch.equal(longer["decoder_input_ids"], read)


def test_patches_of_images_in_one_sequence_stay_with_their_image() -> None:
    batch = {"pixel_values": torch.arange(24.0).view(12, 2), "grid_thw": torch.arange(9).view(3, 3)}
    assert examples_in(batch) == 3
    apart = recut([batch], 1)
    for i, one in enumerate(apart):
        assert torch.equal(one["pixel_values"], batch["pixel_values"][4 * i : 4 * i + 4])
        assert torch.equal(one["grid_thw"], batch["grid_thw"][i : i + 1])
        assert all(torch.equal(value, one[name]) for name, value in examples(batch, i, i + 1).items())
    (again,) = recut(apart, 3)
    assert all(torch.equal(value, again[name]) for name, value in batch.items())
