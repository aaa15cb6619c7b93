# SPDX-License-Identifier: Apache-2.0
"""Whether an alignment is one that leaves the function as it is, asked of its maps alone.

A model whose spaces are rewritten by elements of what acts on them computes what it computed (`audit` and the laws test
that the tables say so). What is left to check is that every map found is such an element: n numbers for a permutation,
products with random vectors for a matrix. No model is run, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .groups.elements import Element, Monomial
from .groups.signs import pairs
from .tables.signature import MOVES, Signature

PROBES = 4


def departure(signature: Signature, elements: Mapping[str, Element], seed: int = 0) -> float:
    """The largest relative error with which random vectors see a map leave its group; rounding is about 1e-12 in
    float64 and 1e-6 in float32.

    elements: root space -> map. Raises ValueError, naming the space, where a map is of a form that may not act there at
    all, is not finite, or is no permutation.
    """
    generator = torch.Generator().manual_seed(seed)
    return max(
        (_departure(signature.kinds[root], root, element, generator) for root, element in elements.items()), default=0.0
    )


def _departure(kind: str, root: str, element: Element, generator: torch.Generator) -> float:
    moves = MOVES[kind]
    if isinstance(element, Monomial):
        return _monomial(moves, root, element)
    numbers = [element.matrix] if element.dual is None else [element.matrix, element.dual]
    if not all(bool(torch.isfinite(matrix).all()) for matrix in numbers):
        raise ValueError(f"the map of '{root}' is not finite")
    n = element.matrix.shape[-1]
    x = torch.randn(n, PROBES, generator=generator, dtype=torch.float64).expand(*element.matrix.shape[:-2], n, PROBES)
    g, h = (element.of(dual).cpu().double() for dual in (False, True))
    worst = _relative(h.mT @ (g @ x), x)  # h is the inverse transposed, or g itself where it is orthogonal
    if "shear" in moves:
        return worst
    if "rotate" in moves or "ones" in moves:
        worst = max(worst, _relative(g.mT @ (g @ x), x))
        ones = torch.ones(*g.shape[:-2], n, 1, dtype=g.dtype)
        return worst if "rotate" in moves else max(worst, _relative(g @ ones, ones))
    if "pair turn" in moves or "next turn" in moves:
        first, second = pairs(n, "next turn" in moves)
        real, imaginary = g[..., first, first], g[..., second, first]
        turned = torch.empty_like(x)
        real, imaginary = real.unsqueeze(-1), imaginary.unsqueeze(-1)
        turned[..., first, :] = real * x[..., first, :] - imaginary * x[..., second, :]
        turned[..., second, :] = imaginary * x[..., first, :] + real * x[..., second, :]
        return max(worst, _relative(g @ x, turned))
    raise ValueError(f"a matrix may not act on the space '{root}' of kind {kind}")


def _monomial(moves: frozenset[str], root: str, element: Monomial) -> float:
    index = element.index.cpu()
    stays = torch.arange(index.shape[-1]).expand_as(index)
    if not torch.equal(index.sort(-1).values, stays):
        raise ValueError(f"the map of '{root}' is no permutation")
    if "permute" not in moves and not torch.equal(index, stays):
        raise ValueError(f"nothing may change places in the space '{root}'")
    if element.scale is None:
        return 0.0
    scale = element.scale.cpu().double()
    if not bool((torch.isfinite(scale) & (scale != 0)).all()):
        raise ValueError(f"the map of '{root}' has a factor that is zero or not finite")
    signs = any("sign" in move for move in moves)
    if bool((scale < 0).any()) and not signs:
        raise ValueError(f"the map of '{root}' has a negative factor")
    if signs and "sign" not in moves:
        first, second = pairs(scale.shape[-1], "pair sign" not in moves)
        if not torch.equal(scale[..., first], scale[..., second]):
            raise ValueError(f"the map of '{root}' flips one dimension of a pair alone")
    free = any("scale" in move or move == "shear" for move in moves)
    return 0.0 if free else float((scale.abs() - 1).abs().max())


def _relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-2) / expected.norm(dim=-2)).max())
