# SPDX-License-Identifier: Apache-2.0
"""Tasks: losses and accuracies against a direct computation, what is masked and labelled, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from zoo import CASES, build, save

from onebasin.data import Task, digits, evaluate, load_model, load_task
from onebasin.studies.demo import PROCESSOR

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "##s"]
SMALL = dict(vocab_size=23, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=10)
TEXTS = ["a b c", "d", "e f g h i j as", "bs cs"]
SENTENCES = [
    {"tokens": ["as", "b"], "tags": ["X", "O"]},
    {"tokens": ["c", "ds", "es"], "tags": ["O", "Y", "X"]},
]


def tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece over single letters and a plural, with BERT's special tokens: `as` is two tokens."""
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{name}_token": word for name, word in named.items()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT-shaped folder with a tokenizer and three named labels; the weights do not matter here."""
    model = build("BertForSequenceClassification", **SMALL, id2label={0: "O", 1: "X", 2: "Y"})
    save(model, tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def bert(kind: str, path: Path, **config: Any) -> Path:
    save(build(kind, **SMALL, **config), path)
    tokenizer().save_pretrained(path)
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def nll(logits: torch.Tensor, label: int) -> float:
    return -float(torch.log_softmax(logits.double(), -1)[label])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- causal language models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_causal_loss_and_accuracy(tmp_path: Path, batch: int) -> None:
    model = CASES["GPT2LMHeadModel"]()
    path = save(model, tmp_path / "model")
    text = "the quick brown fox jumps over the lazy dog" * 20
    (tmp_path / "text.txt").write_text(text)
    vocabulary = {character: i for i, character in enumerate(sorted(set(text))[::-1])}
    vocabulary = {character: i % 23 for character, i in vocabulary.items()}
    task = load_task("causal-lm", tmp_path / "text.txt", path, context=6, vocabulary=vocabulary, batch=batch)
    ids = [vocabulary[character] for character in text[int(0.9 * len(text)) :]]
    losses, right = [], []
    for start in range(0, len(ids) - 5, 6):
        row = ids[start : start + 6]
        logits = model(input_ids=torch.tensor([row])).logits[0].detach()
        losses += [nll(logits[i], row[i + 1]) for i in range(5)]
        right += [float(logits[i].argmax() == row[i + 1]) for i in range(5)]
    scores = evaluate(model, task)
    assert scores.loss == pytest.approx(mean(losses), rel=1e-5)
    assert scores.accuracy == pytest.approx(mean(right))


def test_causal_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model = CASES["GPT2LMHeadModel"]()
    ids = torch.randint(0, 23, (5, 7))
    task = Task("causal-lm", ({"input_ids": ids, "labels": ids},))
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert evaluate(model, task).loss == pytest.approx(expected, rel=1e-5)


def test_rows_of_unequal_length_count_alike_in_any_batch(tmp_path: Path) -> None:
    path = save(CASES["GPT2LMHeadModel"](), tmp_path / "model")
    rows = [{"input_ids": torch.randint(0, 23, (n,)).tolist()} for n in (7, 3, 5, 7, 2)]
    data = jsonl(tmp_path / "rows.jsonl", rows)
    model = load_model(path, "causal-lm")
    found = [evaluate(model, load_task("causal-lm", data, path, batch=batch)) for batch in (1, 2, 5)]
    for scores in found[1:]:
        assert scores.loss == pytest.approx(found[0].loss, rel=1e-5)
        assert scores.accuracy == found[0].accuracy


def test_stdlib_has_its_own_vocabulary(tmp_path: Path) -> None:
    config = dict(vocab_size=96, n_positions=32, n_embd=12, n_layer=1, n_head=3)
    path = save(build("GPT2LMHeadModel", **config), tmp_path / "model")
    task = load_task("causal-lm", "builtin:stdlib", path, limit=5, split="train")
    again = load_task("causal-lm", "builtin:stdlib", path, limit=5, split="train")
    assert task.batches[0]["input_ids"].shape == (5, 32)
    assert torch.equal(task.batches[0]["input_ids"], again.batches[0]["input_ids"])
    other = load_task("causal-lm", "builtin:stdlib", path, limit=5)
    assert not torch.equal(task.batches[0]["input_ids"], other.batches[0]["input_ids"])


# --- masked language models ---------------------------------------------------------------------------------


def test_masked_loss(tmp_path: Path) -> None:
    path = bert("BertForMaskedLM", tmp_path / "model")
    data = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    model = load_model(path, "masked-lm")
    task = load_task("masked-lm", data, path, mask_share=0.5)
    losses = []
    for text, ids, labels in zip(TEXTS, task.batches[0]["input_ids"], task.batches[0]["labels"], strict=True):
        plain = tokenizer()(text)["input_ids"]
        row, wanted = ids[: len(plain)].tolist(), labels[: len(plain)].tolist()
        hidden = [i for i, id_ in enumerate(row) if id_ == 4]
        assert len(hidden) == max(1, round(0.5 * (len(plain) - 2)))
        assert [plain[i] if i in hidden else -100 for i in range(len(plain))] == wanted
        assert [id_ for i, id_ in enumerate(row) if i not in hidden] == [
            id_ for i, id_ in enumerate(plain) if i not in hidden
        ]
        assert not {0, len(plain) - 1} & set(hidden)  # the special tokens stay
        assert set(labels[len(plain) :].tolist()) <= {-100}
        logits = model(input_ids=torch.tensor([row])).logits[0].detach()
        losses += [nll(logits[i], plain[i]) for i in hidden]
    assert evaluate(model, task).loss == pytest.approx(mean(losses), rel=1e-5)


def masks(data: Path, path: Path, **options: Any) -> list[list[int]]:
    task = load_task("masked-lm", data, path, **options)
    return [row.tolist() for batch in task.batches for row in batch["labels"]]


def test_masks_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = save(CASES["BertForMaskedLM"](), tmp_path / "model")
    rows = [{"input_ids": torch.randint(5, 23, (12,)).tolist()} for _ in range(20)]
    data = jsonl(tmp_path / "rows.jsonl", rows)
    first = masks(data, path, mask_id=4)
    torch.manual_seed(7)
    assert masks(data, path, mask_id=4, batch=3) == first
    assert masks(data, path, mask_id=4, limit=6) == first[:6]
    assert masks(data, path, mask_id=4, seed=1) != first
    for labels in masks(data, path, mask_id=4, maskable={7, 9, 11}, mask_share=1.0):
        assert set(labels) <= {7, 9, 11, -100}
    hidden = masks(data, path, mask_id=4, maskable={7, 9, 11}, mask_share=1.0)
    for row, labels in zip(rows, hidden, strict=True):
        assert sum(id_ in {7, 9, 11} for id_ in row["input_ids"]) == sum(label != -100 for label in labels)


# --- classification -----------------------------------------------------------------------------------------


def test_text_classification(tmp_path: Path, folder: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, ["X", "O", 2, "1"], strict=True)]
    data = jsonl(tmp_path / "rows.jsonl", rows)
    model = load_model(folder, "text-classification")
    one = [model(**tokenizer()(text, return_tensors="pt")).logits[0].detach() for text in TEXTS]
    scores = evaluate(model, load_task("text-classification", data, folder))
    expected = [nll(logits, label) for logits, label in zip(one, [1, 0, 2, 1], strict=True)]
    assert scores.loss == pytest.approx(mean(expected), rel=1e-5)
    right = [float(logits.argmax() == label) for logits, label in zip(one, [1, 0, 2, 1], strict=True)]
    assert scores.accuracy == mean(right)


