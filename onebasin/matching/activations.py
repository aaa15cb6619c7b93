# SPDX-License-Identifier: Apache-2.0
"""Activation matching: the alignment that brings a source's activations closest to an anchor's.

Where a space's activations are measured follows from the signature: at the output of a norm into it, else at the input
of the layer that reads it, else at the output of the layer that writes it. Second moments between anchor and source are
summed over batches, and each space's group turns them into an element:

    a stream    sum over its norms of their outputs' cross-moments
    neurons     correlations of what enters the nonlinearity
    heads       assignment by the cosine of what each head adds to the stream plus that of its attention maps
    in heads    cross-moments of queries and keys; of the heads' values, and of the matrices that read them

Li et al., 2015 (matching by correlations); Singh and Jaggi, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.checkpoint.stock import Stock
from onebasin.checkpoint.trace import Batch, hooks, linear_calls, run
from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.axes import Axis, Cat, Flat, Leaf, size
from onebasin.symmetry.groups import Invertible, Orthogonal, Permutation, ScaledOrthogonal, ScaledPermutation
from onebasin.symmetry.maps import Element

from .moments import Pair, pairwise_moments


@dataclass
class Site:
    """Activations along one block of an axis, x of the anchor and y of the source, summed over all samples.

    leaves: of the block, row-major. cross: sum of x y^T, (n, n). own_x, own_y: sums of x x^T and y y^T, where a head's
    output norm needs them. total, square: per coordinate. count: samples.
    """

    leaves: tuple[Leaf, ...]
    start: int
    length: int
    gram: bool
    cross: Tensor | None = None
    own: list[Tensor] = field(default_factory=list)
    total: list[Tensor] = field(default_factory=list)
    square: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x, y: (samples, axis)."""
        pair = [t[:, self.start : self.start + self.length].float() for t in (x, y)]
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
        """Cross-covariance, (n, n)."""
        assert self.cross is not None
        return self.cross / self.count - torch.outer(*self.total) / self.count**2

    def correlation(self) -> Tensor:
        """(n, n); 0 for a coordinate that never changes."""
        scale = []
        for total, square in zip(self.total, self.square, strict=True):
            variance = square / self.count - (total / self.count).square()
            scale.append(torch.where(variance > 1e-12 * (square / self.count).clamp_min(1e-30), variance.rsqrt(), 0.0))
        return scale[0].unsqueeze(1) * self.centred() * scale[1]

    def covariance(self, which: int) -> Tensor:
        return self.own[which] / self.count - torch.outer(self.total[which], self.total[which]) / self.count**2


def match_activations(
    signature: Signature,
    anchor: Stock,
    source: Stock,
    batches: Iterable[Batch],
    groups: Mapping[str, Group],
    *,
    tell: Callable[[str], None] | None = None,
) -> Alignment:
    """Match the model `source` to `anchor` over the spaces in `groups`.

    signature: of the source. batches: inputs of both models; padding is left out where there is an attention_mask.
    groups: scales stay 1 and shears are left out, since one activation alone does not tell them: the rotation or
    permutation is found. Levels that rotate the stream need both models in canonical form.
    Raises CheckpointError where the models' layers cannot be followed, ValueError for no batches.
    """
    groups = {root: _rigid(group) for root, group in groups.items()}
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("activation matching needs calibration data")
    meter = _Meter(signature, anchor, source, first)
    for number, batch in enumerate(_chain(first, batches), 1):
        if tell:
            tell(f"measuring activations: batch {number}")
        meter.measure(batch)
    found: dict[str, Element] = {}
    over = {root: signature.spaces[root].batch for root in groups}
    inside = {root for root in groups if signature.spaces[root].batch}
    outer = {key for root in signature.spaces for key in signature.spaces[root].batch}
    for root, group in groups.items():  # streams first: heads are compared in them
        if root not in inside and root not in outer:
            moments = meter.space(root, group)
            if moments is not None:
                found[root] = group.nearest(moments)
    for key in [key for key in signature.members if key in outer and not signature.spaces[key].batch]:
        inner = [root for root in groups if signature.spaces[root].batch[:1] == (key,)]
        if key in groups or inner:
            found.update(meter.heads(key, groups.get(key), {root: groups[root] for root in inner}, Alignment(found, over)))
    return Alignment(found, {root: over[root] for root in found})


