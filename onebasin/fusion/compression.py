# SPDX-License-Identifier: Apache-2.0
"""Models side by side, compressed to the size of one of them.

The models' average has one vector for each pair of their neurons, heads and directions of the residual stream, and what
is unlike in a pair is lost. Side by side, x = [x_1 ... x_m] in every space, the models compute the mixture of their
functions in m times the width. Two maps for each model compress a space to the width of one, and with them a tensor
that reads one space and writes another:

    z = sum_j T_j x_j        x_j ~ D_j z        W = sum_j T_j W_j D_j

What is lost is what the readers C of a space miss, E |C (x - D z)|^2, with second moments G = E x x^T from data.

    streams     T is a projection. The least loss of all leaves out the smallest eigenvalues of L^T C^T C L, G = L L^T:
                reduced-rank regression (Izenman, 1975). D = G T^T (T G T^T)^-1. The rows of T are orthonormal, so that
                norms of the stream see about the same lengths.
    neurons     T keeps some. Those whose removal loses least go, while the readers of the others make up for it: with
                H = G^-1 and readers' weights w, neuron k loses |w_k|^2 / H_kk (Optimal Brain Surgeon, Hassibi and
                Stork, 1993).
    heads       the same, with all dimensions of a head together.

Streams that cannot rotate, or are not in canonical form, and all other spaces are averaged: T_j is the model's weight,
and D_j = 1. With all weight on one model, or with equal models, nothing is lost.

SliceGPT (Ashkboos et al., ICLR 2024) compresses the stream of one model to its principal directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call
from onebasin.symmetry import Signature
from onebasin.symmetry.groups.elements import Acts, Linear, act_on
from onebasin.symmetry.tables.axes import Axis, Leaf, blocks

from .side_by_side import SpaceInputs, consists_of, kinds_of_spaces, measured

DAMP, FLOOR = 1e-6, 1e-8  # of each unit's second moment, and of their mean: what data of few samples leave open
PRIOR, APART = 1e-6, 1e-3  # of a stream's mean second moment: added in all directions; its share in which models differ
ROUND = 16  # of the units that are left, one in so many goes before those that lose least are found again


@dataclass(frozen=True)
class Kept:
    """The share of one model in a space of which some units are kept.

    index: its unit in each place, (n,). own: whether the place has a unit of this model, (n,). decoder: D^T: what is
    read of the kept units' dimensions in place of its own, (n g, n g). roots: of the spaces of these dimensions.
    """

    index: Tensor
    own: Tensor
    decoder: Tensor
    roots: tuple[str, ...]

    def act(self, x: Tensor, dual: bool = False) -> Tensor:
        """x: (n, k) -> (n, k)."""
        return x[self.index.to(x.device)] * self.own.to(x).unsqueeze(-1)


@dataclass
class Compression:
    """maps: root space -> one map per model. Other spaces are averaged. weights: of the models, which sum to 1."""

    signature: Signature
    weights: Sequence[float]
    maps: dict[str, Sequence[Acts]] = field(default_factory=dict)

    def share(self, model: int, axes: Sequence[Axis], tensor: Tensor, diagonal: bool = False) -> Tensor:
        """Return what one model adds to a tensor of the compressed one.

        Args:
            model: Its index.
            axes: Of the tensor.
            tensor: The model's own.
            diagonal: Whether the tensor multiplies entry by entry, so that it stays where the space is projected.
        """
        out = torch.empty_like(tensor)
        pairs = zip(*(blocks(t, tuple(axes), self.signature.sizes) for t in (out, tensor)), strict=True)
        for (place, leaves), (piece, _) in pairs:
            roots = ["" if leaf.constant else self.signature.root[leaf.space] for leaf in leaves]
            writes = False
            for dim, (leaf, root) in enumerate(zip(leaves, roots, strict=True)):
                own = self.maps[root][model] if root in self.maps else None
                if own is None or (diagonal and isinstance(own, Linear)):
                    continue
                reads = leaf.dual
                if isinstance(own, Kept) and tuple(roots[dim : dim + len(own.roots)]) == own.roots:
                    last = dim + len(own.roots) - 1
                    reads = leaves[last].dual  # the leaf of heads is the same in what writes and in what reads them
                    if reads:
                        whole = piece.flatten(dim, last)
                        piece = act_on(whole, Linear(own.decoder), (), dim, dual=False).reshape(piece.shape)
                        continue
                piece = act_on(piece, own, (), dim, reads)
                writes |= not reads
            place.copy_(piece if writes else self.weights[model] * piece)
        return out

    def joined(self, axes: Sequence[Axis], tensors: Iterable[Tensor], diagonal: bool = False) -> Tensor:
        """Return a tensor of the compressed model. tensors: one per model, of equal shapes."""
        shares = (self.share(j, axes, tensor, diagonal) for j, tensor in enumerate(tensors))
        found = next(shares)
        for one in shares:
            found += one
        return found

    def outputs(self, axis: Axis, values: Sequence[Tensor]) -> Tensor:
        """Return what the models' outputs along an axis are in the compressed model. values: (..., n) each."""
        flat = [value.reshape(-1, value.shape[-1]) for value in values]
        return self.joined((Leaf(str(len(flat[0]))), axis), flat).view(values[0].shape)

    def covers(self, axis: Axis) -> bool:
        """Whether every unit along an axis is one that was kept."""
        kept = {root for root, maps in self.maps.items() if isinstance(maps[0], Kept)}
        return consists_of(kept, axis, self.signature)


