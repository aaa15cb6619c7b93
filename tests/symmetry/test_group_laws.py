# SPDX-License-Identifier: Apache-2.0
"""What every group says of itself must agree: elements, algebra, free numbers, projection, departure.

Groups are found, not listed: a new one is held to these laws without a new test.
"""

from __future__ import annotations

import math

import pytest
import torch
from elements import all_groups
from torch import Tensor

from onebasin.symmetry.groups import Group, Moments
from onebasin.symmetry.groups.elements import Element, Linear, Monomial
from onebasin.symmetry.groups.permutation import ORDERS
from onebasin.symmetry.levels import largest_group
from onebasin.symmetry.tables.signature import MOVES

GROUPS = all_groups()
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
N, BATCH = 6, (3,)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(element: Element) -> Linear:
    made = element.dense() if isinstance(element, Monomial) else element
    return Linear(made.matrix.double(), made.of(dual=True).double())


def departure(group: Group, element: Element) -> float:
    return group.departure(element, rng(1))


@every_group
def test_random_elements_are_of_the_group_and_so_are_their_products(group: Group) -> None:
    a, b = group.random(N, BATCH, rng()), group.random(N, BATCH, rng(1))
    for element in (a, a.inverse(), a.after(b)):  # type: ignore[arg-type]
        assert departure(group, element) < 1e-10


@every_group
def test_an_element_that_left_the_group_is_seen(group: Group) -> None:
    element = group.random(N, BATCH, rng())
    if isinstance(element, Monomial):
        factors = torch.ones_like(element.index, dtype=torch.float64) if element.scale is None else element.scale
        wrong: Element = Monomial(element.index, factors * torch.where(torch.arange(N) == 1, -0.5, 1.0))
        twice = element.index.clone()
        twice[..., 0] = twice[..., 1]
        with pytest.raises(ValueError, match="not a permutation"):
            departure(group, Monomial(twice))
        if {"sign", "scale"} <= group.moves:
            wrong = Monomial(element.index, factors * torch.tensor([0.0] + [1.0] * (N - 1)))
    else:
        matrix = element.matrix.clone()
        matrix[..., 0, 1] += 0.1
        wrong = Linear(matrix, element.dual)
    try:
        assert departure(group, wrong) > 1e-3
    except ValueError as error:
        assert str(error)


