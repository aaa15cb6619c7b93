# SPDX-License-Identifier: Apache-2.0
"""`nearest` is the optimum: against random elements, brute force, descent, and planted elements."""

from itertools import permutations
from itertools import product as cartesian
from operator import itemgetter

import pytest
import torch
from elements import all_groups
from hypothesis import given
from hypothesis import strategies as st

from onebasin.symmetry.groups import (
    Invertible,
    Moments,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    ScaledOrthogonal,
    ScaledPermutation,
    SignedPermutation,
    Wreath,
    best_scale,
    nuclear,
    polar,
    procrustes,
    sharpened,
    similarity,
)
from onebasin.symmetry.groups.elements import Linear, Monomial, product
from onebasin.symmetry.groups.scaling import similarity as similar
from onebasin.symmetry.groups.wreath import WreathElement

GROUPS = all_groups()
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
scales = st.floats(-3, 3).map(lambda power: 10.0**power)
seeds = st.integers(0, 2**31)


def compose(second: WreathElement, first: WreathElement) -> WreathElement:
    """(p2, g2) (p1, g1): out[i] = g2[i] g1[p2(i)] x[p1(p2(i))]."""
    outer = second[0].after(first[0])
    moved = (element.map(itemgetter(second[0].index)) for element in first[1])
    return outer, tuple(product(g2, g1) for g2, g1 in zip(second[1], moved, strict=True))


def inverse(element: WreathElement) -> WreathElement:
    """out[j] = g[p^-1(j)]^-1 x[p^-1(j)]."""
    outer = element[0].inverse()
    return outer, tuple(inner.map(itemgetter(outer.index)).inverse() for inner in element[1])


def rng(seed):
    return torch.Generator().manual_seed(seed)


def heads(*shape, seed=0):
    """Tensors that write a space and tensors that read it, (*batch, n, m) each, in float64."""
    generator = rng(seed)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))


def moments(anchor, source):
    (ap, ad), (sp, sd) = anchor, source
    return Moments(ap @ sp.mT, ad @ sd.mT, sp.square().sum(-1), sd.square().sum(-1), sp @ sp.mT, sd @ sd.mT)


def moved(element, source):
    return element.act(source[0]), element.act(source[1], dual=True)


def distance(element, anchor, source):
    """Squared distance, from the tensors themselves."""
    return sum((a - s).square().sum((-2, -1)) for a, s in zip(anchor, moved(element, source), strict=True))


def size(pair):
    return sum(x.square().sum((-2, -1)) for x in pair)


def matrix(element):
    return element.dense().matrix if isinstance(element, Monomial) else element.matrix


def noisy(source, group, noise, seed=1):
    """An anchor: the source moved by a random element, plus noise of `noise` times its own entries' size."""
    n, batch = source[0].shape[-2], tuple(source[0].shape[:-2])
    image = moved(group.random(n, batch, rng(seed)), source)
    errors = heads(*source[0].shape, seed=seed + 1)
    return tuple(x + noise * x.square().mean().sqrt() * e for x, e in zip(image, errors, strict=True))


# --- every group --------------------------------------------------------------------------------------------


@every_group
@pytest.mark.parametrize("related", [True, False])
def test_nearest_beats_a_thousand_random_elements(group, related):
    source = heads(6, 7)
    anchor = noisy(source, group, 0.5) if related else heads(6, 7, seed=1)
    best = distance(group.nearest(moments(anchor, source)), anchor, source)
    many = group.random(6, (1000,), rng(2))
    rivals = distance(many, tuple(a.expand(1000, 6, 7) for a in anchor), tuple(s.expand(1000, 6, 7) for s in source))
    assert bool((best <= rivals + 1e-9 * size(anchor)).all())


@every_group
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_a_planted_element_is_recovered(group, batch):
    source = heads(*batch, 6, 20)
    planted = group.random(6, batch, rng(1))
    anchor = moved(planted, source)
    found = group.nearest(moments(anchor, source))
    torch.testing.assert_close(matrix(found), matrix(planted), rtol=1e-10, atol=1e-10, check_dtype=False)
    assert bool((distance(found, anchor, source) <= 1e-18 * size(anchor)).all())


@every_group
def test_a_planted_element_is_recovered_in_float32(group):
    source = heads(3, 6, 20)
    planted = group.random(6, (3,), rng(1))
    found = group.nearest(moments(moved(planted, source), source).map(torch.Tensor.float))
    torch.testing.assert_close(matrix(found).double(), matrix(planted).double(), rtol=2e-5, atol=2e-5)
    if isinstance(found, Linear):
        assert found.matrix.dtype == torch.float32