@torch.no_grad()
def compress(
    models: Sequence[LoadedModel], calls: Sequence[Call], batches: Sequence[Batch], weights: Sequence[float]
) -> Compression:
    """Choose, on data, what is kept of models.

    Args:
        models: In memory, of one signature.
        calls: Of their linear layers.
        batches: Inputs; padding is left out where there is an attention_mask.
        weights: The share of each model in the mean of their outputs.
    """
    found = Compression(models[0].signature, [weight / sum(weights) for weight in weights])
    streams, units = kinds_of_spaces(found.signature)
    sites = measured(models, calls, batches, streams, units)
    for root in sorted(streams & sites.keys()):
        if all(_is_even(model, root) for model in models):
            found.maps[root] = _projected(found, models, sites[root], units)
    found.maps |= {root: _kept(found, models, sites[root]) for root in sorted(units & sites.keys())}
    return found


def operations(signature: Signature, models: int) -> float:
    """Return about how many floating-point operations `compress` takes for what does not depend on the data: inverting
    the second moments of neurons and heads, 2 n^3, removing units from the inverse, 2 n^2 for each dimension, and a
    decoder from n / models dimensions to n."""
    _, units = kinds_of_spaces(signature)
    inside = {root: 1 for root in units}  # dimensions of each unit
    for root in signature.members:
        for outer in signature.spaces[root].batch[:1]:
            if outer in inside:
                inside[outer] = max(inside[outer], signature.sizes[root])
    rounds = 2 / ROUND / (1 - (1 - 1 / ROUND) ** 3)
    each = 2 + rounds + 2 / models**2
    return sum(each * (models * signature.sizes[root] * inside[root]) ** 3 for root in units)


def _is_even(model: LoadedModel, root: str) -> bool:
    """Whether all factors per channel of a stream are multiples of 1, as in canonical form."""
    signature = model.signature
    factors = [role for role in model.tensors if signature.tensors[role].diagonal]
    spaces = {
        role: {signature.root[leaf.space] for leaf in signature.leaves(signature.tensors[role])} for role in factors
    }
    tensors = (model.tensors[role] for role in factors if root in spaces[role])
    return all(bool((tensor == tensor.flatten()[0]).all()) for tensor in tensors)


def _readers(found: Compression, models: Sequence[LoadedModel], call: Call, index: Tensor) -> list[Tensor]:
    """Return what a layer makes of each model's inputs in the compressed model, (n, outputs) each."""
    axes = found.signature.tensors[call.weight].axes
    shares = [
        found.share(j, axes, model.parameter[call.weight].to("cpu", torch.float64)) for j, model in enumerate(models)
    ]
    return [(share.mT if call.columns else share)[index] for share in shares]


