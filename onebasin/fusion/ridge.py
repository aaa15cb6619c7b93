# SPDX-License-Identifier: Apache-2.0
"""Ridge regression from sums over samples, with the ridge chosen on other samples; moments of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # columns that one product takes whole


@dataclass
class Sums:
    """The sums of a regression of R on X: gram is X^T X, (n, n), and cross is X^T R, (n, m)."""

    gram: Tensor
    cross: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.gram + other.gram, self.cross + other.cross)

    def error(self, change: Tensor) -> float:
        """Return |X T - R|^2 up to a constant."""
        return float(((self.gram @ change - 2 * self.cross) * change).sum(dtype=torch.float64))


@dataclass
class Spread:
    """The mean and the deviation of samples (samples, n) that come in parts, from sums in float64."""

    count: int = 0
    total: Tensor | float = 0.0
    square: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        self.count += len(rows)
        self.total = self.total + rows.sum(0).double()
        self.square = self.square + torch.linalg.vector_norm(rows, dim=0).double().square()

    @property
    def mean(self) -> Tensor:
        """(n,)."""
        assert isinstance(self.total, Tensor)
        return self.total / self.count

    @property
    def deviation(self) -> Tensor:
        """The standard deviation, (n,)."""
        return (self.square / self.count - self.mean.square()).clamp_min(0.0).sqrt()


def gram(x: Tensor, constant: bool) -> Tensor:
    """Return X^T X of x (samples, n), of which half is computed. constant: X has one more column, of ones."""
    n = x.shape[1]
    out = x.new_empty(n + constant, n + constant)
    _gram(x, out[:n, :n])
    if constant:
        out[n, :n] = out[:n, n] = x.sum(0)
        out[n, n] = len(x)
    return out


def _gram(x: Tensor, out: Tensor) -> None:
    n = x.shape[1]
    if n <= BLOCK:
        torch.mm(x.mT, x, out=out) if out.is_contiguous() else out.copy_(x.mT @ x)
        return
    half = n // 2
    _gram(x[:, :half], out[:half, :half])
    _gram(x[:, half:], out[half:, half:])
    out[:half, half:] = x[:, :half].mT @ x[:, half:]
    out[half:, :half] = out[:half, half:].mT


def cross(x: Tensor, r: Tensor, constant: bool) -> Tensor:
    """Return X^T R of x (samples, n) and r (samples, m); `constant` as in `gram`."""
    product = x.mT @ r
    return torch.cat([product, r.sum(0, keepdim=True)]) if constant else product


def solution(sums: Sums, ridge: float) -> Tensor:
    """(G + r diag(G))^-1 C, the minimum over T of |X T - R|^2 + r |diag(G)^1/2 T|^2 with G = X^T X, C = X^T R.

    (n, m). Solved in float64. An input that is always zero gets no weight.
    """
    g, c = sums.gram.double(), sums.cross.double()
    diagonal = g.diagonal()
    floor = torch.finfo(torch.float32).eps * diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny)
    g = g + torch.diag(ridge * diagonal + floor * (diagonal < floor))
    return torch.cholesky_solve(c, torch.linalg.cholesky(g)).to(sums.gram.dtype)


def best_solution(fit: Sums, held: Sums, ridges: Sequence[float], first: int = 0) -> tuple[int, Tensor, float]:
    """Return the index of the ridge with the least error on `held`, its solution on `fit`, and that error.

    first: the index to begin at. Neighbours are tried as long as they are better, since the error has one minimum.
    """
    tried: dict[int, tuple[Tensor, float]] = {}

    def error(place: int) -> float:
        if place not in tried:
            found = solution(fit, ridges[place])
            tried[place] = found, held.error(found)
        return tried[place][1]

    best = first
    for step in (1, -1):
        while 0 <= best + step < len(ridges) and error(best + step) < error(best):
            best += step
    error(best)
    return best, *tried[best]
