# SPDX-License-Identifier: Apache-2.0
"""Fusion by optimal transport: every neuron of a source is carried to the neurons of the anchor that it resembles.

A plan T between m neurons of the anchor and n of the source has uniform masses and the least cost <T, C> minus entropy.
Tensors that write the neurons are multiplied by m T (its rows sum to 1: each new neuron is a mean of source neurons),
those that read them by n T (its columns sum to 1: the effect of each source neuron is shared out). For m = n both are
the same, and without entropy a permutation. Singh and Jaggi, "Model Fusion via Optimal Transport", NeurIPS 2020,
Algorithm 1; for transformers Imfeld et al., ICLR 2024. There, readers take m T as well, which loses part of the effect
if m < n. Here biases move too, and heads stay heads: whole heads are assigned, and the inside of a head is carried over
within its pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from onebasin.models import Model, View
from onebasin.models.views import sizes_of
from onebasin.settings import Strength, checked
from onebasin.symmetry import Signature
from onebasin.symmetry.coupling import Blend
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.groups.elements import Acts, Linear, Monomial, act_on
from onebasin.symmetry.tables.axes import blocks, size

ITERATIONS = 10_000
LARGEST_EXPONENT = 300  # float64 ends at 745; scalings grow as its inverse does


def plan(cost: Tensor, entropy: float = 0.0) -> Acts:
    """Return the transport plan as a map from source to anchor.

    cost: (m, n) [anchor, source]. entropy: weight of the plan's entropy, in units of the costs' standard deviation; 0
    gives the exact plan, which for m = n is solved as an assignment. All other plans are computed by POT. Raises
    ValueError for a negative entropy, a cost that is not finite, and if POT is needed but not installed.
    """
    entropy = checked(Strength, "entropy", entropy)
    m, n = cost.shape
    if entropy == 0 and m == n:
        return Monomial(assignment(-cost))
    if not bool(cost.isfinite().all()):
        raise ValueError("optimal transport needs finite costs; check the weights behind them")
    try:
        import ot
    except ImportError:
        raise ValueError("soft couplings, and different widths, need POT: pip install 'onebasin[ot]'") from None
    wide = cost.detach().double()
    a, b = wide.new_full((m,), 1 / m), wide.new_full((n,), 1 / n)
    if entropy == 0:
        found = ot.emd(a, b, wide, numItermax=10**7)
    else:
        weight, wide = entropy * (float(wide.std(correction=0)) or 1.0), wide - wide.min()
        # Both give the same plan; logarithms cost ten times more, and are needed where exp(-cost / weight) underflows.
        method = "sinkhorn" if float(wide.max()) < LARGEST_EXPONENT * weight else "sinkhorn_log"
        found = ot.sinkhorn(a, b, wide, weight, method=method, numItermax=ITERATIONS, warn=False)
    matrix: Tensor = (found * m).to(cost.dtype)
    return Coupling(matrix, None if m == n else matrix * (n / m))


def dense(act: Acts, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a plan as two matrices: for tensors that write the space, and for those that read it."""
    if isinstance(act, Monomial):
        act = act.dense(like.dtype)
    assert isinstance(act, Coupling | Linear)
    return act.matrix.to(like), act.of(dual=True).to(like)


def mixed(first: Acts, second: Acts, share: float, like: Tensor) -> Coupling:
    """Return (1 - share) first + share second."""
    pairs = zip(dense(first, like), dense(second, like), strict=True)
    return Coupling(*((1 - share) * a + share * b for a, b in pairs))


def resized(signature: Signature, sizes: Mapping[str, int]) -> Signature:
    """Return the same signature with other sizes of spaces, and the shapes that follow from them."""
    spaces = {key: replace(space, size=sizes.get(key, space.size)) for key, space in signature.spaces.items()}
    lengths = {key: space.size for key, space in spaces.items()}
    tensors = {
        role: replace(entry, shape=tuple(size(axis, lengths) for axis in entry.axes))
        for role, entry in signature.tensors.items()
    }
    return replace(signature, spaces=spaces, tensors=tensors)


@dataclass(frozen=True)
class Transport:
    """Maps of spaces, and own maps of single tensors of the residual stream. target: the signature of the result.

    Rewrites tensors as an alignment does, but without keeping the function, and perhaps in other shapes.
    """

    target: Signature
    maps: Mapping[str, Acts]
    own: Mapping[str, Mapping[str, Acts]] = field(default_factory=dict)

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """Return the tensor `role` of a model with this signature, carried over to the anchor's neurons."""
        return carried(signature, self.target, role, tensor, {**self.maps, **self.own.get(role, {})})


def carried(signature: Signature, target: Signature, role: str, tensor: Tensor, maps: Mapping[str, Acts]) -> Tensor:
    """Return a tensor of a model with this signature, with the spaces in `maps` carried to their sizes in `target`."""
    entry = signature.tensors[role]
    shape = [size(axis, target.sizes) for axis in entry.axes]
    pieces = []
    for piece, leaves in blocks(tensor, entry.axes, signature.sizes):
        roots = [signature.root.get(leaf.space, "") for leaf in leaves]
        # If the number of heads changes, the map of the inside carries the heads too.
        along = {outer for root in roots if isinstance(maps.get(root), Blend) for outer in signature.spaces[root].batch}
        for dim, (leaf, root) in enumerate(zip(leaves, roots, strict=True)):
            batch = signature.spaces[root].batch if root else ()
            if root in maps and root not in along and set(batch) <= set(roots):
                before = piece.shape[dim]
                piece = act_on(piece, maps[root], tuple(map(roots.index, batch)), dim, leaf.dual)
                if signature.spaces[leaf.space].name in signature.temperature and not leaf.dual:
                    piece = piece * math.sqrt(piece.shape[dim] / before)  # logits are divided by the root of the size
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0].reshape(shape)
    out = tensor.new_empty(shape)
    for (place, _), piece in zip(blocks(out, entry.axes, target.sizes), pieces, strict=True):
        place.copy_(piece)
    return out


class Transported(View):
    """A model carried over to the neurons of an anchor, in the anchor's widths."""

    def __init__(self, base: Model, transport: Transport, anchor: Model) -> None:
        sizes = sizes_of(anchor.raw_config) if transport.target.sizes != base.signature.sizes else {}
        super().__init__(base, transport.target, sizes)
        self.transport = transport

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.transport.apply(self.base.signature, role, self.base.read(role, dtype, device))