def _projected(found: Compression, models: Sequence[LoadedModel], site: SpaceInputs, units: set[str]) -> Sequence[Acts]:
    """Return the maps of a stream."""
    signature, m, root = found.signature, len(models), site.roots[0]
    n = signature.sizes[root]
    eye = torch.eye(n).to(site.moments[0])
    norms = [entry.norm for entry in signature.tensors.values() if entry.norm is not None]
    basis = eye  # of the vectors in the stream: those of a LayerNorm have the mean 0
    if any(norm.kind == "layernorm" and root in map(signature.root.get, norm.parts) for norm in norms):
        basis = torch.linalg.qr(torch.cat([torch.ones_like(eye[:, :1]), eye[:, 1:]], 1))[0][:, 1:].contiguous()
    k = basis.shape[1]
    wide = torch.kron(torch.eye(m).to(basis), basis)
    moment, wanted = torch.zeros(m * n, m * n).to(basis), torch.zeros(m * n, m * n).to(basis)
    for own, calls in zip(site.moments, site.calls, strict=True):
        moment += own / own.trace()
        for call, index in calls:
            c = torch.cat(_readers(found, models, call, index))  # (m n, outputs)
            gram = c @ c.mT
            if consists_of(units, call.axes(models[0])[1], signature):
                gram *= torch.kron(torch.eye(m), torch.ones(n, n)).to(c)  # its outputs, too, are those of each model
            wanted += gram / (gram * own).sum().clamp_min(torch.finfo(c.dtype).tiny)  # layers count equally
    moment, wanted = wide.mT @ moment @ wide, wide.mT @ wanted @ wide
    # Where the data say nothing, the models agree, so that the average is best.
    agree = torch.ones(m, m).to(moment) + APART * torch.eye(m).to(moment)
    moment += PRIOR * moment.diagonal().mean() * torch.kron(agree, torch.eye(k).to(moment))
    t = projection(moment, wanted, k)
    average = torch.cat([weight * torch.eye(k).to(t) for weight in found.weights], 1)
    u, _, v = torch.linalg.svd(average @ t.mT)
    t = u @ v @ t  # as near to the average as a rotation brings it
    lengths = moment.diagonal().reshape(m, k).sum(1)
    t *= (lengths @ torch.tensor(found.weights).to(t) / ((t @ moment) * t).sum()).sqrt()
    decoder = torch.linalg.solve(t @ moment @ t.mT, t @ moment)  # D^T, (k, m k)
    rest = eye - basis @ basis.mT
    return [
        Linear(basis @ own @ basis.mT + weight * rest, basis @ back @ basis.mT + rest)
        for weight, own, back in zip(found.weights, t.split(k, 1), decoder.split(k, 1), strict=True)
    ]


def projection(moment: Tensor, wanted: Tensor, k: int) -> Tensor:
    """Return the k orthonormal rows T with the least tr A E (x - D T x) (x - D T x)^T, D being best for T, (k, n).

    With G = L L^T they span L^-T times the last k eigenvectors of L^T A L (Izenman, 1975).

    Args:
        moment: G = E x x^T, (n, n), positive definite.
        wanted: A, the sum of C^T C over the readers C of x, (n, n).
        k: The number of rows.
    """
    values, vectors = torch.linalg.eigh(moment)
    length = values.clamp_min(torch.finfo(values.dtype).eps * values[-1]).sqrt()
    lower = vectors * length
    best = torch.linalg.eigh(lower.mT @ wanted @ lower)[1][:, -k:]
    columns: Tensor = torch.linalg.qr((vectors / length) @ best)[0]
    return columns.mT


