# SPDX-License-Identifier: Apache-2.0
"""Elements in both forms obey the group laws, and act as their matrices do."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebasin.symmetry.groups.elements import Linear, Monomial, act_on, product

KINDS = ("permutation", "scaled", "orthogonal", "invertible")
DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-10}

kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 5)
batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dtypes = st.sampled_from(DTYPES)


def element(kind, size, batch, generator, dtype=torch.float64):
    if kind in ("permutation", "scaled"):
        index = torch.argsort(torch.rand(*batch, size, generator=generator), dim=-1)
        if kind == "permutation":
            return Monomial(index)
        signs = torch.randint(0, 2, (*batch, size), generator=generator) * 2 - 1
        return Monomial(index, (signs * (0.5 + torch.rand(*batch, size, generator=generator))).to(dtype))
    matrix = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(matrix)[0]
    if kind == "orthogonal":
        return Linear(q.to(dtype))
    spread = 0.5 + torch.rand(*batch, size, generator=generator, dtype=torch.float64)
    other = torch.linalg.qr(matrix.flip(-1) + matrix)[0]
    matrix = (q * spread.unsqueeze(-2)) @ other
    return Linear(matrix.to(dtype), torch.linalg.inv(matrix).mT.to(dtype))


def dense(g, dual=False):
    """The matrix of an element, column by column."""
    n = g.index.shape[-1] if isinstance(g, Monomial) else g.matrix.shape[-1]
    batch = (g.index if isinstance(g, Monomial) else g.matrix[..., 0]).shape[:-1]
    return g.act(torch.eye(n, dtype=torch.float64).expand(*batch, n, n).contiguous(), dual)


def close(a, b, dtype=torch.float64):
    torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], check_dtype=False)


@given(kinds, kinds, kinds, sizes, batches, seeds, dtypes)
def test_group_laws(one, two, three, size, batch, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    f, g, h = (element(kind, size, batch, generator, dtype) for kind in (one, two, three))
    close(dense(product(product(h, g), f)), dense(product(h, product(g, f))), dtype)
    eye = torch.eye(size, dtype=torch.float64).expand(*batch, size, size)
    identity = Monomial(torch.arange(size).expand(*batch, size))
    close(dense(product(g, g.inverse())), eye, dtype)
    close(dense(product(g.inverse(), g)), eye, dtype)
    close(dense(g.inverse().inverse()), dense(g), dtype)
    close(dense(product(g, identity)), dense(g), dtype)
    close(dense(product(identity, g)), dense(g), dtype)
    close(dense(product(g, f).inverse()), dense(product(f.inverse(), g.inverse())), dtype)


@given(kinds, kinds, sizes, batches, seeds, dtypes)
def test_product_applies_the_second_after_the_first(one, two, size, batch, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    f, g = (element(kind, size, batch, generator, dtype) for kind in (one, two))
    x = torch.randn(*batch, size, 4, generator=generator, dtype=torch.float64)
    for dual in (False, True):
        close(product(g, f).act(x, dual), g.act(f.act(x, dual), dual), dtype)


@given(kinds, sizes, batches, seeds, dtypes)
def test_dual_is_the_inverse_transpose(kind, size, batch, seed, dtype):
    g = element(kind, size, batch, torch.Generator().manual_seed(seed), dtype)
    close(dense(g, dual=True), torch.linalg.inv(dense(g)).mT, dtype)
    close(dense(g.inverse(), dual=True), dense(g).mT, dtype)


@given(kinds, sizes, st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple), seeds)
def test_map_reorders_the_batch(kind, size, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    g = element(kind, size, batch, generator)
    for dim, length in enumerate(batch):
        index = torch.randint(0, length, (length,), generator=generator)
        moved = g.map(partial(torch.index_select, dim=dim, index=index))
        for dual in (False, True):
            assert torch.equal(dense(moved, dual), dense(g, dual).index_select(dim, index))


@given(st.sampled_from(["permutation", "scaled"]), sizes, batches, seeds, dtypes)
def test_dense_is_the_same_map(kind, size, batch, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    g = element(kind, size, batch, generator)
    x = torch.randn(*batch, size, 3, generator=generator, dtype=dtype)
    matrix = g.dense(dtype)
    assert matrix.matrix.dtype == dtype
    for dual in (False, True):
        close(matrix.act(x, dual), g.act(x, dual), dtype)


@given(st.data(), kinds, sizes, batches, seeds, dtypes)
def test_act_on_any_dimension_with_the_batch_anywhere(data, kind, size, batch, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    g = element(kind, size, batch, generator)
    letters = "abcde"[: len(batch)] + "n"
    shape = {**dict(zip(letters, (*batch, size), strict=True)), "x": 2, "y": 3}
    order = data.draw(st.permutations([*letters, "x", "y"]))
    tensor = torch.randn([shape[letter] for letter in order], generator=generator, dtype=dtype)
    places = tuple(order.index(letter) for letter in letters[:-1])
    for dual in (False, True):
        found = act_on(tensor, g, places, order.index("n"), dual)
        text, into = "".join(order), "".join(order).replace("n", "m")
        expected = torch.einsum(f"{letters[:-1]}mn,{text}->{into}", dense(g, dual), tensor.double())
        assert found.dtype == dtype and found.shape == tensor.shape
        close(found, expected, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_identity_is_the_identity(kind):
    assert not element(kind, 4, (2,), torch.Generator().manual_seed(0)).is_identity()
    assert Monomial(torch.arange(4).expand(2, 4)).is_identity()
    assert Monomial(torch.arange(4), torch.ones(4)).is_identity()
    assert Linear(torch.eye(4).expand(2, 4, 4)).is_identity()
    assert not Monomial(torch.arange(4), -torch.ones(4)).is_identity()
