# SPDX-License-Identifier: Apache-2.0
"""Where missing directions are: the smallest sets of tensors that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.symmetry.audit.missing import smallest_sets

PLACES = {"large": torch.arange(6), "first": torch.arange(6, 9), "second": torch.arange(9, 12)}


def direction(*roles: str, seed: int) -> Tensor:
    """Return a random direction that is zero outside of some tensors."""
    found = torch.zeros(12, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for role in roles:
        found[PLACES[role]] = torch.randn(len(PLACES[role]), generator=generator, dtype=torch.float64)
    return found


def span(*directions: Tensor) -> Tensor:
    """Return an orthonormal basis of a span, mixed so that no column is one of the directions."""
    mixed = torch.stack(directions, 1) @ torch.randn(
        len(directions), len(directions), generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    return torch.linalg.qr(mixed).Q


def test_a_direction_is_found_in_as_few_tensors_as_hold_it() -> None:
    known = direction("large", seed=0)
    pair, alone = direction("large", "first", seed=1), direction("second", seed=2)
    null = span(known, pair, alone)
    assert set(smallest_sets(null, span(known), PLACES)) == {(("large", "first"), 1), (("second",), 1)}


def test_what_a_set_holds_is_counted_once() -> None:
    """Two directions in one tensor, and a sum of one of them with another tensor's, which is then known."""
    first, second = direction("first", seed=1), direction("first", seed=2)
    null = span(first, second, first + direction("large", seed=3))
    found = list(smallest_sets(null, null[:, :0], PLACES))
    assert sorted(found) == [(("first",), 2), (("large",), 1)]


def test_nothing_is_missing_where_all_is_known() -> None:
    null = span(direction("first", seed=1), direction("second", seed=2))
    assert not list(smallest_sets(null, null, PLACES))