@every_group
def test_batches_are_independent(group):
    source, anchor = heads(3, 6, 7), heads(3, 6, 7, seed=1)
    given_all = moments(anchor, source)
    found = matrix(group.nearest(given_all))
    for i in range(3):
        alone = matrix(group.nearest(given_all.map(lambda x, i=i: x[i])))
        torch.testing.assert_close(found[i], alone, rtol=1e-6, atol=1e-6)


@every_group
def test_value_is_the_distance_less_its_constant(group):
    source, anchor = heads(4, 6, 7), heads(4, 6, 7, seed=1)
    element = group.random(6, (4,), rng(2))
    value = moments(anchor, source).value(element)
    torch.testing.assert_close(value + size(anchor), distance(element, anchor, source))
    if not group.uses_gram:
        m = moments(anchor, source)
        without = Moments(m.primal, m.dual, m.primal_norm, m.dual_norm)
        torch.testing.assert_close(without.value(element), value)


@pytest.mark.parametrize(
    "group", [group for group in GROUPS.values() if group.dimension(4)], ids=lambda group: group.name
)
def test_dimension_is_the_number_of_independent_directions(group):
    """Rank of many small moves about the identity: g h^-1 for h near g, both in the group."""
    n = 4
    generator = rng(0)
    a, b = group.random(n, (999,), generator), group.random(n, (999,), generator)
    if isinstance(a, Monomial):  # the identity component has no permutation in it
        index = torch.arange(n).expand(999, n)
        a, b = Monomial(index, a.scale), Monomial(index, b.scale)
    ratio = matrix(product(a, b.inverse()))
    # The logarithm of a group element lies in the Lie algebra; its power series needs elements near 1.
    values, vectors = torch.linalg.eig(ratio)
    log = (vectors @ torch.diag_embed(values.log()) @ torch.linalg.inv(vectors)).flatten(1)
    near = log.imag.abs().amax(-1) < 1e-6  # real logarithms only
    assert int(torch.linalg.matrix_rank(log.real[near], atol=1e-6)) == group.dimension(n)


def test_moments_add_up():
    anchor, source = heads(2, 4, 6), heads(2, 4, 6, seed=1)
    m = moments(anchor, source)
    halves = [
        moments(tuple(a[..., part] for a in anchor), tuple(s[..., part] for s in source))
        for part in (slice(0, 2), slice(2, 6))
    ]
    total = halves[0] + halves[1]
    for name in ("primal", "dual", "primal_norm", "dual_norm", "primal_gram", "dual_gram", "total"):
        torch.testing.assert_close(getattr(total, name), getattr(m, name))
    bare = Moments(m.primal, m.dual, m.primal_norm, m.dual_norm)
    assert (bare + m).primal_gram is None


# --- permutations against brute force -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_permutation_against_all_permutations(n):
    source, anchor = heads(n, 3), heads(n, 3, seed=1)
    every = Monomial(torch.tensor(list(permutations(range(n)))))
    count = len(every.index)
    rivals = distance(every, tuple(a.expand(count, n, 3) for a in anchor), tuple(s.expand(count, n, 3) for s in source))
    found = distance(Permutation().nearest(moments(anchor, source)), anchor, source)
    torch.testing.assert_close(found, rivals.min())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_signed_permutation_against_all(n):
    source, anchor = heads(n, 3), heads(n, 3, seed=1)
    pairs = list(cartesian(permutations(range(n)), cartesian([1.0, -1.0], repeat=n)))
    every = Monomial(torch.tensor([p for p, _ in pairs]), torch.tensor([s for _, s in pairs], dtype=torch.float64))
    count = len(pairs)
    rivals = distance(every, tuple(a.expand(count, n, 3) for a in anchor), tuple(s.expand(count, n, 3) for s in source))
    found = distance(SignedPermutation().nearest(moments(anchor, source)), anchor, source)
    torch.testing.assert_close(found, rivals.min())


