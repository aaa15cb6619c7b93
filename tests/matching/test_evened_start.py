# SPDX-License-Identifier: Apache-2.0
"""The second start: spectra evened out, so that rows which say nothing do not decide."""

from __future__ import annotations

import torch

from onebasin.matching.moments import evened
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.orthogonal import random_orthogonal


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_singular_values_become_their_roots_and_rotations_pass_through():
    matrix = normal(5, 9)
    turn = random_orthogonal(5, (), torch.Generator().manual_seed(1))
    assert torch.allclose(torch.linalg.svdvals(evened(matrix)), torch.linalg.svdvals(matrix).sqrt())
    assert torch.allclose(evened(turn @ matrix), turn @ evened(matrix))


def test_columns_that_say_nothing_decide_less():
    """A table whose trained tokens are planted, and whose other tokens are one vector, another one in each model: of 20
    orders far more are found from evened tables than from the tables as they are."""
    found = {True: 0, False: 0}
    for seed in range(20):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        trained = normal(12, 60, seed=10 + seed)
        others = [normal(12, 1, seed=number + seed).expand(12, 40) for number in (200, 300)]
        anchor = torch.cat([trained, others[0]], 1)
        source = torch.empty_like(anchor)
        source[order] = torch.cat([trained, others[1]], 1)
        for even in found:
            a, s = (evened(table) if even else table for table in (anchor, source))
            found[even] += bool(torch.equal(assignment(a @ s.mT), order))
    assert found[True] >= found[False] + 10