def _chain(first: Batch, rest: Iterable[Batch]) -> Iterable[Batch]:
    yield first
    yield from rest


def _rigid(group: Group) -> Group:
    if isinstance(group, (ScaledOrthogonal, Invertible)):
        return Orthogonal()
    return Permutation() if isinstance(group, ScaledPermutation) else group


def _moments(matrix: Tensor) -> Moments:
    zero = torch.zeros_like(matrix)
    return Moments(matrix, zero, zero[..., 0], zero[..., 0])


class _Meter:
    """Second moments of all sites, and where each space is measured."""

    def __init__(self, signature: Signature, anchor: Stock, source: Stock, example: Batch) -> None:
        self.signature, self.anchor, self.source = signature, anchor, source
        self.outputs: dict[str, list[Site]] = {}  # module -> sites
        self.inputs: dict[str, list[Site]] = {}
        self.readers: dict[str, list[tuple[str, Site]]] = {}  # space inside heads -> (weight that reads it, site)
        self.norms: dict[str, list[Site]] = {}  # root -> sites of the norms that read it
        self.written: dict[str, list[Site]] = {}  # root -> sites of layers that write it
        self.maps: dict[int, list[Tensor]] = {}  # attention layer -> cross (h, h), squared norms (h,) twice
        for role, entry in signature.tensors.items():
            if entry.norm is not None and role in source.owner:
                space = entry.norm.target
                site = Site((Leaf(space),), 0, signature.sizes[space], False)
                self.outputs[source.owner[role]] = [site]
                self.norms.setdefault(signature.root[space], []).append(site)
        small = {key: value[:2] for key, value in example.items()}
        for call in {call.module: call for call in linear_calls(source, small)}.values():
            into, out = call.axes(source)
            sites = self._cut(out)
            self.outputs[call.module] = sites
            for site in sites:
                for root in self._roots(site):
                    self.written.setdefault(root, []).append(site)
            for site in self._cut(into):
                inner = [root for root in self._roots(site) if signature.spaces[root].batch]
                if inner:
                    site.gram = True
                    self.inputs.setdefault(call.module, []).append(site)
                    self.readers.setdefault(inner[-1], []).append((call.weight, site))

    def _roots(self, site: Site) -> list[str]:
        return [self.signature.root[leaf.space] for leaf in site.leaves if not leaf.constant]

    def _cut(self, axis: Axis) -> list[Site]:
        """The blocks of an axis that a product of spaces describes; concatenations are split."""
        sizes = self.signature.sizes
        if isinstance(axis, Cat):
            sites, start = [], 0
            for part in axis.parts:
                some = self._cut(part)
                for site in some:
                    site.start += start
                sites += some
                start += size(part, sizes)
            return sites
        parts: Sequence[Axis] = axis.parts if isinstance(axis, Flat) else (axis,)
        if not all(isinstance(part, Leaf) for part in parts):
            return []  # a concatenation inside heads: its pieces are not contiguous
        leaves = tuple(part for part in parts if isinstance(part, Leaf))
        return [Site(leaves, 0, size(axis, sizes), False)]

    # --- measuring ----------------------------------------------------------------------------------------------

    def measure(self, batch: Batch) -> None:
        seen: list[dict[tuple[str, bool], list[Tensor]]] = []
        maps: list[Sequence[Tensor]] = []
        mask = batch.get("attention_mask")
        for stock in (self.anchor, self.source):
            found: dict[tuple[str, bool], list[Tensor]] = {}

            def look(name: str, found: dict[tuple[str, bool], list[Tensor]]) -> Callable[[Tensor, Tensor], None]:
                def record(x: Tensor, y: Tensor) -> None:
                    for value, is_input, table in ((x, True, self.inputs), (y, False, self.outputs)):
                        if name in table:
                            found.setdefault((name, is_input), []).append(_samples(value, mask))

                return record

            names = dict.fromkeys((*self.inputs, *self.outputs))
            eager = getattr(stock.model.config, "_attn_implementation", "eager") == "eager"
            with hooks(stock, {name: look(name, found) for name in names}):
                output = run(stock, batch, **({"output_attentions": True} if eager else {}))
            seen.append(found)
            maps.append(output.get("attentions") or () if eager else ())
        for (name, is_input), values in seen[0].items():
            for x, y in zip(values, seen[1][name, is_input], strict=True):
                for site in (self.inputs if is_input else self.outputs)[name]:
                    site.add(x, y)
        layers = max(1, len(self.signature.layers))
        for i, (p, q) in enumerate(zip(*maps, strict=True)):
            self._add_maps(i % layers, _maps(p, mask), _maps(q, mask))

    def _add_maps(self, layer: int, p: Tensor, q: Tensor) -> None:
        new = [p @ q.mT, p.square().sum(-1), q.square().sum(-1)]
        old = self.maps.get(layer)
        self.maps[layer] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]

    # --- elements -----------------------------------------------------------------------------------------------

    def space(self, root: str, group: Group) -> Moments | None:
        """Moments of a space without heads around it."""
        sites = self.norms.get(root) or self.written.get(root, [])
        sites = [site for site in sites if site.cross is not None and len(site.leaves) == 1]
        if not sites:
            return None
        rotation = hasattr(group, "dimension") and group.dimension(3) > 0
        parts = []
        for site in sites:
            assert site.cross is not None
            scale = torch.stack(site.square).sum(-1).prod().sqrt().clamp_min(1e-30)
            parts.append(site.cross / scale if rotation else site.correlation())
        return _moments(torch.stack(parts).sum(0))

    def heads(
        self, key: str, group: Group | None, inner: Mapping[str, Group], aligned: Alignment
    ) -> dict[str, Element]:
        """The assignment of heads, and the elements inside them."""
        h = self.signature.sizes[key]
        inside = [root for root in self.signature.members if self.signature.spaces[root].batch[:1] == (key,)]
        crosses = {root: self._inside(root, aligned) for root in inside}
        index = torch.arange(h)
        element: Element | None = None
        found: dict[str, Element] = {}
        if group is not None:
            gain = torch.zeros(h, h)
            for root in inside:
                gain += self._outputs(root, key, aligned)
            layer = self.signature.spaces[key].layer
            here = self.maps.get(layer if layer is not None else 0)
            if here is not None and here[0].shape == (h, h):
                gain += here[0] / (here[1].sqrt().unsqueeze(1) * here[2].sqrt()).clamp_min(1e-30)
            elif all(cross is not None for cross in crosses.values()):
                for cross in crosses.values():
                    assert cross is not None
                    gain += torch.linalg.svdvals(cross).sum(-1) / 2
            element = group.nearest(_moments(gain))
            found[key] = element
            index = element.index if hasattr(element, "index") else index
        rows = torch.arange(h)
        for root, own in inner.items():
            cross = crosses[root]
            if cross is not None:
                found[root] = own.nearest(_moments(cross[rows, index]))
        return found

    def _sites_inside(self, root: str) -> list[Site]:
        read = [site for _, site in self.readers.get(root, [])]
        return [site for site in read or self.written.get(root, []) if site.cross is not None]

    def _inside(self, root: str, aligned: Alignment) -> Tensor | None:
        """Normalised cross-moments of every pair of heads, (h, h, n, n) [anchor, source]."""
        total: Tensor | None = None
        for site in self._sites_inside(root):
            assert site.cross is not None
            cross = self._pairs(site, site.cross, root)
            cross = cross / torch.linalg.matrix_norm(cross)[..., None, None].clamp_min(1e-30)
            total = cross if total is None else total + cross
        for role, _ in self.readers.get(root, []):
            cross = self._weights(role, root, aligned)
            cross = cross / torch.linalg.matrix_norm(cross)[..., None, None].clamp_min(1e-30)
            total = cross if total is None else total + cross
        return total

    def _pairs(self, site: Site, matrix: Tensor, root: str) -> Tensor:
        """(n, n) over a block (head, ..., inner) -> (h, h, inner, inner), summed over equal places in between."""
        sizes = [size(leaf, self.signature.sizes) for leaf in site.leaves]
        place = self._roots(site).index(root)
        h, n = sizes[0], sizes[place]
        middle = site.length // (h * n)
        order = matrix.reshape(*sizes, *sizes)
        ends = (0, place, len(sizes), len(sizes) + place)
        rest = [d for d in range(len(sizes)) if d not in ends]
        order = order.permute(0, len(sizes), place, len(sizes) + place, *rest, *(len(sizes) + d for d in rest))
        return order.reshape(h, h, n, n, middle, middle).diagonal(dim1=-2, dim2=-1).sum(-1)

    def _weights(self, role: str, root: str, aligned: Alignment) -> Tensor:
        """Cross-moments of the matrices that read the space, the source's in the anchor's stream."""
        a = self.anchor.parameter[role].detach().float()
        s = aligned.apply(self.signature, role, self.source.parameter[role].detach().float())
        pair: Pair = (role, a, s, 1.0)
        return pairwise_moments(self.signature, self.signature.spaces[root].batch[0], root, [pair]).total

    def _outputs(self, root: str, key: str, aligned: Alignment) -> Tensor:
        """Cosines of what heads add to the stream, centred over the samples: (h, h)."""
        h = self.signature.sizes[key]
        gain = torch.zeros(h, h)
        for role, site in self.readers.get(root, []):
            if site.cross is None:
                continue
            batch = self.signature.spaces[root].batch[:1]
            apart = lambda tensor: [  # noqa: E731  # (h, n, outputs)
                view.reshape(*view.shape[: len(batch) + 1], -1) for view, _, _ in self.signature.views(role, tensor, root)
            ][0]
            a = apart(self.anchor.parameter[role].detach().float())
            s = apart(aligned.apply(self.signature, role, self.source.parameter[role].detach().float()))
            if a.shape[-1] * a.shape[0] * a.shape[1] != self.anchor.parameter[role].numel() or site.length != h * a.shape[1]:
                continue  # several query heads read one key head
            weights = torch.einsum("ind,jmd->ijnm", a, s)
            dot = (self._pairs(site, site.centred(), root) * weights).sum((-2, -1))
            norm = []
            for which, matrix in ((0, a), (1, s)):
                own = self._pairs(site, site.covariance(which), root).diagonal(dim1=0, dim2=1).permute(2, 0, 1)
                norm.append((own * (matrix @ matrix.mT)).sum((-2, -1)).clamp_min(1e-30).sqrt())
            gain += dot / (norm[0].unsqueeze(1) * norm[1])
        return gain


def _samples(value: Tensor, mask: Tensor | None) -> Tensor:
    """(batch, tokens, n) -> (samples, n), without padding."""
    if mask is not None and value.shape[: mask.dim()] == mask.shape:
        return value[mask.bool()]
    return value.detach().reshape(-1, value.shape[-1])


def _maps(maps: Tensor, mask: Tensor | None) -> Tensor:
    """Attention maps (batch, heads, queries, keys) -> (heads, entries), each row less its mean; padded queries are 0."""
    maps = maps.float() - maps.float().mean(-1, keepdim=True)
    if mask is not None and maps.shape[::2] == mask.shape:
        maps = maps * mask[:, None, :, None]
    return maps.transpose(0, 1).flatten(1)
