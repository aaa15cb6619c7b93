# SPDX-License-Identifier: Apache-2.0
"""`onebasin merge --layers auto`: the layers that it matches are those with which the merged model does best."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import folders, weights

import onebasin

pytestmark = pytest.mark.usefixtures("three_sweeps")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return folders(tmp_path)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_candidate_is_written(ask, models, data, tmp_path, metric):
    """Every candidate is merged and measured by hand, with the commands."""
    measured = {}
    for layers in ("0", "1", "0,1"):
        out = tmp_path / f"only-{layers}"
        ask("merge", *models, "-o", out, "--layers", layers, "--anchor", 0)
        measured[layers] = ask("evaluate", out, "--task", "causal-lm", "--data", data)["results"][0][metric]
    found = ask("merge", *models, "-o", tmp_path / "auto", "--layers", "auto", "--validation", data,
                "--metric", metric, "--anchor", 0)  # fmt: skip
    assert found["tried"] == pytest.approx(measured, rel=1e-5)
    best = ",".join(map(str, found["layers"]))
    assert measured[best] == pytest.approx((min if metric == "loss" else max)(measured.values()))
    assert found["max_output_difference"][0] < 1e-4  # the written one is verified
    chosen, auto = weights(tmp_path / f"only-{best}"), weights(tmp_path / "auto")
    assert all(torch.equal(chosen[name], tensor) for name, tensor in auto.items())


def test_methods_that_look_at_data_choose_too(ask, models, data, tmp_path):
    found = ask("merge", *models, "-o", tmp_path / "out", "--layers", "auto", "--validation", data,
                "--method", "regmean", "--data", data)  # fmt: skip
    assert set(found["tried"]) == {"0", "1", "0,1"} and found["method"] == "regmean"


def test_what_is_refused(refused, models, data, tmp_path):
    auto = ["merge", *models, "-o", tmp_path / "out", "--layers", "auto"]
    assert "--validation FILE" in refused(*auto)
    assert "does not go with --match none" in refused(*auto, "--validation", data, "--match", "none")
    assert "no metric 'f1'" in refused(*auto, "--validation", data, "--metric", "f1")
    assert "--layers: 'auto'" in refused("match", *models, "-o", tmp_path / "out", "--layers", "auto")
    with pytest.raises(ValueError, match="merge_best_layers chooses them"):
        onebasin.merge(models, layers="auto")
    line = refused("evaluate", models[0], "--task", "causal-lm", "--data", data, "--maskable", "9-5")
    assert "--maskable: '9-5' is neither" in line
