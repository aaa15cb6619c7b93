# SPDX-License-Identifier: Apache-2.0
"""`onebasin statistics`, and the methods of merging that measure on data, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import folders, scrambled, weights

import onebasin

pytestmark = pytest.mark.usefixtures("three_sweeps")

DATA = [{"input_ids": [3 + (7 * i + j) % 17 for j in range(4 + i % 3)], "label": i % 3} for i in range(12)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DATA))
    return file


@pytest.mark.parametrize(("method", "kind"), [("fisher", "fisher"), ("regmean", "gram")])
@pytest.mark.parametrize("match", ["none", "permutation"])
def test_saved_statistics_merge_as_measured_ones(ask, a, b, data, tmp_path, method, kind, match):
    """With no rotation in between, what was measured before and what is measured on the matched model agree.

    Fisher labels are drawn anew, so the diagonals agree only in the mean: they are compared where they are given.
    """
    given = ["--data", data, "--task", "text-classification"]
    files = []
    for number, model in enumerate((a, b)):
        files.append(tmp_path / f"{number}.{kind}")
        found = ask("statistics", model, "--kind", kind, *given, "-o", files[-1])
        assert found["samples"] == 12 and found["kind"] == kind and files[-1].is_file()
    saved = ",".join(map(str, files))
    ask("merge", a, b, "-o", tmp_path / "saved", "--method", method, "--match", match, "--statistics", saved)
    result = ask("merge", a, b, "-o", tmp_path / "fresh", "--method", method, "--match", match, *given)
    ask("merge", a, b, "-o", tmp_path / "plain", "--match", match)
    saved, fresh, plain = (weights(tmp_path / name) for name in ("saved", "fresh", "plain"))
    assert any(not torch.allclose(fresh[name], plain[name], atol=1e-3) for name in plain)
    if method == "regmean":
        assert set(result["jitter"].values()) == {1e-10}
        assert all(float((saved[name] - fresh[name]).norm()) < 1e-5 * float(fresh[name].norm()) for name in fresh)
    elif match == "none":
        assert all(torch.allclose(saved[name], fresh[name], atol=1e-6) for name in fresh)


def test_grams_follow_rotations_and_fisher_diagonals_refuse_to(ask, refused, a, data, tmp_path):
    twin = scrambled(a, tmp_path / "twin")
    given = ["--data", data, "--task", "text-classification"]
    files = {}
    for kind in ("gram", "fisher"):
        files[kind] = ",".join(str(tmp_path / f"{number}.{kind}") for number in range(2))
        for file, model in zip(files[kind].split(","), (a, twin), strict=True):
            ask("statistics", model, "--kind", kind, *given, "-o", file)
    merged = tmp_path / "merged"
    ask("merge", a, twin, "-o", merged, "--method", "regmean", "--statistics", files["gram"])
    back = weights(merged)
    assert all(torch.allclose(tensor, back[name], atol=1e-4) for name, tensor in weights(a).items())
    line = refused("merge", a, twin, "-o", tmp_path / "no", "--method", "fisher", "--statistics", files["fisher"])
    assert "does not survive the rotation" in line


def test_levels_that_move_the_stream_take_statistics_of_the_canonical_form(ask, refused, data, tmp_path):
    models = folders(tmp_path)
    for number, model in enumerate(models):
        ask("statistics", model, "--kind", "gram", "--data", data, "-o", tmp_path / f"{number}.plain")
        ask("statistics", model, "--kind", "gram", "--data", data, "-o", tmp_path / f"{number}.gram", "--canonical")
    common = ["--method", "regmean", "--match", "full"]
    files = {name: ",".join(str(tmp_path / f"{i}.{name}") for i in range(2)) for name in ("plain", "gram")}
    ask("merge", *models, "-o", tmp_path / "saved", *common, "--statistics", files["gram"])
    ask("merge", *models, "-o", tmp_path / "fresh", *common, "--data", data)
    saved, fresh = weights(tmp_path / "saved"), weights(tmp_path / "fresh")
    assert all(torch.allclose(saved[name], fresh[name], atol=1e-3) for name in fresh)
    line = refused("merge", *models, "-o", tmp_path / "no", *common, "--statistics", files["plain"])
    assert "were not measured on" in line and "--canonical" in line


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_each_of_three_models_on_data_of_its_own(a, b, c, data, tmp_path, method):
    """A model with all the weight is what comes out; datasets are counted."""
    files = [data]
    for number in (1, 2):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("".join(json.dumps({"input_ids": row["input_ids"][:-number]}) + "\n" for row in DATA))
    how = dict(method=method, match="none", task="text-classification", verify=False)
    found = onebasin.merge([a, b, c], tmp_path / "one", data=[*map(str, files)], weights=[0, 1, 0], **how)
    assert found["method"] == method
    for name, tensor in weights(b).items():
        assert torch.allclose(weights(tmp_path / "one")[name], tensor, atol=1e-5), name
    with pytest.raises(ValueError, match="3 models are measured on one dataset, or on one of their own each, not on 2"):
        onebasin.merge([a, b, c], tmp_path / "no", data=[str(data)] * 2, **how)


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_a_single_example_is_enough(ask, a, b, tmp_path, method):
    (tmp_path / "one.jsonl").write_text(json.dumps(DATA[0]) + "\n")
    given = ["--data", tmp_path / "one.jsonl", "--task", "text-classification", "--match", "none"]
    found = ask("merge", a, b, "-o", tmp_path / "merged", "--method", method, *given)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "merged").values())
    assert found["settings"] and found["method"] == method


def test_what_is_refused(ask, refused, a, b, data, tmp_path):
    given = ["--data", data, "--task", "text-classification"]
    file = tmp_path / "s"
    ask("statistics", a, *given, "-o", file)
    assert "exists" in refused("statistics", a, *given, "-o", file)
    assert "unknown kind" in refused("statistics", a, "--kind", "hessian", *given, "-o", tmp_path / "t")
    assert "calibration data are missing" in refused("statistics", a, "-o", tmp_path / "t")
    assert "lacks the column 'text'" in refused("statistics", a, *given, "--labels", "given", "-o", tmp_path / "t")
    merging = ["merge", a, b, "-o", tmp_path / "m", "--match", "none"]
    assert "2 models need 2" in refused(*merging, "--method", "fisher", "--statistics", file)
    assert "regmean needs gram" in refused(*merging, "--method", "regmean", "--statistics", f"{file},{file}")
    assert "were not measured on" in refused(*merging, "--method", "fisher", "--statistics", f"{file},{file}")
    assert "labels 'true': choose from" in refused(*merging, "--method", "fisher", *given, "--labels", "true")
    assert "not negative" in refused(*merging, "--method", "fisher", *given, "--weights", "2,-1")
    assert "shrink 2.0: it must be" in refused(*merging, "--method", "regmean", *given, "--shrink", "2")
