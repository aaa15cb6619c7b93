# SPDX-License-Identifier: Apache-2.0
"""Assignment is optimal: against enumeration, the unshifted solver and planted permutations."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from onebasin.symmetry.groups import assignment as module
from onebasin.symmetry.groups import sparse_lap as certified
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.sparse_lap import assign_certified


def total(score: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.take_along_dim(score.double(), columns.unsqueeze(-1), -1).sum((-2, -1))


def optimum(score: torch.Tensor) -> float:
    rows, columns = linear_sum_assignment(score.double().numpy(), maximize=True)
    return float(score.double()[rows, columns].sum())


def is_permutation(columns: torch.Tensor) -> bool:
    return columns.dtype == torch.int64 and columns.sort().values.equal(torch.arange(len(columns)))


PATHS = {"plain": (10**9, 10**9), "shifted": (1, 10**9), "certified": (1, 1), "certified unshifted": (10**9, 1)}


@pytest.fixture(params=PATHS.values(), ids=PATHS)
def every_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(("SHIFT_FROM", "CERTIFIED_FROM"), request.param, strict=True):
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("sizes", PATHS.values(), ids=PATHS)
@settings(deadline=None)
@given(n=st.integers(1, 6), data=st.data())
def test_matches_enumeration(sizes: tuple[int, int], n: int, data: st.DataObject) -> None:
    entries = data.draw(st.lists(st.integers(-4, 4), min_size=n * n, max_size=n * n))
    score = torch.tensor(entries, dtype=torch.float64).view(n, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHIFT_FROM", sizes[0])
        patch.setattr(module, "CERTIFIED_FROM", sizes[1])
        columns = assignment(score)
    best = max(sum(float(score[i, j]) for i, j in enumerate(p)) for p in permutations(range(n)))
    assert is_permutation(columns)
    assert total(score, columns) == best


def draw(kind: str, n: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, max(1, n // 2), generator=g, dtype=torch.float64) for _ in range(2))
    norms = torch.randn(2, n, 1, generator=g, dtype=torch.float64).exp()
    return {
        "gaussian gram": a @ b.T,
        "shared mean, uneven norms": (a * norms[0] + 1) @ (b * norms[1] + 1).T,
        "negative": -(a @ b.T).abs(),
        "rank one": norms[0] @ norms[1].T,
        "rank one, mixed sign": a[:, :1] @ b[:, :1].T,
        "ties": torch.randint(0, 3, (n, n), generator=g).double(),
        "dead rows and columns": (a @ b.T) * (norms[0] > 1) * (norms[1] > 1).T,
        "duplicate rows": (a @ b.T)[torch.arange(n) // 2],
        "constant": torch.full((n, n), 2.5, dtype=torch.float64),
        "zero": torch.zeros(n, n, dtype=torch.float64),
        "beyond float32": (a @ b.T) * 1e60,
        "tiny": (a @ b.T) * 1e-60,
        "large offset": (a @ b.T) + 1e6,
    }[kind]


KINDS = [
    *("gaussian gram", "shared mean, uneven norms", "negative", "rank one", "rank one, mixed sign", "ties"),
    *(
        "dead rows and columns",
        "duplicate rows",
        "constant",
        "zero",
        "beyond float32",
        "tiny",
        "large offset",
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 33, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_plain_solver(kind: str, n: int, dtype: torch.dtype, every_path: None) -> None:
    score = draw(kind, n).to(dtype)
    if not score.isfinite().all():
        pytest.skip("does not fit the dtype")
    columns = assignment(score)
    assert is_permutation(columns)
    # Rounding of float64 in n additions of the largest entry, no more.
    rounding = 1e-14 * n * float(score.abs().max())
    assert total(score, columns).item() == pytest.approx(optimum(score), abs=rounding)


@pytest.mark.parametrize("kind", ["gaussian gram", "shared mean, uneven norms", "ties"])
def test_matches_plain_solver_above_the_threshold(kind: str) -> None:
    score = draw(kind, module.SHIFT_FROM + 88).float()
    assert total(score, assignment(score)).item() == pytest.approx(optimum(score), rel=1e-13)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_finds_planted_permutation(noise: float, every_path: None) -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randn(256, 128, generator=g)
    planted = torch.randperm(256, generator=g)
    source = (a + noise * torch.randn(256, 128, generator=g))[planted]
    assert assignment(a @ source.T).equal(planted.argsort())


def test_shift_leaves_its_argument_alone_and_repeats(every_path: None) -> None:
    score = draw("gaussian gram", 100)
    before = score.clone()
    assert assignment(score).equal(assignment(score))
    assert score.equal(before)


@pytest.mark.parametrize("kind", ["gaussian gram", "shared mean, uneven norms", "dead rows and columns"])
def test_column_shift_converges_to_the_duals(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Weak duality: sum_i max_j (M - v)_ij + sum_j v_j is at least the optimum, for any v. At the fixed point
    # of Sinkhorn it exceeds the optimum by at most the temperature times the greatest entropy, n log n.
    monkeypatch.setattr(module, "SWEEPS", 1000)
    n, score = 300, draw(kind, 300)
    shift = module._column_shift(score, float(score.std())).double()
    gap = float((score - shift).amax(1).sum() + shift.sum()) - optimum(score)
    assert 0 <= gap <= module.TEMPERATURES[-1] * float(score.std()) * n * math.log(n)


def test_batches_and_strides(every_path: None) -> None:
    g = torch.Generator().manual_seed(1)
    score = torch.randn(2, 3, 9, 9, generator=g).transpose(-1, -2)
    columns = assignment(score)
    assert columns.shape == (2, 3, 9)
    for i in range(2):
        for j in range(3):
            assert columns[i, j].equal(assignment(score[i, j].contiguous()))


@pytest.mark.parametrize("shape", [(0, 0), (0, 4, 4), (3, 0, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    columns = assignment(torch.zeros(shape))
    assert columns.shape == shape[:-1] and columns.dtype == torch.int64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rejects_non_finite(bad: float) -> None:
    score = torch.eye(4)
    score[2, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        assignment(score)


def test_accepts_finite_whose_sum_overflows() -> None:
    assert assignment(torch.eye(4).flip(0) * 2e38).equal(torch.tensor([3, 2, 1, 0]))


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 4, 3)])
def test_rejects_non_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square"):
        assignment(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex64])
def test_rejects_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        assignment(torch.eye(3).to(dtype))


# --- the sparse solver with its proof -------------------------------------------------------------------------


def rank_one(n: int, tail: float, g: torch.Generator) -> torch.Tensor:
    """A score of rank one, (n, n), whose rows and columns are the more uneven, the larger `tail` is."""
    a, b = (x * (tail * x.abs()).exp() for x in torch.randn(2, n, 1, generator=g, dtype=torch.float64))
    return a @ b.T


@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize("tail", [0.0, 1.0, 2.0])
def test_scores_near_rank_one_are_left_to_the_dense_solver(tail: float, noise: float) -> None:
    """However uneven their rows and columns are: too many of their entries are nearly equal."""
    n, g = module.CERTIFIED_FROM, torch.Generator().manual_seed(0)
    score = rank_one(n, tail, g)
    score += noise * score.std() * torch.randn(n, n, generator=g, dtype=torch.float64)
    deviation = float(score.std())
    assert assign_certified(score, module._column_shift(score, deviation), deviation) is None


@pytest.mark.parametrize("tail", [0.0, 1.0, 2.0])
def test_sparse_solver_ends_on_near_ties(tail: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given scores of rank one as they are, SciPy's sparse solver does not end."""
    monkeypatch.setattr(certified, "MOST", n := 150)
    score = rank_one(n, tail, torch.Generator().manual_seed(0))
    columns = assign_certified(score, torch.zeros(n), float(score.std()))
    assert columns is not None and is_permutation(columns)
    assert total(score, columns).item() == pytest.approx(optimum(score), rel=1e-13)


