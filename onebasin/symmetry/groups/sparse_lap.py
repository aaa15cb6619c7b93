# SPDX-License-Identifier: Apache-2.0
"""Assignment over few entries of the score, with a proof that the others do not matter.

The entries of each row near its largest, after the column shift, are assigned by SciPy's sparse solver. Column prices
under which that solution is optimal among them are longest paths; a pass over the whole score then finds all entries
that exceed their row's own price. If there are none, the solution is optimal (linear programming duality); otherwise,
they are added, and the solver runs again. The score is read in blocks of rows, without temporaries of its size.

SciPy's sparse solver takes about as many steps as the range of the costs over their least difference: with costs that
differ by a rounding only, it does not end. So it never sees more than `DIGIT` bits of them. It solves for the leading
bits first; what the prices of that solution leave of the costs gives the next ones (cost scaling: Gabow and Tarjan,
SIAM J. Comput. 18(5), 1989).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 20  # entries to process at a time
REACH = 0.3  # standard deviations of the score below a row's largest entry for entries of the first round
MOST = 100  # entries per row, on average, above which a dense solver is better
ROUNDS = 10
STEPS = 2000  # of the search for prices
DIGIT = 20  # bits of the costs that the solver sees at once
FINER = 10  # bits by which the next ones are finer: costs above 2^(DIGIT - FINER) old steps are not told apart


def assign_certified(score: Tensor, shift: Tensor, spread: float) -> Tensor | None:
    """Return the permutation p of greatest sum_i score[i, p[i]], (n,) int64; None if that takes too many entries.

    score: (n, n) on the CPU, float32 or float64. shift: (n,), subtracted from each column first: any values will do,
    best near optimal prices. spread: the scale of the score's entries. The sum is maximal to the rounding of float64.
    """
    n = len(score)
    shift, rows = shift.double(), torch.arange(n)
    size = float(score.abs().max()) + float(shift.abs().max()) or 1.0
    rounding = 4 * torch.finfo(torch.float64).eps * size
    reach = REACH * spread
    first, _ = _at_least(score, shift, lambda _, largest: largest - reach)
    if first is None:
        return None
    entries = torch.cat([first, rows * n + rows])  # with the diagonal there is always an assignment
    for _ in range(ROUNDS):
        entries = torch.unique(entries)
        row, column = entries // n, entries % n
        value = score[row, column].double() - shift[column]
        columns = _sparse(row, column, value, n, rounding)
        own = score[rows, columns].double() - shift[columns]
        prices = _prices(columns[row], column, value - own[row], n, rounding)
        earned = own - prices[columns]
        above, largest = _at_least(score, shift + prices, lambda block, _: earned[block] + rounding)  # noqa: B023
        if above is None:
            return None
        if float((largest - earned).clamp_min(0).sum()) <= n * rounding:  # weak duality: no assignment gains more
            return columns
        entries = torch.cat([entries, above])
    return None


def _at_least(score: Tensor, price: Tensor, floor: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor | None, Tensor]:
    """Return the entries of score - price that reach their row's floor, as i n + j, and the largest of every row.

    floor: a function of a block of rows and their largest entries. None instead of more than MOST entries per row.
    """
    n = len(score)
    step = max(1, BLOCK // n)
    found, largest, count = [], [], 0
    for start in range(0, n, step):
        block = slice(start, start + step)
        reduced = score[block].double() - price
        largest.append(reduced.amax(1))
        row, column = (reduced >= floor(block, largest[-1])[:, None]).nonzero(as_tuple=True)
        found.append((row + start) * n + column)
        count += len(row)
        if count > MOST * n:
            return None, largest[-1]
    return torch.cat(found), torch.cat(largest)


def _sparse(row: Tensor, column: Tensor, value: Tensor, n: int, rounding: float) -> Tensor:
    """Return the best assignment over the given entries, in the order of rows, to steps of `rounding`, (n,) int64."""
    from scipy.sparse import csr_array  # slow to load
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    step = torch.inf
    while True:
        best = torch.full((n,), -torch.inf, dtype=torch.float64).scatter_reduce(0, row, value, "amax")
        loss = best[row] - value
        step = max(min(step / 2.0**FINER, float(loss.max()) / 2.0**DIGIT), rounding)
        cost = (loss / step).round().clamp_max(2.0**DIGIT)
        entries = csr_array(((1 + cost).numpy(), (row.numpy(), column.numpy())), shape=(n, n))  # zeros are not stored
        columns = torch.from_numpy(min_weight_full_bipartite_matching(entries)[1].astype(np.int64))
        if step <= rounding:
            return columns
        own = cost[columns[row] == column]  # one entry of each row, in the order of rows
        value = value - step * _prices(columns[row], column, own[row] - cost, n, 0.0)[column]


def _prices(source: Tensor, target: Tensor, length: Tensor, n: int, rounding: float) -> Tensor:
    """Return the least prices y >= 0 with y[target] >= y[source] + length: longest paths (Bellman and Ford), (n,)
    float64.

    They exist since no exchange along a cycle improves the assignment, which is optimal over its entries.
    """
    prices = torch.zeros(n, dtype=torch.float64)
    for _ in range(STEPS):
        raised = prices.scatter_reduce(0, target, prices[source] + length, "amax")
        if float((raised - prices).max()) <= rounding:
            break
        prices = raised
    return prices