def least_on_the_line(primal, dual, p, d, reach=12.0, points=4001):
    """Least a^2 p - 2 a P + d / a^2 - 2 D / a over a > 0: a fine grid over log a, refined three times."""
    middle, width = torch.zeros_like(primal), reach
    for _ in range(4):
        t = middle.unsqueeze(-1) + torch.linspace(-width, width, points, dtype=torch.float64)
        a = torch.exp(t)
        P, D, q, e = (x.unsqueeze(-1) for x in (primal, dual, p, d))
        value = q * a**2 - 2 * P * a + e / a**2 - 2 * D / a
        least = value.min(-1)
        middle = torch.take_along_dim(t, least.indices.unsqueeze(-1), -1).squeeze(-1)
        width = 4 * width / points
    return least.values


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("related", [True, False])
def test_scaled_permutation_against_all_permutations(n, related):
    source = heads(n, 3)
    anchor = noisy(source, ScaledPermutation(), 0.5) if related else heads(n, 3, seed=1)
    m = moments(anchor, source)
    table = least_on_the_line(
        m.primal, m.dual, m.primal_norm.expand(n, n), m.dual_norm.expand(n, n)
    )  # [anchor, source]
    best = min(sum(table[i, p[i]] for i in range(n)) for p in permutations(range(n)))
    found = distance(ScaledPermutation().nearest(m), anchor, source) - size(anchor)
    assert float(found) <= float(best) + 1e-9 * float(size(anchor))


# --- scales -------------------------------------------------------------------------------------------------


@given(seeds, scales, scales)
def test_best_scale_against_a_dense_grid(seed, left, right):
    source, anchor = heads(4, 5, seed=seed), heads(4, 5, seed=seed + 1)
    source, anchor = (source[0] * left, source[1] / left), (anchor[0] * right, anchor[1] / right)
    m = moments(anchor, source)
    rotated = ScaledOrthogonal(joint=False).nearest(m).matrix
    for pair in (anchor, (rotated.mT @ anchor[0], rotated.mT @ anchor[1])):
        m = moments(pair, source)
        trace = [x.diagonal().sum() for x in (m.primal, m.dual)]
        best = least_on_the_line(*trace, m.primal_norm.sum(), m.dual_norm.sum(), reach=20.0)
        scale = best_scale(*trace, m.primal_norm.sum(), m.dual_norm.sum())
        found = m.value(similar(torch.eye(4).to(m.primal), scale))
        assert float(found) <= float(best) + 1e-9 * float(size(pair))


@given(st.floats(-8, 8), st.floats(-8, 8), scales, scales)
def test_best_scale_with_several_positive_roots(u, v, p, d):
    """x^4 - u x^3 + v x - 1 has three positive roots where u and v are large: two minima, a maximum between."""
    a0 = (d / p) ** 0.25
    given_ = [torch.tensor(x, dtype=torch.float64) for x in (u * p * a0, v * p * a0**3, p, d)]
    a = best_scale(*given_)
    P, D, p_, d_ = given_
    value = p_ * a**2 - 2 * P * a + d_ / a**2 - 2 * D / a
    unit = (p * d) ** 0.5
    assert float(value) <= float(least_on_the_line(*given_, reach=16.0)) + 1e-9 * unit * (1 + u**2 + v**2)


@pytest.mark.parametrize(("u", "v", "expected"), [(5, 4, "large"), (4, 5, "small"), (-3, 6, "small"), (6, -3, "large")])
def test_best_scale_takes_the_lower_of_two_minima(u, v, expected):
    one = torch.tensor(1.0, dtype=torch.float64)
    a = float(best_scale(u * one, v * one, one, one))
    assert (a > 2) if expected == "large" else (a < 0.5)
    assert abs(a**4 - u * a**3 + v * a - 1) < 1e-9 * a**4 + 1e-12


@pytest.mark.parametrize(("u", "v"), [(2, 2), (2, 2.0001), (0, -1e6), (-1e6, 0), (1e6, -1e6), (1e6, 1e6), (-1e6, -1e6)])
def test_best_scale_at_a_triple_root_and_far_out(u, v):
    """No point of a fine grid around the answer, nor of a coarse one over all magnitudes, is lower."""
    one = torch.tensor(1.0, dtype=torch.float64)
    a = best_scale(u * one, v * one, one, one)

    def value(x):
        return x**2 + 1 / x**2 - 2 * u * x - 2 * v / x

    others = torch.cat([a * torch.linspace(0.99, 1.01, 2001).double(), torch.logspace(-8, 8, 20001).double()])
    assert float(value(a)) <= float(value(others).min()) + 1e-12 * float(value(a).abs())