def test_text_pairs_come_as_pairs(tmp_path: Path, folder: Path) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [{"text": "a b", "text_pair": "c", "label": 0}])
    batch = load_task("text-classification", data, folder).batches[0]
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3]]
    assert batch["labels"].tolist() == [0]


def test_token_classification_counts_the_first_token_of_each_word(tmp_path: Path) -> None:
    path = bert("BertForTokenClassification", tmp_path / "model", id2label={0: "O", 1: "X", 2: "Y"})
    data = jsonl(tmp_path / "rows.jsonl", SENTENCES)
    task = load_task("token-classification", data, path)
    assert task.batches[0]["input_ids"].tolist() == [[2, 5, 15, 6, 3, 0, 0], [2, 7, 8, 15, 9, 15, 3]]
    ignored = -100
    assert task.batches[0]["labels"].tolist() == [
        [ignored, 1, ignored, 0, ignored, ignored, ignored],
        [ignored, 0, 2, ignored, 1, ignored, ignored],
    ]
    model = load_model(path, "token-classification")
    logits = [
        model(input_ids=torch.tensor([ids])).logits[0].detach() for ids in ([2, 5, 15, 6, 3], [2, 7, 8, 15, 9, 15, 3])
    ]
    expected = [
        nll(logits[0][1], 1),
        nll(logits[0][3], 0),
        nll(logits[1][1], 0),
        nll(logits[1][2], 2),
        nll(logits[1][4], 1),
    ]
    assert evaluate(model, task).loss == pytest.approx(mean(expected), rel=1e-5)


