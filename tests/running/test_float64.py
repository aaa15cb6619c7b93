# SPDX-License-Identifier: Apache-2.0
"""Verification in float64 sees rounding of float64 alone, whatever the classes of transformers compute in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from elements import random_alignment

import onebasin
from onebasin.models import Canonical, Folder, Rewritten
from onebasin.running import compare_rewritten
from onebasin.running.float64 import OnlyFloat64
from onebasin.symmetry import acting_groups


@pytest.mark.parametrize("case", zoo.one_of_each_family())
def test_an_exact_copy_is_the_same_in_float64(case: str, tmp_path: Path) -> None:
    folder = Folder(zoo.save(zoo.CASES[case]().double(), tmp_path))
    form = Canonical(folder, torch.float64)
    groups = acting_groups(form.signature, "full", rescale="joint")
    moved = Rewritten(form, random_alignment(form.signature, groups), torch.float64)
    verdict = compare_rewritten(folder, moved, dtype=torch.float64)
    assert verdict.same, f"relative difference {verdict.relative_difference:.2g}"


def test_a_match_in_float64_is_written(tmp_path: Path) -> None:
    """Gemma's norms and rotary tables are float32 in a float64 model."""
    a, b = (zoo.build("GemmaForCausalLM", **zoo.ROTARY) for _ in range(2))
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.mul_(1.1)
    result = onebasin.match(zoo.save(a, tmp_path / "a"), zoo.save(b, tmp_path / "b"), tmp_path / "out",
                            symmetry="full", precision="float64")  # fmt: skip
    assert result["max_output_difference"] < 1e-9


def test_nothing_is_computed_in_less_than_float64() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with OnlyFloat64():
        narrow = (x.float(), x.half(), x.to(torch.float32), x.to(torch.bfloat16), x.softmax(0, dtype=torch.float32))
        made = (torch.zeros(2), torch.full((2,), 0.5), torch.arange(2.0), torch.arange(2).float())
        assert {one.dtype for one in (*narrow, *made)} == {torch.float64}
        assert torch.full((2,), 1).dtype == torch.arange(2).dtype == torch.int64
    assert x.float().dtype == torch.float32


def test_a_mask_times_the_least_number_is_finite() -> None:
    """Splinter adds this to its logits; in float32 it is 0 times minus infinity."""
    with OnlyFloat64():
        found = (1 - torch.ones(2, dtype=torch.int64)) * torch.finfo(torch.float64).min
    assert torch.equal(found, torch.zeros(2, dtype=torch.float64))