@given(seeds, st.floats(-6, 6), st.floats(-6, 6))
def test_best_scale_follows_an_unbalanced_head(seed, power, other):
    """Scaling the source by c, 1 / c divides the answer by c, over twelve orders of magnitude."""
    generator = rng(seed)
    a, b, s, t = torch.randn(4, 6, generator=generator, dtype=torch.float64).abs() + 0.1
    p, d = s**2 + 1, t**2 + 1
    c = 10.0**power
    plain = best_scale(a * s, b * t, p, d)
    skewed = best_scale(a * s * c, b * t / c, p * c**2, d / c**2)
    torch.testing.assert_close(skewed * c, plain, rtol=1e-9, atol=0)
    # An unbalanced anchor needs a scale far from 1; the answer is still stationary.
    e = 10.0**other
    x = best_scale(a * s * e, b * t / e, p, d)
    terms = [p * x**4, -a * s * e * x**3, b * t / e * x, -d]
    assert bool((sum(terms).abs() <= 1e-9 * sum(term.abs() for term in terms)).all())


def test_a_dead_head_keeps_its_scale():
    zero, one = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(best_scale(one * 0, one * 0, zero, one), torch.ones(3))
    source = (torch.zeros(2, 3, 4, dtype=torch.float64), heads(2, 3, 4)[1])
    for group in (ScaledOrthogonal(), ScaledOrthogonal(False), ScaledPermutation(), Invertible()):
        found = group.nearest(moments(heads(2, 3, 4, seed=1), source))
        assert bool(torch.isfinite(matrix(found)).all())
        if isinstance(group, ScaledOrthogonal):
            assert torch.allclose(found.matrix.mT @ found.matrix, torch.eye(3, dtype=torch.float64))


def test_more_quartics_than_one_chunk():
    generator = rng(0)
    P, D = torch.randn(2, 300_000, generator=generator, dtype=torch.float64)
    p, d = torch.rand(2, 300_000, generator=generator, dtype=torch.float64) + 0.1
    a = best_scale(P, D, p, d)
    some = torch.arange(0, 300_000, 9973)
    torch.testing.assert_close(a[some], best_scale(P[some], D[some], p[some], d[some]))


# --- rotations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_of_bad_matrices_is_orthogonal_and_optimal(dtype):
    n = 8
    u, v = (Orthogonal().random(n, (), rng(i)).matrix for i in (0, 1))
    spectra = {
        "badly conditioned": torch.logspace(0, -12, n, dtype=torch.float64),
        "singular": torch.tensor([3.0, 2, 1, 1, 0, 0, 0, 0], dtype=torch.float64),
        "zero": torch.zeros(n, dtype=torch.float64),
        "equal": torch.ones(n, dtype=torch.float64),
        "tiny": 1e-30 * torch.arange(1, n + 1, dtype=torch.float64),
        "huge": 1e30 * torch.arange(1, n + 1, dtype=torch.float64),
    }
    stack = torch.stack([(u * s) @ v for s in spectra.values()]).to(dtype)
    rotation = polar(stack)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    eye = torch.eye(n, dtype=dtype).expand_as(rotation)
    torch.testing.assert_close(rotation.mT @ rotation, eye, rtol=0, atol=tolerance)
    best = torch.stack(list(spectra.values())).sum(-1).to(dtype)
    torch.testing.assert_close((rotation * stack).sum((-2, -1)), best, rtol=tolerance, atol=0)
    torch.testing.assert_close(nuclear(stack), best, rtol=tolerance, atol=0)


def spectrum(kind, n):
    return {
        "equal": torch.ones(n),
        "even": torch.linspace(0.5, 1, n),
        "condition 1e3": torch.logspace(0, -3, n),
        "condition 1e6": torch.logspace(0, -6, n),
        "one small": torch.cat([torch.ones(n - 1), torch.tensor([1e-5])]),
        "one large": torch.cat([torch.ones(1), torch.full((n - 1,), 1e-4)]),
        "rank one": torch.eye(n)[0],
    }[kind].double()


SPECTRA = ["equal", "even", "condition 1e3", "condition 1e6", "one small", "one large", "rank one"]


