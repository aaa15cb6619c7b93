# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from pairs import folder
from test_progressive import CASE, CASES, merge, outputs, pair
from torch import Tensor
from zoo import inputs

from onebasin.fusion.compression import kept_units, projection
from onebasin.models import Canonical, Folder


def moments(n: int, seed: int) -> Tensor:
    rows = torch.randn(4 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.mT @ rows / len(rows)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def lost(moment: Tensor, readers: Tensor, rows: Tensor) -> float:
    """What readers miss of a linear function, given some of its inputs alone."""
    left = torch.linalg.lstsq(moment[rows][:, rows], (moment @ readers)[rows]).solution
    full = (readers * (moment @ readers)).sum()
    return float(full - (left * (moment @ readers)[rows]).sum())


@pytest.mark.parametrize("g", [1, 3])
def test_few_units_are_kept_nearly_as_well_as_the_best(g: int) -> None:
    """Against all subsets. Going one by one is not always optimal."""
    ratios = []
    for seed in range(10):
        moment, readers = moments(8 * g, seed), torch.randn(8 * g, 5, dtype=torch.float64)
        readers *= torch.rand(8, dtype=torch.float64).repeat_interleave(g).unsqueeze(1)

        def cost(units: Tensor, moment: Tensor = moment, readers: Tensor = readers) -> float:
            return lost(moment, readers, (units.unsqueeze(1) * g + torch.arange(g)).flatten())

        every = [cost(torch.tensor(some)) for some in combinations(range(8), 4)]
        ratios.append(cost(kept_units(moment, readers, 4, 8)) / min(every))
        assert ratios[-1] <= sorted(every)[len(every) // 10] / min(every)
    assert sorted(ratios)[5] < 1.05


def test_of_equal_units_one_is_kept() -> None:
    n = 40
    moment, readers = moments(n, 0), torch.randn(n, 7, dtype=torch.float64)
    damped = moment.repeat(2, 2) + 1e-6 * torch.eye(2 * n)
    keep = kept_units(damped, readers.repeat(2, 1) / 2, n, 2 * n)
    assert sorted((keep % n).tolist()) == list(range(n))


def test_units_that_are_not_read_go() -> None:
    readers = torch.randn(60, 7, dtype=torch.float64)
    gone = torch.randperm(60)[:30]
    readers[gone] = 0
    assert not set(kept_units(moments(60, 0), readers, 30, 60).tolist()) & set(gone.tolist())


def test_no_other_projection_loses_less() -> None:
    moment, c = moments(10, 0), torch.randn(6, 10, dtype=torch.float64)
    wanted = c.mT @ c

    def missed(t: Tensor) -> float:
        d = torch.linalg.solve(t @ moment @ t.mT, t @ moment).mT
        left = torch.eye(10, dtype=torch.float64) - d @ t
        return float((wanted @ left @ moment @ left.mT).trace())

    best = projection(moment, wanted, 4)
    assert torch.allclose(best @ best.mT, torch.eye(4, dtype=torch.float64))
    assert missed(projection(moment, wanted, 6)) < 1e-12  # no more is read
    assert missed(best) > 1e-3
    for scale in (1e-3, 0.1, 10.0):
        for _ in range(50):
            assert missed(best + scale * torch.randn(4, 10, dtype=torch.float64)) > missed(best)


@pytest.mark.parametrize(
    "case", ["GPT2LMHeadModel", "ViTForImageClassification", "LlamaForCausalLM", "BertForMaskedLM"]
)
def test_equal_models_compress_to_their_function(case: str, tmp_path: Path) -> None:
    models, batches = pair(case, tmp_path, 16)
    form = Canonical(models[1], torch.float64)
    merged = merge([form, form], batches, [0.5, 0.5], 1e-3, select=True)
    fresh = inputs(CASES[case]().double(), 99)
    ours, theirs = outputs(form, fresh, merged.tensors), outputs(form, fresh)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-5 * float(value.abs().max())), name


@pytest.mark.parametrize("case", CASE)
@pytest.mark.parametrize("end", [0, 1])
def test_all_weight_on_one_model_keeps_it(case: str, end: int, tmp_path: Path) -> None:
    """Also where the data say little: there are fewer tokens than units."""
    models, batches = pair(case, tmp_path, 2)
    forms = [Canonical(model, torch.float64) for model in models]
    merged = merge(forms, batches, [1.0 - end, float(end)], 1e-3, select=True)
    fresh = inputs(CASES[case]().double(), 99)
    ours, theirs = outputs(forms[0], fresh, merged.tensors), outputs(forms[end], fresh)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-10 * float(value.abs().max())), name


def test_positions_that_a_model_lacks_are_those_of_the_other(tmp_path: Path) -> None:
    """With all weight on the longer one, its function stays at all of them."""
    longer, shorter = (
        Canonical(
            Folder(folder(tmp_path / str(n), "GPT2LMHeadModel", seed, apart=0.2, dtype=torch.float64, n_positions=n))
        )
        for seed, n in enumerate((16, 12))
    )
    batches = [inputs(CASES["GPT2LMHeadModel"]().double(), seed) for seed in range(3)]
    merged = merge([longer, shorter], batches, [1.0, 0.0], 1e-3, select=True)
    rows = {"input_ids": torch.arange(16).unsqueeze(0)}
    ours, theirs = outputs(longer, rows, merged.tensors), outputs(longer, rows)
    assert torch.allclose(ours["logits"], theirs["logits"], atol=1e-10)
