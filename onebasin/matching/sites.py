# SPDX-License-Identifier: Apache-2.0
"""Second moments of two models' activations, summed over samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.symmetry.tables.axes import Leaf


@dataclass
class Site:
    """Activations along one block of an axis, x of the anchor and y of the source, summed over all samples.

    leaves: of the block, row-major. cross: sum of x y^T, (n, n). own: sums of x x^T and of y y^T, if `gram`.
    total, square: sums of x, y and of their squares, (n,). count: samples.
    """

    leaves: tuple[Leaf, ...]
    gram: bool = False
    cross: Tensor | None = None
    own: list[Tensor] = field(default_factory=list)
    total: list[Tensor] = field(default_factory=list)
    square: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples. x, y: (samples, *leaves)."""
        pair = [t.flatten(1) for t in (x, y)]
        new = [pair[0].mT @ pair[1], *(t.sum(0) for t in pair), *(t.square().sum(0) for t in pair)]
        if self.gram:
            new += [t.mT @ t for t in pair]
        if self.cross is None:
            self.cross, self.total, self.square, self.own = new[0], new[1:3], new[3:5], new[5:]
        else:
            old = [self.cross, *self.total, *self.square, *self.own]
            for mine, more in zip(old, new, strict=True):
                mine += more
        self.count += len(x)

    def centred(self) -> Tensor:
        """Return the cross-covariance, (n, n)."""
        assert self.cross is not None
        return self.cross / self.count - torch.outer(*self.total) / self.count**2

    def correlation(self) -> Tensor:
        """Return the correlations, (n, n); 0 for a coordinate that never changes."""
        scale = []
        for total, square in zip(self.total, self.square, strict=True):
            variance = square / self.count - (total / self.count).square()
            scale.append(torch.where(variance > 1e-12 * (square / self.count).clamp_min(1e-30), variance.rsqrt(), 0.0))
        return scale[0].unsqueeze(1) * self.centred() * scale[1]

    def covariance(self, which: int) -> Tensor:
        return self.own[which] / self.count - torch.outer(self.total[which], self.total[which]) / self.count**2
