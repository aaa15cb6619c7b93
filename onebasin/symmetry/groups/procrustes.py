# SPDX-License-Identifier: Apache-2.0
"""The orthogonal polar factor, from which every rotation here is computed: by SVD, or faster by iteration."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# An odd polynomial a x + b x^3 + c x^5 acts on the singular values of X as X (a + b X^T X + c (X^T X)^2). LIFT maps
# 0.077 .. 1 into 0.297 .. 0.99 and multiplies smaller ones by up to 3.9; LAND maps 0.295 .. 1 to 1 within 2e-9 in its
# three steps, and multiplies small ones by 12. Both equioscillate (LIFT is then scaled by 0.99, so that rounding does
# not lead beyond 1, where it grows). Without the bound of 0.3 LIFT would grow a little faster (4.2) but lose digits: an
# iteration that leaves no singular value far behind is backward stable (Nakatsukasa and Higham, SIAM J. Matrix Anal.
# Appl. 33(4), 2012). Polynomials for the polar factor: Amsel et al., arXiv:2505.16932.
LIFT = (3.907209350367262, -10.100952397297437, 7.183743047200473)
LAND = (
    (3.5057002814865568, -6.0375295182614135, 3.640895197241057),
    (1.8885295680565286, -1.2649520836616548, 0.3764983256903225),
    (1.875, -1.25, 0.375),
)
LIFTS = 5  # singular values of at least 3.5e-4 become at least 0.295
ROUNDS = 4  # of LAND, for condition numbers up to those that float32 can distinguish from infinity
LARGEST = 96  # from this size on, LAPACK's SVD is as fast on a CPU
CACHED = 1 << 16  # numbers to iterate at a time on a CPU: a few matrices of this size fit into its cache


def polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal polar factor U V^T of M = U S V^T: argmax over orthogonal R of <R, M>.

    matrix: (*batch, n, n) -> (*batch, n, n). Source: the Procrustes problem; Kabsch 1976; Theorem 4.1 of the rotation
    paper states it for attention heads.

    Small matrices in float32 are iterated, by GEMMs only, in about half the time of the SVD. A result is accepted if it
    is orthogonal and its product with M is symmetric to rounding, as for an SVD; for all others, the SVD is computed.
    """
    n = matrix.shape[-1]
    if matrix.dtype != torch.float32 or n > LARGEST or matrix.requires_grad or not matrix.numel():
        return _by_svd(matrix)
    flat = matrix.reshape(-1, n, n)
    at_once = max(1, CACHED // n**2) if matrix.device.type == "cpu" else len(flat)
    return torch.cat([_certified(part) for part in torch.split(flat, at_once)]).reshape(matrix.shape)


def sharpened(rotation: Tensor) -> Tensor:
    """Take a Newton-Schulz step towards the orthogonal polar factor, in float64: an error of 1e-6 becomes 1e-12."""
    matrix = rotation.double()
    return 1.5 * matrix - 0.5 * matrix @ (matrix.mT @ matrix)


def nuclear(matrix: Tensor) -> Tensor:
    """Return the nuclear norm, the value <polar(M), M>: (*batch, n, n) -> (*batch,)."""
    values: Tensor = torch.linalg.svdvals(matrix)
    return values.sum(-1)


def _by_svd(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    factor: Tensor = u @ vh
    return factor


def _certified(matrix: Tensor) -> Tensor:
    """Return polar factors of (b, n, n), float32. Those that are not certified after a round of LAND get another, and
    finally the SVD."""
    unit = matrix / matrix.abs().amax((-2, -1), keepdim=True)  # 0 / 0 is never certified
    gram = unit.mT @ unit
    square = torch.linalg.matrix_norm(gram, keepdim=True)  # at least the square of the largest singular value
    found = _mapped(unit / square.sqrt(), (LIFT,) * LIFTS)
    todo = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    for _ in range(ROUNDS):
        found[todo] = _mapped(found[todo], LAND)
        todo = ~_is_polar(found, unit)
        if not todo.any():
            break
    # One singular value that is off by 1e-5 is spread over all entries, where the certificate cannot see it.
    found = _mapped(found, LAND[-1:])
    if todo.any():
        found[todo] = _by_svd(matrix[todo])
    return found


def _mapped(x: Tensor, polynomials: Iterable[tuple[float, float, float]]) -> Tensor:
    """Apply the polynomials, one after another, to the singular values."""
    for a, b, c in polynomials:
        gram = x.mT @ x
        x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return x


def _is_polar(found: Tensor, matrix: Tensor) -> Tensor:
    """Whether R^T R = 1 and R^T M is symmetric, up to rounding. (The iteration ensures that it is also positive.)"""
    n = matrix.shape[-1]
    rounding = 8 * n**0.5 * torch.finfo(matrix.dtype).eps
    off = (found.mT @ found - torch.eye(n).to(found)).abs().amax((-2, -1))
    product = found.mT @ matrix
    skew = (product - product.mT).abs().amax((-2, -1))
    found_polar: Tensor = (off <= rounding) & (skew <= rounding * torch.linalg.matrix_norm(matrix))
    return found_polar