def test_sparse_solver_ends_on_ties_that_rounding_breaks() -> None:
    """Among 30,000 random matrices of small whole numbers, one on which SciPy's sparse solver did not end."""
    rows = [[1, -2, 1, -3, 3], [-2, 0, -3, 2, -1], [-2, 1, 4, 2, 1], [-2, -1, 2, -3, -4], [-3, -2, -3, 0, -3]]
    score = torch.tensor(rows, dtype=torch.float64)
    columns = assign_certified(score, module._column_shift(score, float(score.std())), float(score.std()))
    assert columns is not None and total(score, columns).item() == optimum(score)


@settings(deadline=None)
@given(st.integers(2, 6), st.data())
def test_certified_near_ties_against_enumeration(n: int, data: st.DataObject) -> None:
    """Scores that differ by a few roundings of float64, and prices far from the optimal ones."""
    steps = st.integers(-3, 3)
    entries = data.draw(st.lists(steps, min_size=n * n, max_size=n * n))
    score = 1 + 2.0**-46 * torch.tensor(entries, dtype=torch.float64).view(n, n)
    shift = torch.tensor(data.draw(st.lists(steps, min_size=n, max_size=n)), dtype=torch.float64)
    columns = assign_certified(score, shift, 1e-3)
    best = max(sum(float(score[i, j]) - 1 for i, j in enumerate(p)) for p in permutations(range(n)))
    assert columns is not None and is_permutation(columns)
    assert float((total(score, columns) - n) - best) >= -8 * n * 4 * 2.0**-52


@pytest.mark.parametrize("reach", [0.0, 0.3])
@pytest.mark.parametrize("n", [50, 160])
def test_certified_finds_what_its_first_entries_lack(n: int, reach: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one entry a row, and from useless prices, the rest is found by its violations."""
    monkeypatch.setattr(certified, "REACH", reach)
    monkeypatch.setattr(certified, "MOST", n)
    g = torch.Generator().manual_seed(n)
    score = draw("shared mean, uneven norms", n)
    for shift in (torch.zeros(n), 100 * torch.randn(n, generator=g)):
        columns = assign_certified(score, shift, float(score.std()))
        assert columns is not None and is_permutation(columns)
        assert total(score, columns).item() == pytest.approx(optimum(score), abs=1e-14 * n * float(score.abs().max()))


def test_certified_refuses_what_a_sparse_proof_cannot_reach() -> None:
    assert assign_certified(torch.ones(300, 300), torch.zeros(300), 1.0) is None


def test_a_wrong_solution_over_the_entries_is_never_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof does not rest on the sparse solver: a permutation that is not the best finds no prices."""
    score = draw("gaussian gram", 40)
    found = assign_certified(score, torch.zeros(40), float(score.std()))
    assert found is not None
    swapped = found.clone()
    swapped[[0, 1]] = found[[1, 0]]
    monkeypatch.setattr(certified, "_sparse", lambda *_: swapped)
    assert assign_certified(score, torch.zeros(40), float(score.std())) is None


def test_planted_neurons_need_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dense solver was asked")

    monkeypatch.setattr(module, "CERTIFIED_FROM", 1)
    monkeypatch.setattr("scipy.optimize.linear_sum_assignment", refuse)
    g = torch.Generator().manual_seed(3)
    a = torch.randn(600, 300, generator=g)
    score = a @ (a + 6 * torch.randn(600, 300, generator=g)).T
    assert total(score, assignment(score)).item() == pytest.approx(optimum(score), rel=1e-13)
