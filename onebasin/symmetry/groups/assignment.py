# SPDX-License-Identifier: Apache-2.0
"""Linear assignment: the permutation that maximises the inner product with a score matrix.

The solver is SciPy's shortest augmenting paths (Crouse, IEEE Trans. Aerosp. Electron. Syst. 52(4), 2016). Its work
grows with the initial distance of the column duals from the optimum, which is large for cross-Grams of networks trained
apart (uneven neurons, a shared mean). Subtracting a number from each column changes the scores of all permutations
equally, so the maximiser is the same; annealed Sinkhorn scaling (Kosowsky and Yuille, Neural Networks 7(3), 1994;
Cuturi, NeurIPS 2013) finds column shifts close to the optimal duals in a few passes.
"""

import numpy as np
import torch

from .sparse_lap import assign_certified

SHIFT_FROM = 512  # below this size the plain solver takes milliseconds
CERTIFIED_FROM = 2048  # from this size on, the sparse solver is tried first
TEMPERATURES = (0.3, 0.1, 0.03, 0.01)  # in standard deviations of the score
SWEEPS = 4  # Sinkhorn sweeps at each temperature


def assignment(score: torch.Tensor) -> torch.Tensor:
    """Return the permutation of greatest total score, exact to the rounding of float64.

    A batch is solved one matrix at a time. Memory on the CPU in addition to the score: 4 n^2 bytes (0.8 GB at n =
    14336) if few entries prove their optimality (see `assign_certified`), else 8 n^2; and a copy of a score on another
    device.

    Args:
        score: (..., n, n) float32 or float64, on any device.

    Returns:
        p: (..., n) int64 on the device of the score, a permutation with sum_i score[i, p[i]] maximal. Among equal
        optima, the choice is deterministic.

    Raises:
        ValueError: The score is not square, not float32 or float64, or not finite.
    """
    if score.ndim < 2 or score.shape[-1] != score.shape[-2]:
        raise ValueError(f"assignment needs square scores, got shape {tuple(score.shape)}; pass (..., n, n)")
    if score.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"assignment needs a float32 or float64 score, got {score.dtype}; convert it first")
    score = score.detach()
    columns = [_solve(matrix) for matrix in score.reshape(-1, *score.shape[-2:])] if score.numel() else []
    if not columns:
        return torch.empty(score.shape[:-1], dtype=torch.int64, device=score.device)
    return torch.stack(columns).reshape(score.shape[:-1])


def _solve(score: torch.Tensor) -> torch.Tensor:
    n = len(score)
    # A sum shows every non-finite entry but may itself overflow: look closer only then.
    if not score.sum().isfinite() and not score.isfinite().all():
        raise ValueError("assignment needs a finite score, found NaN or infinity; check the weights behind it")
    columns = score.argmax(dim=1)
    if bool((columns.bincount(minlength=n) == 1).all()):  # every row gets its maximum: prices of zero prove optimality
        return columns
    home, score = score.device, score.cpu()
    spread = float(score.std()) if n >= SHIFT_FROM else 0.0
    shift = _column_shift(score, spread) if n >= SHIFT_FROM else torch.zeros(n)
    if n >= CERTIFIED_FROM:
        certified = assign_certified(score, shift, spread)
        if certified is not None:
            return certified.to(home)
    # Copied first: arithmetic on mixed dtypes would make a third n x n array.
    cost = torch.empty(n, n, dtype=torch.float64)
    cost.copy_(score).neg_().add_(shift)
    from scipy.optimize import linear_sum_assignment  # slow to load

    matched = linear_sum_assignment(cost.numpy())[1]
    return torch.from_numpy(matched.astype(np.int64)).to(home)


def _column_shift(score: torch.Tensor, spread: float) -> torch.Tensor:
    """Return approximate column duals, (n,) float32. spread: standard deviation of the score."""
    n = len(score)
    shift = torch.zeros(n)
    if not spread:
        return shift
    kernel = torch.empty(n, n)
    for temperature in TEMPERATURES:
        scale = temperature * spread
        torch.add(-shift / scale, score, alpha=1 / scale, out=kernel)
        torch.softmax(kernel, dim=1, out=kernel)
        row = torch.ones_like(shift)
        for _ in range(SWEEPS):
            column = (row @ kernel).clamp_min_(1e-30).reciprocal_()
            row = (kernel @ column).clamp_min_(1e-30).reciprocal_()
        shift = shift + scale * (row @ kernel).clamp_min_(1e-30).log_()
    # The shift is only a head start, which a score outside the range of float32 does not get.
    return shift if shift.isfinite().all() else torch.zeros_like(shift)
