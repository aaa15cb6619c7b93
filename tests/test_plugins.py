# SPDX-License-Identifier: Apache-2.0
"""Packages of others: a method in one file and a family in one table, found by installing them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import onebasin

METHOD = '''
"""The median of the models, pulled towards the first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onebasin.fusion.method import TensorMethod
from onebasin.settings import Factor, setting


@dataclass(frozen=True)
class Median(TensorMethod):
    """The elementwise median, pulled towards the first model."""

    pull: Factor = setting(0.0, "Weight of the first model.")

    def combine(self, tensors, weights, signature, entry):
        return self.pull * tensors[0] + (1 - self.pull) * torch.stack(list(tensors)).median(0).values
'''

FAMILY = """
family toyllama
types  toyllama
prefix model.
layers num_hidden_layers
size   head = num_attention_heads

spaces
    vocab    fixed
    stream   linear         stream
    head     permutation    attention  per layer
    qk       rotary         attention  per layer, head
    vo       linear         attention  per layer, head  passes
    ffn      permutation    ffn        per layer
    up_scale     factor         ffn        per layer, ffn

tensors
    embed_tokens.weight                   vocab stream

layer layers.{}
    input_layernorm.weight                rmsnorm: stream -> attn_in
    self_attn.q_proj.weight               (head qk) attn_in'
    self_attn.k_proj.weight               (head qk') attn_in'
    self_attn.v_proj.weight               (head vo) attn_in'
    self_attn.o_proj.weight               stream (head vo')
    post_attention_layernorm.weight       rmsnorm: stream -> mlp_in
    mlp.gate_proj.weight                  ffn mlp_in'
    mlp.up_proj.weight                    (ffn up_scale) mlp_in'
    mlp.down_proj.weight                  stream (ffn up_scale')

tensors
    norm.weight                           rmsnorm: stream -> final

heads
    lm_head.weight                        vocab final'
"""
SIZES = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
# Many commands in one process, which sees the packages from its start; starting it takes seconds.
DRIVER = """
import json, sys
from typer.testing import CliRunner
import onebasin
from onebasin.cli import app
said = []
for words in json.load(sys.stdin):
    if isinstance(words, dict):
        said.append([0, json.dumps(onebasin.merge(**words)["settings"]), ""])
    else:
        found = CliRunner().invoke(app, words)
        said.append([found.exit_code, found.stdout, found.stderr])
print(json.dumps(said))
"""


class Said(NamedTuple):
    code: int
    out: str
    error: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder such as pip makes: two modules, and what their package says of them."""
    where = tmp_path_factory.mktemp("site")
    (where / "medians.py").write_text(METHOD)
    (where / "toyfamily.py").write_text(f'TABLE = """{FAMILY}"""\n')
    info = where / "plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[onebasin.methods]\nmedian = medians:Median\nbroken = nowhere:Method\n"
        "[onebasin.families]\ntoyllama = toyfamily:TABLE\n"
    )
    return where


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    where = tmp_path_factory.mktemp("models")
    names = []
    for number in range(3):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
        names.append(str(where / str(number)))
        model.save_pretrained(names[-1])
    return names


def run(site: Path, *commands: list[Any] | dict[str, Any]) -> list[Said]:
    """Run command lines, and calls of `merge` (dicts), beside the packages of a site."""
    path = os.pathsep.join([str(site), str(Path(onebasin.__file__).parents[1])])
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, check=True,
                          input=json.dumps(commands, default=str),
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})  # fmt: skip
    return [Said(*one) for one in json.loads(done.stdout)]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_method_of_another_package_has_its_setting_everywhere(site: Path, models: list[str], tmp_path: Path) -> None:
    """On the command line, in Python and in a merge file: the same bytes, which differ from those of the default."""
    command = ["merge", *models, "--method", "median", "--match", "none"]
    lines = ["merge_method: median", "parameters:", "  pull: 0.25", "models:", *(f"- model: {one}" for one in models)]
    (tmp_path / "merge.yml").write_text("\n".join(lines) + "\n")
    typed, default, called, file, offered = run(
        site,
        [*command, "--pull", "0.25", "-o", tmp_path / "typed"],
        [*command, "-o", tmp_path / "default"],
        {"models": models, "output": tmp_path / "called", "method": "median", "match": "none", "pull": 0.25},
        ["merge", "--config", tmp_path / "merge.yml", "-o", tmp_path / "file"],
        ["merge", "--help"],
    )
    assert typed.code == default.code == file.code == 0, (typed, default, file)
    assert json.loads(called.out) == {"pull": 0.25}
    assert len({digest(tmp_path / name) for name in ("typed", "called", "file")}) == 1
    assert digest(tmp_path / "typed") != digest(tmp_path / "default")
    assert "Weight of the first model".lower() in offered.out.lower()


def test_what_is_wrong_with_a_setting_or_a_package_is_said_in_a_sentence(
    site: Path, models: list[str], tmp_path: Path
) -> None:
    wrong = {
        "pull 2.0: it must be less than or equal to 1": ["--method", "median", "--pull", "2"],
        "pull is a setting of median; name the method, too: --method median": ["--pull", "0.5"],
        "pull is a setting of median, not of average": ["--method", "average", "--pull", "0.5"],
        "the method 'broken' cannot be loaded from nowhere:Method": ["--method", "broken"],
    }
    command = ["merge", *models, "-o", tmp_path / "out", "--match", "none"]
    for sentence, found in zip(wrong, run(site, *([*command, *words] for words in wrong.values())), strict=True):
        assert found.code == 2 and sentence in found.error and found.error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_family_of_another_package_is_matched(site: Path, models: list[str], tmp_path: Path) -> None:
    """A type that transformers does not know, with a table of at most 40 lines."""
    assert len([line for line in FAMILY.splitlines() if line]) <= 40
    for number, name in enumerate(models[:2]):
        config = json.loads((Path(name) / "config.json").read_text())
        target = tmp_path / str(number)
        target.mkdir()
        (target / "config.json").write_text(json.dumps({**config, "model_type": "toyllama"}))
        (target / "model.safetensors").write_bytes((Path(name) / "model.safetensors").read_bytes())
    command = ["match", tmp_path / "0", tmp_path / "1", "-o", tmp_path / "out", "--symmetry", "full", "--verify",
               "tensors", "--json"]  # fmt: skip
    matched, families = run(site, command, ["families"])
    assert matched.code == 0, matched.error
    result = json.loads(matched.out)
    assert result["distance_after"] < result["distance_before"]
    assert "toyllama" in families.out
    with pytest.raises(ValueError, match="'toyllama' has no table yet"):  # without the package
        onebasin.match(tmp_path / "0", tmp_path / "1", tmp_path / "out", overwrite=True)
