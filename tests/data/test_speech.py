# SPDX-License-Identifier: Apache-2.0
"""Recordings become a recogniser's inputs, and its transcripts are counted word by word."""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from onebasin.data import evaluate, load_model, load_task, speech
from onebasin.data.calibration import from_file

RATE = 16000
WORDS = ["<end>", "<start>", "<prompt>", "one", "two", "three", "four", "five"]


@pytest.fixture
def transcripts(monkeypatch):
    """The module of the example that counts words."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("transcripts")


@pytest.fixture(scope="module")
def recogniser(tmp_path_factory):
    """A tiny random Whisper with a tokenizer of five words, and a file of recordings."""
    folder = tmp_path_factory.mktemp("recogniser")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(WORDS), d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=20, max_source_positions=50,
        max_target_positions=20, init_std=1.0, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).eval().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> <prompt> $A <end>", special_tokens=[(word, WORDS.index(word)) for word in WORDS[:3]]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    rows = []
    for i, text in enumerate(("one two three", "four five", "two one five four", "three")):
        noise = rng.integers(-3000, 3000, RATE // 2).astype(np.int16)
        wavfile.write(folder / f"{i}.wav", RATE, noise)
        rows.append({"audio": f"{i}.wav", "text": text})
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return file


def test_loss_counts_the_words_and_the_end_and_nothing_that_is_given(recogniser, recordings):
    model = load_model(recogniser, "speech-recognition")
    expected, count = 0.0, 0
    for row in map(json.loads, recordings.read_text().splitlines()):
        heard = speech.features(recogniser, [recordings.parent / row["audio"]])
        ids = [1, 2, *(WORDS.index(word) for word in row["text"].split()), 0]
        with torch.no_grad():
            logits = model(input_features=heard, decoder_input_ids=torch.tensor([ids[:-1]])).logits[0]
        chances = logits.log_softmax(-1)
        expected -= sum(float(chances[i, ids[i + 1]]) for i in range(1, len(ids) - 1))
        count += len(ids) - 2
    for batch in (1, 3):
        scores = evaluate(model, load_task("speech-recognition", recordings, recogniser, batch=batch))
        assert scores.loss == pytest.approx(expected / count, rel=1e-5)


def test_calibration_has_no_labels_and_no_padding(recogniser, recordings):
    batches = from_file(recordings, recogniser, "speech-recognition")
    starts = [row for batch in batches for row in batch["decoder_input_ids"].tolist()]
    texts = [json.loads(line)["text"].split() for line in recordings.read_text().splitlines()]
    assert starts == [[1, 2, *map(WORDS.index, words)] for words in texts]
    for batch in batches:
        assert batch.keys() <= {"input_features", "decoder_input_ids", "decoder_attention_mask"}
        with torch.no_grad():
            load_model(recogniser, "speech-recognition")(**batch)


def test_evaluated_recordings_are_left_out_of_calibration(recogniser, recordings):
    held = load_task("speech-recognition", recordings, recogniser, limit=3)
    (batch,) = from_file(recordings, recogniser, "speech-recognition", evaluation=held)
    assert len(batch["input_features"]) == 1


def test_transcripts_are_those_of_a_model_without_cache(transcripts, recogniser, recordings):
    model = load_model(recogniser, "speech-recognition")
    heard = speech.features(recogniser, [recordings.parent / f"{i}.wav" for i in range(2)])
    written = list(transcripts.transcribe(model, heard, [1, 2], 0))
    for one, ids in zip(heard.split(1), written, strict=True):
        given = [1, 2]
        while len(given) < 2 + transcripts.LONGEST and len(given) < 20:
            with torch.no_grad():
                best = int(model(input_features=one, decoder_input_ids=torch.tensor([given])).logits[0, -1].argmax())
            if best == 0:
                break
            given.append(best)
        assert ids[: len(given) - 2] == given[2:]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32])
def test_a_tone_stays_the_same_tone_in_every_format_and_rate(tmp_path, dtype):
    own, seconds = 22050, 0.5
    time = np.arange(int(own * seconds)) / own
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    if dtype == np.uint8:
        stored = np.round(tone * 127 + 128).astype(dtype)
    elif dtype == np.float32:
        stored = tone.astype(dtype)
    else:
        stored = np.round(tone * np.iinfo(dtype).max).astype(dtype)
    wavfile.write(tmp_path / "tone.wav", own, np.stack([stored, stored], 1))
    read = speech.recording(tmp_path / "tone.wav", RATE)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(read)) / RATE)
    assert len(read) == pytest.approx(RATE * seconds, abs=1)
    inner = slice(200, -200)  # the filter rings at the ends
    assert np.abs(read - expected)[inner].max() < 0.01


def test_word_errors_are_the_fewest_edits(transcripts):
    def fewest(one, other):  # by definition: over all alignments, words that are not paired with their like
        best = len(one) + len(other)
        for kept in range(min(len(one), len(other)) + 1):
            for a in itertools.combinations(range(len(one)), kept):
                for b in itertools.combinations(range(len(other)), kept):
                    # between two kept pairs, as many replacements as possible
                    edges = list(zip((-1, *a, len(one)), (-1, *b, len(other)), strict=True))
                    gaps = itertools.pairwise(edges)
                    cost = sum(max(p[0] - q[0], p[1] - q[1]) - 1 for q, p in gaps)
                    cost += sum(one[i] != other[j] for i, j in zip(a, b, strict=True))
                    best = min(best, cost)
        return best

    rng = np.random.default_rng(0)
    for _ in range(40):
        one, other = (list(rng.choice(list("abc"), rng.integers(1, 5))) for _ in range(2))
        found = transcripts.word_error_rate([" ".join(one)], [" ".join(other)])
        assert found == fewest(one, other) / len(one)


def test_case_and_punctuation_do_not_count(transcripts):
    assert transcripts.word_error_rate(["The cat's here."], ["the CAT’S, here"]) == 0


def test_bad_recordings_are_named(transcripts, tmp_path, recogniser):
    (tmp_path / "a.wav").write_bytes(b"no sound")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"audio": "a.wav", "text": "one"}) + "\n")
    with pytest.raises(ValueError, match=r"cannot read the recording '.*a\.wav'"):
        load_task("speech-recognition", rows, recogniser)
    with pytest.raises(ValueError, match="no words"):
        transcripts.word_error_rate([""], ["one"])
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        speech.features(Path(tmp_path), [])
