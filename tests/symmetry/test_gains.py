# SPDX-License-Identifier: Apache-2.0
"""What a pair of blocks gains at its best inner map, with and without the map itself."""

from __future__ import annotations

import pytest
import torch
from elements import all_groups
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebasin.symmetry.groups import Moments, best_scale
from onebasin.symmetry.groups.scaling import factor_gain

GROUPS = {name: group for name, group in all_groups().items() if group.exact_gain}
EPS = {torch.float32: 1e-6, torch.float64: 1e-14}
scales = st.floats(-3, 3).map(lambda power: 10.0**power)
inner = st.floats(-8, 8)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_a_gain_is_what_the_nearest_element_takes_off_the_distance(group) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, s, t = torch.randn(4, 50, 4, 6, dtype=torch.float64, generator=generator)  # writers and readers of both
    found = Moments(a @ s.mT, b @ t.mT, s.square().sum(-1), t.square().sum(-1))
    element = group.nearest(found)
    near = (a - element.act(s)).square() + (b - element.act(t, dual=True)).square()
    lost = a.square() + b.square() + s.square() + t.square()  # the distance where nothing overlaps
    torch.testing.assert_close(group.gain(found), (lost - near).sum((-2, -1)) / 2)


def best_of_both_signs(P: Tensor, D: Tensor, p: Tensor, d: Tensor) -> Tensor:
    values = []
    for sign in (1, -1):
        f = best_scale(sign * P, sign * D, p, d) * sign
        values.append(f**2 * p - 2 * f * P + d / f**2 - 2 * D / f)
    return (p + d - torch.minimum(*values)) / 2


@pytest.mark.parametrize("dtype", EPS)
@given(inner, inner, scales, scales)
def test_the_gain_of_a_factor_is_the_best_of_both_signs(dtype, u, v, p, d) -> None:
    """Overlaps beyond what norms allow as well, up to where the quartic has three positive roots."""
    exact = [torch.tensor([x], dtype=torch.float64) for x in (u * p**0.75 * d**0.25, v * p**0.25 * d**0.75, p, d)]
    found = factor_gain(*(x.to(dtype) for x in exact)).double()
    size = p + d + (p * d) ** 0.5 * (1 + u**2 + v**2)
    assert float((found - best_of_both_signs(*exact)).abs()) <= 10 * EPS[dtype] * size


@pytest.mark.parametrize(("u", "v"), [(2.0, -2.0), (4.0, -4.0), (2.0, 2.0), (1.0, 1.0), (0.0, 0.0), (-3.0, 3.0)])
def test_no_factor_gains_more(u, v) -> None:
    """At double and triple roots, too, where Newton's steps shrink slowly."""
    f = torch.logspace(-3, 3, 200001, dtype=torch.float64)
    value = f**2 + 1 / f**2 - 2 * (u * f + v / f).abs().maximum(-(u * f + v / f))
    one = torch.ones(1, dtype=torch.float64)
    found = factor_gain(u * one, v * one, one, one)
    assert float(found) == pytest.approx(1 - float(value.min()) / 2, abs=1e-8)


def test_what_is_repeated_or_empty_counts_as_it_stands() -> None:
    generator = torch.Generator().manual_seed(1)
    P, D = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
    p, d = torch.rand(2, 5, generator=generator, dtype=torch.float64) + 3
    p[1] = P[:, 1] = d[2] = D[:, 2] = 0
    repeated = factor_gain(P, D, p.expand(5, 5), d.expand(5, 5))
    torch.testing.assert_close(repeated, factor_gain(P, D, p.repeat(5, 1), d.repeat(5, 1)))
    torch.testing.assert_close(repeated[:, 1], D[:, 1].abs())
    torch.testing.assert_close(repeated[:, 2], P[:, 2].abs())
