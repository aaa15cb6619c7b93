# SPDX-License-Identifier: Apache-2.0
"""Soft couplings: doubly stochastic, the permutation at temperature zero, and exact splitting of ReLU neurons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebasin.symmetry.coupling import soften
from onebasin.symmetry.groups.assignment import assignment


@settings(max_examples=30)
@given(st.integers(2, 8), st.sampled_from([0.3, 1.0, 10.0]), st.integers(0, 100))
def test_rows_and_columns_sum_to_one_and_nothing_is_negative(n, temperature, seed):
    score = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = soften(score, temperature, sweeps=2000).matrix  # scores that nearly fall apart into blocks take long
    assert (matrix >= 0).all()
    assert torch.allclose(matrix.sum(0), torch.ones(n).double(), atol=1e-6)
    assert torch.allclose(matrix.sum(1), torch.ones(n).double(), atol=1e-6)


def test_a_low_temperature_gives_the_assignment():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        score = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        matrix = soften(score, 0.002).matrix
        assert torch.equal(matrix.argmax(-1), assignment(score))
        assert matrix.max(-1).values.min() > 0.99


def test_it_maximises_score_plus_entropy():
    generator = torch.Generator().manual_seed(1)
    score = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    best = soften(score, 0.5, sweeps=1000).matrix
    temperature = 0.5 * score.std(correction=0)

    def value(matrix):
        return (matrix * score).sum() - temperature * torch.special.xlogy(matrix, matrix).sum()

    for _ in range(200):  # along any direction that keeps rows and columns, the value falls
        way = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        way = way - way.mean(0) - way.mean(1, keepdim=True) + way.mean()
        other = best + 1e-3 * best.min() * way / way.abs().max()
        assert value(other) <= value(best) + 1e-12


def test_a_temperature_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        soften(torch.eye(3), 0.0)
