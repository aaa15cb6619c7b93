# SPDX-License-Identifier: Apache-2.0
"""Products of large matrices: right to rounding, whichever library forms them, and wherever a gradient is asked for."""

from __future__ import annotations

import pytest
import torch

from onebasin.symmetry.groups import gemm as module
from onebasin.symmetry.groups.elements import Linear, Monomial, act_on
from onebasin.symmetry.groups.gemm import gemm


@pytest.mark.parametrize("processor", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize("columns", [False, True])
def test_large_products_are_right_to_rounding_whoever_forms_them(columns, processor, monkeypatch):
    """The rounding of a sum of m products of numbers near 1, whose sums are near m^0.5."""
    monkeypatch.setattr(module, "_processor", lambda: processor)
    monkeypatch.setattr(module, "TALL", 60)
    monkeypatch.setattr(module, "_offered", module._offered.__wrapped__)
    generator = torch.Generator().manual_seed(3)
    a, s = (torch.randn(2, n, m, generator=generator).mT for n, m in ((64, 90), (64, 70))) if columns else (
        torch.randn(2, n, 64, generator=generator) for n in (90, 70))  # fmt: skip
    exact = a.double() @ s.double().mT
    monkeypatch.setattr(module, "FROM", 1)
    for x, y, z in zip(a, s, exact, strict=True):
        found = []
        for threads in (1, 2):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            found.append(gemm(x, y))
            torch.set_num_threads(before)
        assert found[0].equal(found[1])
        allowed = 64 * torch.finfo(torch.float32).eps * 64**0.5
        assert (found[0] - z).abs().max() <= allowed
        onto = torch.randn(z.shape, generator=generator)
        before = onto.double()
        assert (gemm(x, y, onto) - before - z).abs().max() <= 2 * allowed
    assert torch.allclose(gemm(a, s).double(), exact, atol=1e-4)  # batches are not large matrices


def test_a_large_map_acts_alike_on_either_side_and_lets_gradients_through(monkeypatch):
    """act_on multiplies rows from the right and columns from the left; each is the product in float64, and R's gradient
    is there although oneDNN's products have none."""
    monkeypatch.setattr(module, "FROM", 1)
    generator = torch.Generator().manual_seed(4)
    x, matrix = torch.randn(40, 24, generator=generator), torch.randn(24, 24, generator=generator)
    exact = x.double() @ matrix.double().mT
    assert torch.allclose(act_on(x, Linear(matrix), (), 1, False).double(), exact, atol=1e-4)
    assert torch.allclose(act_on(x.mT, Linear(matrix), (), 0, False).double(), exact.mT, atol=1e-4)
    matrix.requires_grad_()
    act_on(x, Linear(matrix), (), 1, False).sum().backward()
    assert torch.allclose(matrix.grad, x.sum(0).expand(24, 24), atol=1e-4)


@pytest.mark.parametrize("dual", [False, True])
def test_batched_monomials_act_as_their_matrices_do(dual):
    """Members of groups reordered and scaled, and factors of spaces of one dimension, on any dimension of a tensor."""
    generator = torch.Generator().manual_seed(5)
    for shape, batch, dim in (((3, 4, 5), (0,), 1), ((5, 4, 3), (2,), 1), ((2, 5, 3, 4), (2, 0), 3),
                              ((6, 3, 1), (0,), 2), ((1, 5, 3, 2), (3, 2), 0)):  # fmt: skip
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        sizes = [shape[d] for d in (*batch, dim)]
        index = torch.rand(sizes, generator=generator).argsort(-1)
        element = Monomial(index, torch.rand(sizes, generator=generator, dtype=torch.float64) + 0.5)
        assert torch.allclose(act_on(x, element, batch, dim, dual), act_on(x, element.dense(), batch, dim, dual))