def _kept(found: Compression, models: Sequence[LoadedModel], site: SpaceInputs) -> Sequence[Acts]:
    """Return the maps of neurons or heads."""
    n, m = found.signature.sizes[site.roots[0]], len(models)
    moment = torch.stack(site.moments).sum(0)
    moment += torch.diag(DAMP * moment.diagonal() + FLOOR * moment.diagonal().mean().clamp_min(1e-300))
    readers = [torch.cat(_readers(found, models, *one)) for calls in site.calls for one in calls]
    keep = kept_units(moment, torch.cat(readers, 1), n, m * n)
    g = len(moment) // (m * n)
    rows = _dimensions(keep, g)
    decoder = torch.linalg.solve(moment[rows][:, rows], moment[rows])  # D^T, (n g, m n g)
    return [Kept(keep % n, keep // n == j, own, site.roots) for j, own in enumerate(decoder.split(n * g, 1))]


def kept_units(moment: Tensor, readers: Tensor, count: int, of: int) -> Tensor:
    """Return which units are kept, in order, (count,).

    Args:
        moment: Second moments of all units' dimensions, (of * g, of * g), positive definite.
        readers: What the dimensions contribute, (of * g, outputs).
        count: How many units are kept.
        of: How many there are.
    """
    g, left = len(moment) // of, torch.arange(of)
    inverse, weights = torch.linalg.inv(moment), readers.view(of, g, -1)  # Cholesky fails where inputs are constant
    while len(left) > count:
        drop = min(len(left) - count, max(1, len(left) // ROUND))
        some = _losses(inverse, weights).topk(min(2 * drop, len(left)), largest=False).indices
        places = _dimensions(some, g)
        gone = some[_eliminated(inverse[places][:, places], weights[some], drop)]
        stays = torch.ones(len(left), dtype=torch.bool)
        stays[gone] = False
        inverse, weights = _without(inverse, weights, gone, stays.nonzero().flatten())
        left = left[stays]
    return left


def _without(inverse: Tensor, weights: Tensor, gone: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of the second moments of the units that are left, and their weights once they make up for the
    units that are gone: B_LL - B_LG B_GG^-1 B_GL, and w_L - B_LG B_GG^-1 w_G.

    inverse: B, (units * g, units * g). weights: (units, g, outputs).
    """
    g = weights.shape[1]
    out, stay = _dimensions(gone, g), _dimensions(left, g)
    rows = inverse[stay]
    back = torch.linalg.solve(inverse[out][:, out], rows[:, out].mT).mT  # (left, gone)
    weights = weights[left] - (back @ weights[gone].flatten(0, 1)).view(len(left), g, -1)
    return torch.addmm(rows[:, stay], back, rows[:, out].mT, alpha=-1), weights


def _dimensions(units: Tensor, g: int) -> Tensor:
    """Return the g dimensions of each unit, in order, (units * g,)."""
    return (units.unsqueeze(1) * g + torch.arange(g)).flatten()


def _losses(inverse: Tensor, weights: Tensor) -> Tensor:
    """Return what the removal of each unit loses: tr w^T B^-1 w, B being the unit's block of the inverse, (units,)."""
    units, g, _ = weights.shape
    index = torch.arange(units)
    own = inverse.view(units, g, units, g)[index, :, index]  # (units, g, g)
    losses: Tensor = (weights * torch.linalg.solve(own, weights)).sum((1, 2))
    return losses


def _eliminated(inverse: Tensor, weights: Tensor, count: int) -> list[int]:
    """Return the units that go, one after another, each being the one whose removal loses least by then.

    inverse: (units * g, units * g). weights: (units, g, outputs). Both are changed.
    """
    g = weights.shape[1]
    gone: list[int] = []
    for _ in range(count):
        losses = _losses(inverse, weights)
        losses[gone] = torch.inf
        k = int(losses.argmin())
        gone.append(k)
        rows = slice(k * g, k * g + g)
        column = torch.linalg.solve(inverse[rows, rows], inverse[rows]).mT  # (units * g, g)
        weights -= (column @ weights[k]).view_as(weights)
        inverse.addmm_(column, inverse[rows].clone(), alpha=-1)
        inverse[rows, rows] = torch.eye(g).to(inverse)  # not looked at again
    return gone
