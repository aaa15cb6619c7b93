# SPDX-License-Identifier: Apache-2.0
"""What rotary embeddings and norms inside heads leave: complex numbers, signs, factors, and heads in groups."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from onebasin.symmetry.groups import (
    Factors,
    GroupedWreath,
    Moments,
    Orthogonal,
    PairSigns,
    Rotary,
    SignedPermutation,
    Signs,
)
from onebasin.symmetry.groups.elements import Element, Linear, Monomial
from onebasin.symmetry.groups.signs import pairs

N, SEEDS = 6, range(5)
GROUPS = {
    "rotary": Rotary(),
    "rotary after": Rotary(rescale="after"),
    "rotary joint": Rotary(rescale="joint"),
    "interleaved": Rotary(interleaved=True),
    "interleaved joint": Rotary(interleaved=True, rescale="joint"),
    "pair signs": PairSigns(),
    "next signs": PairSigns(interleaved=True),
    "signs": Signs(),
    "factors": Factors(),
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem(seed: int, batch: tuple[int, ...] = (3,), n: int = N) -> tuple[list[Tensor], Moments]:
    """Anchor and source of a writer and a reader, (*batch, n, 4) each, and their moments."""
    generator = rng(seed)
    a, s, b, t = (normal(*batch, n, 4, generator=generator) for _ in range(4))
    return [a, s, b, t], moments(a, s, b, t)


def moments(a: Tensor, s: Tensor, b: Tensor, t: Tensor) -> Moments:
    return Moments(a @ s.mT, b @ t.mT, s.square().sum(-1), t.square().sum(-1))


def distance(tensors: list[Tensor], g: Element) -> Tensor:
    a, s, b, t = tensors
    return (a - g.act(s)).square().sum((-2, -1)) + (b - g.act(t, dual=True)).square().sum((-2, -1))


def turn(size: int, angles: Tensor, interleaved: bool) -> Tensor:
    """The matrix by which rotary embeddings turn a vector at one position."""
    first, second = pairs(size, interleaved)
    out = torch.zeros(size, size, dtype=torch.float64)
    out[first, first] = out[second, second] = angles.cos()
    out[second, first], out[first, second] = angles.sin(), -angles.sin()
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rescale", ["none", "joint"])
def test_rotary_maps_commute_with_every_position(interleaved: bool, rescale: str) -> None:
    generator = rng(0)
    g = Rotary(interleaved, rescale).random(N, (), generator)
    rope = turn(N, normal(N // 2, generator=generator), interleaved)
    assert torch.allclose(g.matrix @ rope, rope @ g.matrix, atol=1e-12)
    assert torch.allclose((g.dual if g.dual is not None else g.matrix).mT @ g.matrix, torch.eye(N).double(), atol=1e-12)
    other = turn(N, normal(N // 2, generator=generator), not interleaved)
    assert not torch.allclose(g.matrix @ other, other @ g.matrix, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "rotary after"])  # one thing at a time
@pytest.mark.parametrize("seed", SEEDS)
def test_nearest_beats_a_thousand_random_elements(name: str, seed: int) -> None:
    group = GROUPS[name]
    tensors, given = problem(seed)
    best = distance(tensors, group.nearest(given))
    generator = rng(seed + 100)
    for _ in range(1000):
        assert bool((best <= distance(tensors, group.random(N, (3,), generator)) + 1e-9).all())


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_planted_element_is_recovered(name: str, seed: int) -> None:
    group = GROUPS[name]
    (a, _, b, _), _ = problem(seed)
    inverse = group.random(N, (3,), rng(seed + 1)).inverse()
    tensors = [a, inverse.act(a), b, inverse.act(b, dual=True)]
    assert float(distance(tensors, group.nearest(moments(*tensors))).max()) < 1e-16


@pytest.mark.parametrize("name", GROUPS)
def test_value_is_the_distance(name: str) -> None:
    tensors, given = problem(0)
    g = GROUPS[name].nearest(given)
    constant = sum(each.square().sum((-2, -1)) for each in (tensors[0], tensors[2]))
    assert torch.allclose(given.value(g) + constant, distance(tensors, g), atol=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_pair_against_a_grid_of_phases_and_moduli(seed: int, interleaved: bool) -> None:
    tensors, given = problem(seed, (), 2)
    angle, modulus = torch.linspace(-3.15, 3.15, 500).double(), torch.logspace(-1.5, 1.5, 400).double()
    c = torch.polar(modulus[:, None].expand(400, 500), angle.expand(400, 500))

    def grid(c: Tensor) -> Tensor:
        def real(z: Tensor) -> Tensor:
            return torch.stack([torch.stack([z.real, -z.imag], -1), torch.stack([z.imag, z.real], -1)], -2)

        return distance(tensors, Linear(real(c), real(1 / c.conj())))

    joint = Rotary(interleaved, "joint").nearest(given)
    after = Rotary(interleaved, "after").nearest(given)
    plain = Rotary(interleaved).nearest(given)
    assert float(distance(tensors, joint)) <= float(grid(c).min()) + 1e-9
    assert float(distance(tensors, plain)) <= float(grid(c / c.abs()).min()) + 1e-9
    assert distance(tensors, joint) <= distance(tensors, after) + 1e-9 <= distance(tensors, plain) + 2e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_signs_against_all_signs(seed: int) -> None:
    tensors, given = problem(seed, ())
    for group, places in ((Signs(), None), (PairSigns(), pairs(N)), (PairSigns(True), pairs(N, True))):
        found = []
        for choice in product([1.0, -1.0], repeat=N if places is None else N // 2):
            scale = torch.tensor(choice, dtype=torch.float64)
            if places is not None:
                scale = torch.zeros(N, dtype=torch.float64).index_copy(0, places.flatten(), scale.repeat(2))
            found.append(float(distance(tensors, Monomial(torch.arange(N), scale))))
        assert float(distance(tensors, group.nearest(given))) == pytest.approx(min(found), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_factor_against_a_grid_of_both_signs(seed: int) -> None:
    tensors, given = problem(seed, (), 1)
    best = float(distance(tensors, Factors().nearest(given)))
    for factor in torch.logspace(-2, 2, 4001).double():
        for sign in (1, -1):
            g = Monomial(torch.zeros(1, dtype=torch.long), sign * factor.reshape(1))
            assert best <= float(distance(tensors, g)) + 1e-9


def test_a_factor_with_one_empty_side_takes_the_sign_of_the_other() -> None:
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    norm, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for sign in (1.0, -1.0):
        for sides in ((sign * one, zero, norm, none), (zero, sign * one, none, norm)):
            assert Factors().nearest(Moments(*sides)).scale.item() == sign


def test_an_odd_size_does_not_pair_up() -> None:
    with pytest.raises(ValueError, match="5 dimensions do not form pairs"):
        pairs(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_norm_weights_are_permuted_but_never_signed(seed: int) -> None:
    """Signed permutations under a norm with a weight, against all of them."""
    n, generator = 4, rng(seed)
    tensors, given = problem(seed, (), n)
    ours, theirs = 3 * normal(n, generator=generator), 3 * normal(n, generator=generator)
    given = Moments(given.primal, given.dual, given.primal_norm, given.dual_norm, diagonal=ours[:, None] * theirs)

    def total(g: Monomial) -> float:
        return float(distance(tensors, g) + (ours - theirs[g.index]).square().sum())

    best = SignedPermutation().nearest(given)
    for order in permutations(range(n)):
        for signs in product([1.0, -1.0], repeat=n):
            other = Monomial(torch.tensor(order), torch.tensor(signs, dtype=torch.float64))
            assert total(best) <= total(other) + 1e-9
    stay = Monomial(torch.arange(n))
    assert float(given.stay() - given.value(best)) == pytest.approx(total(stay) - total(best), abs=1e-9)


# --- heads in groups ------------------------------------------------------------------------------------------

H, M, D, X = 3, 2, 4, 5  # groups, members, dimensions of a head, of the stream


def grouped(anchor: list[Tensor], source: list[Tensor]) -> tuple[Moments, Moments]:
    """Moments of queries (h, m, d, x) and keys (h, d, x), as the matching hands them over."""
    (q, k), (r, l) = anchor, source
    shared = torch.einsum("iax,jbx->ijab", k, l)
    single = torch.einsum("igax,jhbx->ijghab", q, r)
    norm, norms = l.square().sum(-1).expand(H, H, D), r.square().sum(-1)[None, :, None].expand(H, H, M, M, D)
    nothing = torch.zeros_like
    return (
        Moments(nothing(shared), shared, nothing(norm), norm),
        Moments(single, nothing(single), norms, nothing(norms)),
    )


def move(source: list[Tensor], groups: Monomial, members: Monomial, g: Element) -> list[Tensor]:
    q, k = (each[groups.index] for each in source)
    q = torch.stack([q[i, members.index[i]] for i in range(H)])
    return [g.act(q.transpose(1, 2).flatten(2)).view(H, D, M, X).transpose(1, 2), g.act(k, dual=True)]


def squared(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))


def heads(seed: int) -> list[Tensor]:
    generator = rng(seed)
    return [normal(H, M, D, X, generator=generator), normal(H, D, X, generator=generator)]


@pytest.mark.parametrize("inner", [Orthogonal(), Rotary(), Rotary(rescale="joint"), PairSigns()], ids=lambda g: g.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_planted_order_of_groups_and_members_is_recovered(inner, seed: int) -> None:
    anchor, generator = heads(seed), rng(seed + 10)
    groups = Monomial(torch.randperm(H, generator=generator))
    members = Monomial(torch.stack([torch.randperm(M, generator=generator) for _ in range(H)]))
    source = move(anchor, groups, members, inner.random(D, (H,), generator))
    shared, single = grouped(anchor, source)
    (index, order, (g,)), gain = GroupedWreath(inner).nearest((shared,), (single,))
    assert squared(anchor, move(source, index, order, g)) < 1e-16
    assert gain == pytest.approx(squared(anchor, source), rel=1e-9)


@pytest.mark.parametrize("inner", [Orthogonal(), Rotary(), PairSigns()], ids=lambda g: g.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_that_have_nothing_in_common_against_all_orders(inner, seed: int) -> None:
    """The alternation may end in a local optimum: it never ends above where it starts, nor far from the best."""
    anchor, source = heads(seed), heads(seed + 50)
    shared, single = grouped(anchor, source)
    (index, order, (g,)), gain = GroupedWreath(inner).nearest((shared,), (single,))
    now = squared(anchor, source)
    assert now - gain == pytest.approx(squared(anchor, move(source, index, order, g)), rel=1e-9)
    found = []
    orders = list(permutations(range(M)))
    for groups in permutations(range(H)):
        for choice in product(orders, repeat=H):
            index, order = Monomial(torch.tensor(groups)), Monomial(torch.tensor(choice))
            q, k = move(source, index, order, Monomial(torch.arange(D).expand(H, D)))
            cross = torch.einsum("igax,igbx->iab", anchor[0], q), torch.einsum("iax,ibx->iab", anchor[1], k)
            norm = torch.zeros(H, D, dtype=torch.float64)
            best = inner.nearest(Moments(*cross, norm, norm))
            found.append(squared(anchor, [best.act(q.transpose(1, 2).flatten(2)).view(H, D, M, X).transpose(1, 2),
                                          best.act(k, dual=True)]))  # fmt: skip
    least = min(found)
    assert least - 1e-9 <= now - gain <= found[0] + 1e-9
    assert now - gain <= least + 0.1 * (found[0] - least) + 1e-9