def vit(path: Path, **config: Any) -> Path:
    small = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=10)
    shape = dict(image_size=8, patch_size=4, num_channels=1)
    return save(build("ViTForImageClassification", **{**small, **shape, "num_labels": 10, **config}), path)


def test_digits_loss(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = vit(tmp_path / "model")
    model = load_model(path, "image-classification")
    pixels, labels = digits("test")
    logits = model(pixel_values=pixels[:50]).logits.detach()
    scores = evaluate(model, load_task("image-classification", "builtin:digits", path, limit=50, batch=7))
    assert scores.loss == pytest.approx(mean([nll(x, int(y)) for x, y in zip(logits, labels, strict=False)]), rel=1e-5)
    assert scores.accuracy == pytest.approx(float((logits.argmax(-1) == labels[:50]).double().mean()))


def test_image_files_go_through_the_models_processor(tmp_path: Path) -> None:
    """The demo's processor turns images with raw pixels 0..16 into exactly what builtin:digits gives."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("sklearn")
    path = vit(tmp_path / "model")
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    pixels, labels = digits("test")
    (tmp_path / "images").mkdir()
    for i in range(5):
        raw = ((pixels[i, 0] + 1) * 8).to(torch.uint8).numpy()
        image.fromarray(raw, "L").save(tmp_path / "images" / f"{i}.png")
    lines = [f"images/{i}.png,{int(labels[i])}" for i in range(5)]
    (tmp_path / "images.csv").write_text("\n".join(["image,label", *lines]))
    batch = load_task("image-classification", tmp_path / "images.csv", path).batches[0]
    torch.testing.assert_close(batch["pixel_values"], pixels[:5])
    assert torch.equal(batch["labels"], labels[:5])


# --- loading, and bad input ---------------------------------------------------------------------------------


def test_models_load_in_float32_and_for_evaluation(tmp_path: Path) -> None:
    path = save(CASES["GPT2LMHeadModel"]().to(torch.bfloat16), tmp_path / "model")
    model = load_model(path, "causal-lm")
    assert model.dtype == torch.float32 and not model.training


def test_models_that_do_not_fit_the_task(tmp_path: Path) -> None:
    path = save(CASES["GPT2Model"](), tmp_path / "base")
    with pytest.raises(ValueError, match=r"needs 'score.weight', which the weights lack"):
        load_model(path, "text-classification")
    with pytest.raises(ValueError, match="is a gpt2 model, for which there is no masked-lm"):
        load_model(path, "masked-lm")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(json.dumps({**json.loads(config), "vocab_size": 99}))
    with pytest.raises(
        ValueError, match=r"wte.weight' has shape \(\d+, \d+\), and GPT2LMHeadModel needs \(99, \d+\) by config"
    ):
        load_model(path, "causal-lm")
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="is damaged or cut short"):
        load_model(path, "causal-lm")
    with pytest.raises(ValueError, match="there is no folder"):
        load_model(str(tmp_path / "nowhere"), "causal-lm")


@pytest.mark.parametrize(
    ("task", "file", "content", "options", "sentence"),
    [
        ("poetry", "a.txt", "x", {}, "unknown task 'poetry'; choose from image-classification, causal-lm"),
        ("causal-lm", "a.txt", "", {}, "'.*a.txt' is empty"),
        ("causal-lm", "a.txt", "x" * 99, {"limit": 0}, "limit 0: it must be greater than or equal to 1"),
        ("causal-lm", "a.txt", "x" * 99, {"batch": 0}, "batch 0: it must be greater than or equal to 1"),
        ("causal-lm", "a.txt", "x" * 99, {"vocabulary": {"y": 0}},
         "1 characters that the vocabulary lacks: 'x'"),
        ("causal-lm", "a.txt", "x" * 99, {"vocabulary": {"x": 50},
         "context": 4}, "token id 50, but the model's vocabulary has 23"),
        ("causal-lm", "a.txt", "x", {"vocabulary": {"x": 0},
         "split": "all", "context": 4}, "fewer than one sequence"),
        ("causal-lm", "a.txt", "x" * 99, {"split": "test"},
         "no split 'test'; choose from train, validation, all"),
        ("causal-lm", "a.jsonl", '{"words": "x"}', {}, "row 1 of '.*' has no text in the column 'text'"),
        ("causal-lm", "a.jsonl", '{"text": " "}', {}, "row 1 of '.*' has no text in the column 'text'"),
        ("causal-lm", "a.jsonl", '{"input_ids": "x"}', {},
         "has no list of token ids in the column 'input_ids'"),
        ("causal-lm", "a.jsonl", '{"text": "x"}', {"split": "test"},
         "is taken whole; give the file of the split"),
        ("masked-lm", "a.jsonl", '{"input_ids": [1]}', {}, "masked-lm needs the id of the mask token"),
        ("masked-lm", "a.txt", "x" * 99, {"mask_share": 0.0}, "mask-share 0.0: it must be greater than 0"),
        ("text-classification", "a.jsonl", '{"text": "a", "label": "joy"}', {},
         "unknown label 'joy' in row 1 of '.*'; the model knows O, X, Y"),
        ("text-classification", "a.jsonl", '{"text": "a", "label": 3}', {}, "unknown label 3 in row 1"),
        ("text-classification", "a.jsonl", '{"text": "a", "label": 2.5}', {}, "unknown label 2.5 in row 1"),
        ("text-classification", "a.jsonl", '{"text": "a"}', {}, "lacks the column 'label'"),
        ("text-classification", "a.jsonl", '{"text": 5, "label": 1}', {},
         "row 1 of '.*' has no text in the column 'text'"),
        ("token-classification", "a.txt", "a Z\n", {}, "unknown label 'Z' in row 1"),
        ("token-classification", "a.jsonl", '{"tokens": ["a"]}', {}, "lacks the column 'tags'"),
        ("image-classification", "a.csv", "image,label\nnone.png,0\n", {},
         "row 1 of '.*': cannot read 'none.png'"),
    ],
)  # fmt: skip
def test_bad_data(
    tmp_path: Path, folder: Path, task: str, file: str, content: str, options: dict[str, Any], sentence: str
) -> None:
    (tmp_path / file).write_text(content)
    if "mask token" in sentence:
        (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=sentence) as error:
        load_task(task, tmp_path / file, folder, **options)
    assert "\n" not in str(error.value)


def test_data_that_do_not_fit_the_task(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="'builtin:digits' does not fit this task"):
        load_task("text-classification", "builtin:digits", folder)
    with pytest.raises(ValueError, match="'builtin:digits' is none of"):
        load_task("causal-lm", "builtin:digits", folder)
    with pytest.raises(ValueError, match="has 10 classes, but the model has 3"):
        load_task("image-classification", "builtin:digits", vit(tmp_path / "vit", num_labels=3))
    with pytest.raises(ValueError, match="has no tokenizer"):
        (tmp_path / "a.txt").write_text("some text")
        load_task("causal-lm", tmp_path / "a.txt", save(CASES["GPT2LMHeadModel"](), tmp_path / "gpt2"))
    with pytest.raises(ValueError, match="the data leave nothing to predict"):
        data = jsonl(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
        path = save(CASES["GPT2LMHeadModel"](), tmp_path / "gpt2")
        evaluate(load_model(path, "causal-lm"), load_task("causal-lm", data, path))


def test_loading_leaves_the_settings_of_transformers_alone(tmp_path: Path) -> None:
    before = transformers.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    load_model(save(CASES["GPT2LMHeadModel"](), tmp_path / "model"), "causal-lm")
    assert (
        transformers.logging.get_verbosity(),
        transformers.utils.logging.is_progress_bar_enabled(),
    ) == before