@every_group
def test_a_group_has_as_many_orders_and_signs_as_it_should(group: Group) -> None:
    """The dimension says nothing of them: n! orders, and 2 signs for every dimension, or every pair of them, that has
    one. Random elements reach all, products reach no other, and every one that is planted is found again."""
    n, generator = 4, rng()
    elements = group.random(n, (20000,), generator)
    if not isinstance(elements, Monomial):
        return
    signs = {"sign": 2**n, "pair sign": 2 ** (n // 2), "next sign": 2 ** (n // 2)}
    order = math.factorial(n) if group.permutes else 1
    order *= math.prod(count for move, count in signs.items() if move in group.moves)
    reached = torch.unique(dense(elements).matrix.sign(), dim=0)
    assert len(reached) == order
    products = elements.after(group.random(n, (20000,), generator))
    assert torch.equal(torch.unique(dense(products).matrix.sign(), dim=0), reached)
    write, read = torch.randn(2, n, 9, generator=generator, dtype=torch.float64)
    grams, norms = [x @ x.mT for x in (write, read)], [x.square().sum(-1).expand(order, n) for x in (write, read)]
    given = Moments(reached @ grams[0], reached @ grams[1], *norms, *(gram.expand(order, n, n) for gram in grams))
    assert torch.equal(dense(group.nearest(given)).matrix.sign(), reached)


@every_group
@pytest.mark.parametrize("batch", [(), BATCH])
def test_the_algebra_is_tangent_to_the_group_and_has_its_dimension(group: Group, batch: tuple[int, ...]) -> None:
    """exp(X) is an element for every X of the algebra, which is spanned by as many X as the dimension says."""
    basis = list(group.algebra(N, batch))
    count = torch.Size(batch).numel()
    if basis:
        whole = torch.stack([x.flatten() for x in basis])
        assert int(torch.linalg.matrix_rank(whole)) == group.dimension(N) * count
    else:
        assert group.dimension(N) == 0
    for x in basis:
        g = torch.linalg.matrix_exp(0.3 * x)
        if group.permutes or "sign" in group.moves:  # the identity component: factors alone
            factors = torch.diagonal(g, dim1=-2, dim2=-1)
            assert torch.equal(g, torch.diag_embed(factors))
            element: Element = Monomial(torch.arange(N).expand(factors.shape), factors)
        else:
            element = Linear(g, torch.linalg.inv(g).mT)
        assert departure(group, element) < 1e-10


@every_group
@pytest.mark.parametrize("order", ORDERS)
def test_free_numbers_stand_for_elements_and_at_first_for_the_identity(group: Group, order: str) -> None:
    like = torch.zeros((), dtype=torch.float64)
    latent = group.parametrize(N, BATCH, like, order)
    if not latent:
        assert group.dimension(N) == 0
        return
    start = group.element(latent, settle=True)
    x = torch.randn(*BATCH, N, 2, generator=rng(), dtype=torch.float64)
    if "mixture" not in latent:
        for dual in (False, True):
            torch.testing.assert_close(start.act(x, dual), x)
    moved = {name: value + 0.4 * torch.randn(value.shape, generator=rng(), dtype=value.dtype)
             for name, value in latent.items()}  # fmt: skip
    element = group.element(moved, settle=True)
    if isinstance(element, (Linear, Monomial)):
        assert departure(group, element) < 1e-10
    else:  # a coupling: non-negative, its columns sum to 1, and scales cancel
        eye = torch.eye(N, dtype=torch.float64).expand(*BATCH, N, N)
        scale = moved["stretch"].exp().unsqueeze(-1) if "stretch" in moved else torch.ones(N, 1, dtype=torch.float64)
        for mixed in (element.act(eye) / scale, element.act(eye, dual=True) * scale):
            assert bool((mixed >= 0).all())
            torch.testing.assert_close(mixed.sum(-2), torch.ones(*BATCH, N, dtype=torch.float64))


@every_group
def test_gradients_reach_all_free_numbers(group: Group) -> None:
    latent = group.parametrize(N, BATCH, torch.zeros((), dtype=torch.float64), "straight-through")
    free = {name: value.requires_grad_() for name, value in latent.items()}
    if not free:
        return
    x = torch.randn(*BATCH, N, 5, generator=rng(), dtype=torch.float64)
    wanted = torch.randn(*BATCH, N, 5, generator=rng(1), dtype=torch.float64)
    element = group.element(free)
    if isinstance(element, Monomial):
        assert element.scale is not None
    loss: Tensor = (element.act(x) * wanted).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for name, value in free.items():
        assert value.grad is not None and bool(value.grad.abs().sum() > 0), name


@every_group
def test_projection_takes_off_rounding_and_leaves_elements_as_they_are(group: Group) -> None:
    element = group.random(N, BATCH, rng())
    same = dense(group.project(element))
    torch.testing.assert_close(same.matrix, dense(element).matrix, atol=1e-10, rtol=0)
    if isinstance(element, Linear):
        noise = 1 + 1e-6 * torch.randn(N, N, generator=rng(2), dtype=torch.float64)
        rounded = Linear(element.matrix * noise, None if element.dual is None else element.dual * noise.mT)
        assert departure(group, group.project(rounded)) < 1e-6 * departure(group, rounded) + 1e-10


@pytest.mark.parametrize("kind", MOVES)
def test_the_largest_group_of_a_kind_makes_no_other_moves(kind: str) -> None:
    """`linear` allows all that a matrix does, which its group says in one word."""
    group = largest_group(kind)
    assert group.moves <= MOVES[kind]
    assert bool(group.moves) == bool(MOVES[kind])


@every_group
def test_the_rigid_subgroup_is_a_subgroup_of_isometries(group: Group) -> None:
    rigid = group.rigid()
    assert rigid.isometry
    element = rigid.random(N, BATCH, rng())
    assert departure(group, element) < 1e-10