@pytest.mark.parametrize("n", [2, 16, 64, 96, 97])
@pytest.mark.parametrize("kind", SPECTRA)
def test_polar_in_single_precision_is_as_exact_as_single_precision(kind, n):
    u, v = (Orthogonal().random(n, (5,), rng(i)).matrix for i in (0, 1))
    matrix = (u * spectrum(kind, n)) @ v
    rotation = polar(matrix.float()).double()
    rounding = 2 * n**0.5 * torch.finfo(torch.float32).eps
    eye = torch.eye(n, dtype=torch.float64).expand_as(rotation)
    torch.testing.assert_close(rotation.mT @ rotation, eye, rtol=0, atol=max(rounding, 1e-5))
    product = rotation.mT @ matrix
    torch.testing.assert_close(product, product.mT, rtol=0, atol=max(rounding, 2e-6))
    # A rotation that is off by e loses e^2: of what float32 resolves nothing is lost once R^T R = 1 again.
    value = (sharpened(rotation) * matrix).sum((-2, -1))
    torch.testing.assert_close(value, spectrum(kind, n).sum().expand(5), rtol=2e-7, atol=0)


def test_no_single_direction_of_a_polar_factor_is_off():
    """An error of one singular value is spread over all entries, none of which shows it."""
    n = 64
    u, v = (Orthogonal().random(n, (200,), rng(i)).matrix for i in (0, 1))
    values = torch.ones(200, n, dtype=torch.float64)
    values[:, -1] = torch.logspace(-7, -1, 200, dtype=torch.float64)
    rotation = polar(((u * values[:, None]) @ v).float()).double()
    off = torch.linalg.matrix_norm(rotation.mT @ rotation - torch.eye(n), 2)
    assert float(off.max()) < 2 * n**0.5 * torch.finfo(torch.float32).eps


def test_polar_rounds_map_singular_values_as_they_say():
    def at(polynomial, x):
        a, b, c = polynomial
        return x * (a + x**2 * (b + x**2 * c))

    x = torch.linspace(0, 1 + 1e-6, 200_001, dtype=torch.float64)
    lifted = at(procrustes.LIFT, x)
    assert float(lifted.max()) <= 0.99002 and float(lifted[x >= 0.0772].min()) >= 0.2969
    assert bool((lifted >= 0).all()) and bool((lifted[x < 0.07] > 3.5 * x[x < 0.07])[1:].all())
    for _ in range(procrustes.LIFTS - 1):
        lifted = at(procrustes.LIFT, lifted)
    assert float(lifted[x >= 3.5e-4].min()) >= 0.295
    for polynomial in procrustes.LAND:
        lifted = at(polynomial, lifted)
    assert float((lifted[x >= 3.5e-4] - 1).abs().max()) <= 2e-9
    landed = torch.linspace(0, 1 + 1e-5, 200_001, dtype=torch.float64)  # a round of its own: nothing is lost
    start = landed
    for polynomial in procrustes.LAND:
        landed = at(polynomial, landed)
    assert float(landed.max()) <= 1 + 2e-9 and bool((landed >= start - 1e-5 - 2e-9).all())


