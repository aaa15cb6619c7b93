# SPDX-License-Identifier: Apache-2.0
"""A tiny twin has its model's structure, and no table that changes its function passes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import zoo
from pairs import folders
from transformers import CONFIG_MAPPING

import onebasin
from onebasin.families import tables
from onebasin.models import Canonical, Folder, ModelError
from onebasin.running.trial import TOLERANCE, departure_on_twin, probes, saved_twin
from onebasin.running.twins import build, outputs

TYPES = [kind for table in tables().values() for kind in table.types if kind in CONFIG_MAPPING]
UNRUN = {"deepseek_v2": dict(num_experts_per_tok=6)}  # the class has no number that runs


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_has_a_twin_that_runs(kind: str) -> None:
    """At the sizes that its configuration has by default, which are those of real models."""
    model, given = build(CONFIG_MAPPING[kind](**UNRUN.get(kind, {})), probes=probes)
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    found = outputs(model, given)
    assert found and all(bool(value.isfinite().all()) for value in found)
    assert all(float(parameter.detach().std()) > 0 for parameter in model.parameters() if parameter.numel() > 1)


@pytest.mark.parametrize("case", zoo.CASES)
def test_every_small_configuration_has_a_twin(case: str) -> None:
    """Whose switches are as they were: the twin has the layers' parameters that the model has."""
    given = zoo.CASES[case]()
    model, _ = build(given.config, type(given), probes=probes)
    assert patterns(given) == patterns(model) and type(model) is type(given)


def patterns(model: torch.nn.Module) -> set[str]:
    """The names of parameters without numbers, and without the pooler that a class may leave out."""
    names = (".".join("{}" if part.isdigit() else part for part in name.split(".")) for name, _ in
             model.named_parameters())  # fmt: skip
    return {name for name in names if "pooler." not in name}


@pytest.mark.parametrize("case", zoo.one_of_each_family())
def test_the_tables_hold_on_their_twins(case: str, tmp_path: Path) -> None:
    model = Folder(zoo.save(zoo.CASES[case](), tmp_path))
    assert departure_on_twin(model) < TOLERANCE / 1e4
    assert departure_on_twin(Canonical(model)) < TOLERANCE / 1e4


# Tables that are wrong in one place each: what is read there, what happens, and how the true table has it.
WRONG = {
    "neurons rotate": ("gpt2", "ffn         act activation_function", "ffn         linear"),
    "a bias passes a norm": ("deberta-v2", " ; stays when conv_kernel_size!=None, conv_kernel_size!=0, layer<1", ""),
    "a value is written like a query": ("bert", "attention.self.value.{weight,bias}                   (head vo)",
                                        "attention.self.value.{weight,bias}                   (head qk)"),
}  # fmt: skip
CASE = {"gpt2": "GPT2LMHeadModel", "deberta-v2": "DebertaV2ForTokenClassification-own-keys-conv",
        "bert": "BertForTokenClassification"}  # fmt: skip


@pytest.fixture(params=WRONG)
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two models, and a table that is wrong for them."""
    family, true, false = WRONG[request.param]
    text = (files("onebasin.families") / f"{family}.txt").read_text("utf-8")
    assert true in text
    table = tmp_path / "wrong.txt"
    table.write_text(text.replace(true, false))
    return *folders(tmp_path, CASE[family]), table


def test_a_wrong_table_does_not_pass(wrong: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, table = wrong
    out = tmp_path / "out"
    for job in (
        lambda: onebasin.match(a, b, out, symmetry="full", family=str(table), verify="tensors"),
        lambda: onebasin.merge([a, b], out, match="full", family=str(table), verify="tensors"),
        lambda: onebasin.canonical(a, out, family=str(table), verify="tensors"),
    ):
        with pytest.raises(ModelError, match=r"the table of family '.*' is wrong for '.*/[01]'.*nothing was written"):
            job()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "wrong.txt"]


def test_maps_by_a_wrong_table_do_not_prove_a_copy(wrong: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, table = wrong
    maps = tmp_path / "maps.safetensors"
    onebasin.match(a, b, tmp_path / "out", family=str(table), verify="none", alignment=maps)
    with pytest.raises(ModelError, match="the table of family"):
        onebasin.verify(a, tmp_path / "out", tensors=True, alignment=maps, family=str(table))


def test_a_right_table_passes(tmp_path: Path) -> None:
    a, b = (zoo.save(zoo.CASES["GPT2LMHeadModel"](), tmp_path / name) for name in "ab")
    assert onebasin.match(a, b, tmp_path / "out", symmetry="full", verify="tensors")["max_output_difference"] is None


def test_where_no_twin_can_be_made_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Folder(zoo.save(zoo.CASES["GPT2LMHeadModel"](), tmp_path / "a"))
    monkeypatch.setattr("onebasin.running.trial.LAYERS", ())
    with pytest.raises(ModelError, match=r"no small model of its configuration could be made.*--verify outputs"):
        saved_twin(model, tmp_path)
