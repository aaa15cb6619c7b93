# SPDX-License-Identifier: Apache-2.0
"""How a descent moves what it is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onebasin.engine import Descent, Pace


def test_a_matrix_moves_alike_in_all_directions_that_its_gradient_has() -> None:
    """Muon's step has singular values that are equal up to the error of its five iterations (0.7 to 1.2 of one length);
    Adam's step, all entries of one size, is far from that. A vector beside the matrix moves by Adam."""
    generator = torch.Generator().manual_seed(0)
    start, slope = torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)
    spread = {}

    def loss(matrix: Tensor, vector: Tensor, step: int) -> Tensor:
        return (slope * matrix).sum() + vector.sum()

    for name in ("muon", "adam"):
        matrix, vector = start.clone().requires_grad_(), torch.zeros(3, requires_grad=True)
        run = Descent([matrix, vector], Pace(1, 0.1, looks=1), matrices=[matrix] if name == "muon" else [])
        losses = iter([2.0, 1.0])  # the step is kept
        run.descend(partial(loss, matrix, vector), partial(next, losses))
        values = torch.linalg.svdvals(matrix.detach() - start)
        spread[name] = float(values.max() / values.min())
        assert torch.equal(vector.detach().sign(), -torch.ones(3))
    assert spread["muon"] < 1.8 < spread["adam"]


def test_every_matrix_of_a_stack_moves_as_it_would_alone() -> None:
    """Though one has a gradient that is a thousand times as large; each step has the length that `matrix_lr` says."""
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(3, 6, 6, generator=generator) * torch.tensor([1.0, 1000.0, 0.001])[:, None, None]
    stack = torch.zeros(3, 6, 6, requires_grad=True)
    alone = [torch.zeros(6, 6, requires_grad=True) for _ in range(3)]
    scalar = torch.zeros((), requires_grad=True)

    def together(step: int) -> Tensor:
        return (slopes * stack).sum() + scalar

    def apart(step: int) -> Tensor:
        return sum(((slope * one).sum() for slope, one in zip(slopes, alone, strict=True)), torch.zeros(()))

    pace = Pace(steps=2, lr=0.1, looks=1, matrix_lr=0.3)
    Descent([stack, scalar], pace, matrices=[stack]).descend(together, partial(next, iter([2.0, 1.0])))
    Descent(alone, Pace(2, 0.3, looks=1), matrices=alone).descend(apart, partial(next, iter([2.0, 1.0])))
    for one, other in zip(stack.detach(), alone, strict=True):
        assert torch.equal(one, other.detach())
    assert float(stack.detach()[0].norm()) > 2 * float(scalar.detach().abs())


@pytest.mark.parametrize("careful", [False, True])
def test_a_careful_run_that_only_harms_begins_again_at_a_lower_rate(careful: bool, tmp_path: Path) -> None:
    """And goes on from its checkpoint as it would have without interruption. A careless one keeps its start."""

    def run(checkpoint: Path | None = None, stop: int | None = None) -> tuple[Descent, float]:
        number = torch.ones((), requires_grad=True)
        found = Descent([number], Pace(60, 1000.0, looks=6, careful=careful))

        def loss(step: int) -> Tensor:
            if step == stop:
                raise KeyboardInterrupt
            return number.square()

        found.descend(loss, lambda: float(number.detach().square()), checkpoint=checkpoint)
        return found, float(number.detach())

    whole, end = run()
    assert (whole.best_step > 0) == careful and (abs(end) < 1) == careful
    if careful:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "state", stop=35)
        again, other = run(tmp_path / "state")
        assert (again.best_step, other) == (whole.best_step, end)