def test_well_conditioned_heads_need_no_svd(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an SVD was taken")

    monkeypatch.setattr(torch.linalg, "svd", refuse)
    source = torch.randn(16, 64, 256, generator=rng(0))
    polar(source @ (source + torch.randn(16, 64, 256, generator=rng(1))).mT)


def test_polar_does_not_depend_on_what_else_is_in_the_batch():
    matrix = torch.randn(40, 24, 24, generator=rng(0))
    matrix[3], matrix[17] = 0, matrix[17] * 1e-20
    whole = polar(matrix)
    for i in (0, 3, 17, 39):
        torch.testing.assert_close(whole[i], polar(matrix[i]), rtol=0, atol=3e-6 if i != 3 else 1e-6)


@pytest.mark.parametrize("n", [2, 3, 8, 33])
def test_the_ones_vector_stays(n):
    group = OrthogonalFixingOnes()
    ones = torch.ones(n, dtype=torch.float64)
    for g in (group.random(n, (4,), rng(0)), group.nearest(moments(heads(4, n, 9), heads(4, n, 9, seed=1)))):
        eye = torch.eye(n, dtype=torch.float64).expand(4, n, n)
        torch.testing.assert_close(g.matrix @ ones, ones.expand(4, n), rtol=0, atol=1e-13)
        torch.testing.assert_close(g.matrix.mT @ ones, ones.expand(4, n), rtol=0, atol=1e-13)
        torch.testing.assert_close(g.matrix.mT @ g.matrix, eye, rtol=0, atol=1e-13)


def descend(anchor, source, starts=6, steps=1500):
    """Least squared distance over (log a, skew matrix, determinant) by Adam, from random starts: (batch,)."""
    batch, n, _ = source[0].shape
    generator = rng(3)
    skew = torch.randn(starts, batch, n, n, generator=generator, dtype=torch.float64, requires_grad=True)
    log = torch.zeros(starts, batch, dtype=torch.float64, requires_grad=True)
    flip = torch.eye(n, dtype=torch.float64).repeat(starts, 1, 1, 1)
    flip[::2, 0, 0, 0] = -1
    optimiser = torch.optim.Adam([skew, log], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rotation = torch.linalg.matrix_exp(skew - skew.mT) @ flip
        a = log.exp()[..., None, None]
        loss = distance(Linear(a * rotation, rotation / a), anchor, source)
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
        schedule.step()
    return loss.detach().amin(0)


@pytest.mark.parametrize("unbalance", [1.0, 30.0])
def test_joint_against_descent_from_several_starts(unbalance):
    source = heads(6, 4, 10)
    anchor = noisy(source, Orthogonal(), 0.5)
    anchor = (anchor[0] * unbalance**0.5, anchor[1] / unbalance**0.5)
    found = distance(ScaledOrthogonal().nearest(moments(anchor, source)), anchor, source)
    rival = descend(anchor, source)
    assert bool((found <= rival + 1e-9 * size(anchor)).all())


@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 6),
    scales,
    scales,
    st.sampled_from([0.1, 1.0, 10.0]),
    st.booleans(),
)
def test_joint_is_never_worse_than_after_nor_after_than_none(seed, n, width, left, right, noise, related):
    source = heads(2, n, width, seed=seed)
    anchor = noisy(source, Orthogonal(), noise, seed + 1) if related else heads(2, n, width, seed=seed + 1)
    source, anchor = (source[0] * left, source[1] / left), (anchor[0] * right, anchor[1] / right)
    m = moments(anchor, source)
    none, after, joint = (
        distance(group.nearest(m), anchor, source)
        for group in (Orthogonal(), ScaledOrthogonal(joint=False), ScaledOrthogonal())
    )
    rounding = 1e-12 * (size(anchor) + size(source))
    assert bool((after <= none + rounding).all())
    assert bool((joint <= after + 1e-12 * size(anchor) + 1e-12 * after).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joint_needs_few_decompositions(monkeypatch, dtype):
    """At most six per head on average, however large the heads and their imbalance."""
    counted = [0]

    def count(x):
        counted[0] += x.shape[:-2].numel()
        return polar(x)

    monkeypatch.setattr(similarity, "polar", count)
    source = heads(8, 16, 64)
    for unbalance in (1.0, 3.0, 100.0):
        anchor = noisy(source, Orthogonal(), 1.0)
        counted[0] = 0
        m = moments((anchor[0] * unbalance, anchor[1] / unbalance), source)
        ScaledOrthogonal().nearest(m.map(lambda x: x.to(dtype)))
        assert counted[0] <= 6 * 8


@pytest.mark.parametrize("unbalance", [1.0, 4.0])
@pytest.mark.parametrize("uneven", [1.0, 100.0])
def test_joint_in_single_precision_finds_the_same_distance(unbalance, uneven):
    source = tuple(s * torch.linspace(1, 1 / uneven, 32, dtype=torch.float64)[:, None] for s in heads(6, 32, 80))
    anchor = noisy(source, Orthogonal(), 0.3)
    m = moments((anchor[0] * unbalance, anchor[1] / unbalance), source)
    exact = ScaledOrthogonal().nearest(m)
    single = ScaledOrthogonal().nearest(m.map(torch.Tensor.float))
    rotation = sharpened(single.matrix / torch.linalg.matrix_norm(single.matrix, keepdim=True) * 32**0.5)
    scale = torch.linalg.matrix_norm(single.matrix.double(), keepdim=True) / 32**0.5
    found = m.value(Linear(scale * rotation, rotation / scale))
    norm = m.primal_norm.sum(-1) + m.dual_norm.sum(-1)
    assert bool(((found - m.value(exact)).abs() <= 1e-7 * norm).all())


def test_heads_are_open_only_where_the_bound_allows_it():
    """What is not searched is ruled out: on a grid of scales the true objective beyond it is higher."""
    source, anchor = heads(4, 16, 64), heads(4, 16, 64, seed=1)
    m = moments((anchor[0] * 0.05, anchor[1] * 0.05), source)
    p, d = m.primal_norm.sum(-1), m.dual_norm.sum(-1)
    rotation, scale = similarity.joint(m)
    lowest = m.value(similarity.similarity(rotation, scale))
    shut = ~similarity._open(lowest, scale, m.primal, m.dual, p, d)
    assert bool(shut.all())
    for t in torch.linspace(-3, 3, 61, dtype=torch.float64):
        a = scale * t.exp()
        value = a**2 * p + d / a**2 - 2 * nuclear(a[:, None, None] * m.primal + m.dual / a[:, None, None])
        assert bool((value >= lowest * (1 - 1e-12)).all())


# --- invertible maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 16])
def test_a_planted_invertible_map_is_recovered_from_uneven_sources(n):
    uneven = torch.linspace(0.1, 1, n, dtype=torch.float64)[:, None]
    source = tuple(s * uneven for s in heads(10, n, 3 * n))
    planted = Invertible().random(n, (10,), rng(1))
    found = Invertible().nearest(moments(moved(planted, source), source))
    error = torch.linalg.matrix_norm(found.matrix - planted.matrix) / torch.linalg.matrix_norm(planted.matrix)
    assert float(error.max()) < 1e-6


@given(seeds, st.integers(1, 5), st.integers(1, 8), scales, st.booleans())
def test_invertible_is_never_worse_than_scaled_orthogonal(seed, n, width, skew, related):
    source = heads(2, n, width, seed=seed)
    anchor = noisy(source, Invertible(), 0.5, seed + 1) if related else heads(2, n, width, seed=seed + 1)
    source = (source[0] * skew, source[1] / skew)
    m = moments(anchor, source)
    found = Invertible().nearest(m)
    best, start = (distance(g, anchor, source) for g in (found, ScaledOrthogonal().nearest(m)))
    assert bool((best <= start + 1e-9 * size(anchor)).all())
    spread = torch.linalg.matrix_norm(found.matrix) * torch.linalg.matrix_norm(found.dual) / n
    assert float(spread.max()) <= Invertible().condition * (1 + 1e-9)
    eye = torch.eye(n, dtype=torch.float64).expand(2, n, n)
    torch.testing.assert_close(found.matrix.mT @ found.dual, eye, rtol=0, atol=1e-7)


def test_invertible_descends_step_by_step_to_a_stationary_point():
    source, anchor = heads(3, 6, 20), heads(3, 6, 20, seed=1)
    m = moments(anchor, source)
    values = torch.stack([m.value(Invertible(limit=limit, tolerance=0).nearest(m)) for limit in (1, 2, 4, 8, 16, 400)])
    assert bool((values[1:] <= values[:-1] + 1e-9).all())
    g = Invertible(limit=400, tolerance=0).nearest(m).matrix.clone().requires_grad_()
    distance(Linear(g, torch.linalg.inv(g).mT), anchor, source).sum().backward()
    assert float(g.grad.abs().max()) < 1e-4 * float(size(anchor).max())


def test_invertible_says_what_it_lacks():
    m = moments(heads(3, 4), heads(3, 4, seed=1))
    with pytest.raises(ValueError, match="Gram"):
        Invertible().nearest(Moments(m.primal, m.dual, m.primal_norm, m.dual_norm))


# --- heads as wholes ----------------------------------------------------------------------------------------

INNER = {
    "orthogonal": (Orthogonal(), Orthogonal()),
    "scaled": (ScaledOrthogonal(), ScaledOrthogonal()),
    "mixed": (Orthogonal(), Permutation()),
    "invertible": (Invertible(), Invertible()),
}


def act(element, pair, which):
    outer, inner = element
    return tuple(inner[which].act(x[outer.index], dual) for x, dual in zip(pair, (False, True), strict=True))


def pairs(anchor, source):
    """Moments of all pairs of blocks, (h, h, n, n)."""
    h = anchor[0].shape[0]
    shape = (h, h, *anchor[0].shape[1:])
    return moments(
        tuple(a.unsqueeze(1).expand(shape) for a in anchor),
        tuple(s.unsqueeze(0).expand(shape) for s in source),
    )


def wreath_distance(element, anchors, sources):
    total = 0.0
    for which, (anchor, source) in enumerate(zip(anchors, sources, strict=True)):
        total += sum(float((a - s).square().sum()) for a, s in zip(anchor, act(element, source, which), strict=True))
    return total


@pytest.mark.parametrize("h", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["orthogonal", "scaled", "mixed"])
@pytest.mark.parametrize("related", [True, False])
def test_wreath_against_all_permutations(h, kind, related):
    inner = INNER[kind]
    group = Wreath(*inner)
    sources = heads(h, 3, 6), heads(h, 4, 6, seed=1)
    anchors = heads(h, 3, 6, seed=2), heads(h, 4, 6, seed=3)
    if related:
        planted = group.random(h, (3, 4), rng(4))
        anchors = tuple(
            tuple(x + 0.3 * e for x, e in zip(act(planted, source, i), noise, strict=True))
            for i, (source, noise) in enumerate(zip(sources, anchors, strict=True))
        )
    best = min(
        sum(
            float(
                distance(g.nearest(moments(a, (s[0][list(p)], s[1][list(p)]))), a, (s[0][list(p)], s[1][list(p)])).sum()
            )
            for g, a, s in zip(inner, anchors, sources, strict=True)
        )
        for p in permutations(range(h))
    )
    found = group.nearest(tuple(pairs(a, s) for a, s in zip(anchors, sources, strict=True)))
    assert wreath_distance(found, anchors, sources) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("kind", INNER)
def test_a_planted_wreath_element_is_recovered(kind):
    group = Wreath(*INNER[kind])
    sources = heads(5, 3, 12), heads(5, 4, 12, seed=1)
    planted = group.random(5, (3, 4), rng(2))
    anchors = tuple(act(planted, source, i) for i, source in enumerate(sources))
    outer, inner = group.nearest(tuple(pairs(a, s) for a, s in zip(anchors, sources, strict=True)))
    assert torch.equal(outer.index, planted[0].index)
    for found, true in zip(inner, planted[1], strict=True):
        torch.testing.assert_close(matrix(found), matrix(true), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["orthogonal", "scaled", "mixed"])
def test_wreath_elements_of_a_batch_are_found_as_each_is_alone(kind):
    group = Wreath(*INNER[kind])
    each = [tuple(pairs(heads(4, n, 6, seed=seed + n), heads(4, n, 6, seed=seed)) for n in (3, 4)) for seed in (0, 7)]
    alone = [torch.rand(4, 4, dtype=torch.float64, generator=rng(seed)) for seed in (0, 1)]
    both = tuple(
        Moments(*(torch.stack([getattr(one, name), getattr(other, name)])
                  for name in ("primal", "dual", "primal_norm", "dual_norm", "primal_gram", "dual_gram")))
        for one, other in zip(*each, strict=True)
    )  # fmt: skip
    found = group.nearest(both, torch.stack(alone))
    gains = 0.0
    for number, (one, rest) in enumerate(zip(each, alone, strict=True)):
        outer, inner = group.nearest(one, rest)
        assert torch.equal(found[0].index[number], outer.index)
        for mine, its in zip(found[1], inner, strict=True):
            torch.testing.assert_close(matrix(mine)[number], matrix(its))
        gains += group.gain((outer, inner), one, rest)
    assert group.gain(found, both, torch.stack(alone)) == pytest.approx(gains)


def test_what_the_blocks_gain_alone_counts_in_the_assignment():
    group = Wreath(Orthogonal())
    m = pairs(heads(4, 3, 6), heads(4, 3, 6, seed=1))
    wish = torch.tensor([2, 0, 3, 1])
    outer = torch.zeros(4, 4, dtype=torch.float64)
    outer[torch.arange(4), wish] = 1e6
    assert torch.equal(group.nearest((m,), outer)[0].index, wish)


@given(seeds, st.integers(1, 4), st.sampled_from(sorted(INNER)))
def test_wreath_group_laws(seed, h, kind):
    group, generator = Wreath(*INNER[kind]), rng(seed)
    f, g, k = (group.random(h, (3, 2), generator) for _ in range(3))
    x = heads(h, 3, 5, seed=seed), heads(h, 2, 5, seed=seed)
    for which in (0, 1):

        def same(a, b):
            for left, right in zip(a, b, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-8)

        same(act(compose(g, f), x[which], which), act(g, act(f, x[which], which), which))
        same(act(compose(k, compose(g, f)), x[which], which), act(compose(compose(k, g), f), x[which], which))
        same(act(compose(inverse(f), f), x[which], which), x[which])
        same(act(compose(f, inverse(f)), x[which], which), x[which])
    assert group.dimension(h, (3, 2)) == h * sum(i.dimension(n) for i, n in zip(INNER[kind], (3, 2), strict=True))
