# SPDX-License-Identifier: Apache-2.0
"""Activation matching: the alignment that brings a source's activations closest to an anchor's.

The signature determines where the activations of a space are measured: at the output of a norm into it, else at the
input of the layer that reads it, else at the output of the layer that writes it. Second moments between anchor and
source are summed over batches, and each space's group turns them into an element:

    a stream    sum over its norms of their outputs' cross-moments
    neurons     correlations of the inputs of the nonlinearity
    heads       assignment by the cosine of the heads' outputs into the stream plus that of their attention maps
    in heads    cross-moments of queries and keys; of the heads' values, and of the matrices that read them

Li et al., 2015 (matching by correlations); Singh and Jaggi, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from onebasin.engine import Tell
from onebasin.models.errors import ModelError
from onebasin.running.loaded import LoadedModel
from onebasin.running.trace import Batch, Call, examples, hooks, linear_calls, returns_maps, routed, run, samples
from onebasin.symmetry import Alignment, Group, Moments, Signature
from onebasin.symmetry.groups import as_moments, nuclear
from onebasin.symmetry.groups.assignment import assignment
from onebasin.symmetry.groups.elements import Element, Monomial
from onebasin.symmetry.tables.axes import Axis, Leaf, blocks, size, space_leaves
from onebasin.symmetry.tables.signature import MOVES

from .sites import Site


def match_activations(
    signature: Signature,
    anchor: LoadedModel,
    source: LoadedModel,
    batches: Iterable[Batch],
    groups: Mapping[str, Group],
    *,
    tell: Tell | None = None,
) -> Alignment:
    """Match the model `source` to `anchor` over the spaces in `groups`, by their activations.

    Only rotations and permutations are found, without scales and shears, which activations on one side of a space do
    not determine; and none for experts, which run on other tokens in every model. Levels that rotate the stream need
    both models in canonical form.

    Args:
        signature: Of both models.
        anchor: The model that is not changed.
        source: The model to align.
        batches: Inputs; padding is left out if there is an attention_mask.
        groups: Root space -> the group that acts on it.
        tell: Called with a sentence for every batch.

    Raises:
        ModelError: The models' layers cannot be followed.
        ValueError: There are no batches.
    """
    groups = {root: group.rigid() for root, group in groups.items()}
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("activation matching needs calibration data")
    meter = _Meter(signature, anchor, source, first)
    for number, batch in enumerate(chain([first], batches), 1):
        if tell:
            tell(f"measuring activations: batch {number}")
        meter.measure(batch)
    over = {root: signature.spaces[root].batch for root in groups}
    heads = dict.fromkeys(key for root in signature.members for key in signature.spaces[root].batch)
    found: dict[str, Element] = {}
    for root, group in groups.items():  # streams first: heads are compared in them
        if root not in heads and not over[root]:
            moments = meter.space(root, group)
            if moments is not None:
                found[root] = group.nearest(moments)
    # A stream in bands (wav2vec 2.0) is also a stream, so it comes before the heads of attention.
    for key in sorted(heads, key=lambda key: signature.spaces[key].part == "attention"):
        inner = {root: group for root, group in groups.items() if over[root] == (key,) and root not in heads}
        if not signature.spaces[key].batch and (key in groups or inner):
            found.update(meter.heads(key, groups.get(key), inner, Alignment(dict(found), over)))
    return Alignment(found, {root: over[root] for root in found})


class _Meter:
    """The sites of all spaces, with their second moments."""

    def __init__(self, signature: Signature, anchor: LoadedModel, source: LoadedModel, example: Batch) -> None:
        self.signature, self.anchor, self.source = signature, anchor, source
        self.outputs: dict[str, tuple[Axis, list[Site]]] = {}  # module -> sites along the axis of its output
        self.inputs: dict[str, tuple[Axis, list[Site]]] = {}
        self.readers: dict[str, list[tuple[str, Site]]] = {}  # space inside heads -> (what reads it, site)
        self.norms: dict[str, list[Site]] = {}  # root -> sites of the norms that read it
        self.written: dict[str, list[Site]] = {}  # root -> sites of layers that write it
        self.maps: dict[str, list[Tensor]] = {}  # space of heads -> cross (h, h), squared norms (h,) twice, of maps
        outer = dict.fromkeys(key for root in signature.members for key in signature.spaces[root].batch)
        heads = [one for key in outer if (one := signature.spaces[key]).part == "attention" and not one.batch]
        self.attending = [one.key for one in sorted(heads, key=lambda one: one.layer or 0)]
        for role, entry in signature.tensors.items():
            # A norm over heads and what is inside them is a vector of none of these spaces.
            if entry.norm is not None and isinstance(entry.axes[0], Leaf) and role in source.owner:
                space = entry.norm.target
                site = Site((Leaf(space),))
                self.outputs[source.owner[role]] = Leaf(space), [site]
                self.norms.setdefault(signature.root[space], []).append(site)
        self.channels: set[str] = set()  # convolutions, whose outputs have channels before positions
        for role, entry in signature.tensors.items():
            if len(entry.axes) > 2 and role in source.owner and isinstance(owner := source.module(role), _ConvNd):
                module = source.owner[role]
                axis = entry.axes[int(owner.transposed)]
                self.channels.add(module)
                self.outputs[module] = axis, self._cut(axis)
                for site in self.outputs[module][1]:
                    for root in self._roots(site):
                        self.written.setdefault(root, []).append(site)
        calls: list[Call] = []
        small = examples(example, 0, 2)
        self.mapped = bool(self.attending) and all(returns_maps(stock, small) for stock in (anchor, source))
        with suppress(ModelError) if self.outputs else nullcontext():  # convolutions alone
            calls = linear_calls(source, small)
        for call in {call.module: call for call in calls}.values():
            into, out = call.axes(source)
            written = self._cut(out)
            if any(MOVES[signature.kinds[root]] for site in written for root in self._roots(site)):
                self.outputs[call.module] = out, written  # not for a vocabulary, whose moments could fill the memory
            for site in written:
                for root in self._roots(site):
                    self.written.setdefault(root, []).append(site)
            sites = self._cut(into)
            read = [site for site in sites if self._inner(site)]
            if read:
                self.inputs[call.module] = into, sites
            for site in read:
                site.gram = True
                self.readers.setdefault(self._roots(site)[-1], []).append((call.weight, site))
        for name in routed([anchor, source], small, {*self.inputs, *self.outputs}):
            self.inputs.pop(name, None)
            self.outputs.pop(name, None)

    def _inner(self, site: Site) -> bool:
        """Whether this is a block of heads, with the space inside them last."""
        return len(site.leaves) > 1 and bool(self.signature.spaces[self._roots(site)[-1]].batch)

    def _roots(self, site: Site) -> list[str]:
        return [self.signature.root[leaf.space] for leaf in space_leaves(site.leaves)]

    def _cut(self, axis: Axis) -> list[Site]:
        """Return a site for every block of an axis."""
        empty = torch.empty(1, size(axis, self.signature.sizes), device="meta")
        return [Site(leaves[1:]) for _, leaves in blocks(empty, (Leaf("1"), axis), self.signature.sizes)]

    # --- measuring ----------------------------------------------------------------------------------------------

    def _width(self, module: str) -> int:
        """Return the size of a module's output; a norm of an image, too, may have its channels before positions."""
        return size(self.outputs[module][0], self.signature.sizes)

    def measure(self, batch: Batch) -> None:
        seen: list[dict[tuple[str, bool], list[Tensor]]] = []
        maps: list[Sequence[Tensor | Sequence[Tensor]]] = []
        mask = batch.get("attention_mask")
        for stock in (self.anchor, self.source):
            found: dict[tuple[str, bool], list[Tensor]] = {}

            def look(name: str, found: dict[tuple[str, bool], list[Tensor]]) -> Callable[[Tensor, Tensor], None]:
                def record(x: Tensor, y: Tensor) -> None:
                    if name in self.outputs and (name in self.channels or y.shape[-1] != self._width(name)):
                        y = y.movedim(1, -1)
                    for value, is_input, table in ((x, True, self.inputs), (y, False, self.outputs)):
                        if name in table:
                            found.setdefault((name, is_input), []).append(samples(value.detach(), mask))

                return record

            names = dict.fromkeys((*self.inputs, *self.outputs))
            asked = {"output_attentions": True} if self.mapped else {}
            with hooks(stock, {name: look(name, found) for name in names}):
                output = run(stock, batch, **asked)
            seen.append(found)
            maps.append(output.get("attentions") or () if self.mapped else ())
        for (name, is_input), values in seen[0].items():
            axis, sites = (self.inputs if is_input else self.outputs)[name]
            for x, y in zip(values, seen[1][name, is_input], strict=True):
                cut = [blocks(t, (Leaf(str(len(t))), axis), self.signature.sizes) for t in (x, y)]
                for site, (a, _), (b, _) in zip(sites, *cut, strict=True):
                    site.add(a, b)
        if self.attending and len(maps[0]) % len(self.attending) == 0:  # else they are those of one tower of several
            for i, (p, q) in enumerate(zip(*maps, strict=True)):
                self._add_maps(self.attending[i % len(self.attending)], _maps(p, mask), _maps(q, mask))

    def _add_maps(self, key: str, p: Tensor, q: Tensor) -> None:
        new = [p @ q.mT, p.square().sum(-1), q.square().sum(-1)]
        old = self.maps.get(key)
        self.maps[key] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]

    # --- elements -----------------------------------------------------------------------------------------------

    def space(self, root: str, group: Group) -> Moments | None:
        """Return the moments of a space that is not inside heads."""
        sites = self.norms.get(root) or self.written.get(root, [])
        sites = [site for site in sites if site.cross is not None and len(site.leaves) == 1]
        if not sites:
            return None
        rotation = group.dimension(3) > 0
        parts = []
        for site in sites:
            assert site.cross is not None
            scale = torch.stack(site.square).sum(-1).prod().sqrt().clamp_min(1e-30)
            parts.append(site.cross / scale if rotation else site.correlation())
        return as_moments(torch.stack(parts).sum(0))

    def heads(
        self, key: str, group: Group | None, inner: Mapping[str, Group], aligned: Alignment
    ) -> dict[str, Element]:
        """Return the elements of the heads `key`, of the query heads that share one of them, and of the spaces inside.

        aligned: the elements of streams and of other heads.
        """
        h = self.signature.sizes[key]
        found: dict[str, Element] = {}
        device = self.source.model.device
        index = torch.arange(h, device=device)
        queries = self._queries(key)
        q = self.signature.sizes[queries] if queries else 1
        within = torch.arange(q, device=device).expand(h, q)
        if group is not None or queries in inner:
            fine, coarse = self._gain(key, h, q, aligned)
            if not fine.any() and not coarse.any():  # experts, whose layers are not followed
                return {}
            best = assignment(fine) if queries in inner else within.expand(h, h, q)
            coarse = coarse + torch.take_along_dim(fine, best.unsqueeze(-1), -1).sum((-2, -1))
            if group is not None:
                element = group.nearest(as_moments(coarse))
                assert isinstance(element, Monomial)
                found[key], index = element, element.index
            within = best[torch.arange(h, device=device), index]
            if queries in inner:
                found[str(queries)] = Monomial(within)
        order = (index.unsqueeze(1) * q + within).flatten()  # query head of the source for each of the anchor
        for root, own in inner.items():
            cross = None if root == queries else self._inside(root, index, order, aligned)
            if cross is not None:
                found[root] = own.nearest(as_moments(cross))
        return found

    def _queries(self, key: str) -> str | None:
        """Return the space of the query heads that share one of the heads `key`: it is inside them, with a space inside
        itself."""
        sites = (site for sites in self.written.values() for site in sites)
        between = (self._roots(site)[1:-1] for site in sites if self._roots(site)[:1] == [key])
        return next((root for roots in between for root in roots), None)

    def _gain(self, key: str, h: int, q: int, aligned: Alignment) -> tuple[Tensor, Tensor]:
        """Return the gains of pairs of heads [anchor, source]: of their query heads, (h, h, q, q), and in all, (h,
        h)."""
        inside = [root for root in self.signature.members if self.signature.spaces[root].batch == (key,)]
        like = torch.zeros((), dtype=self.source.model.dtype, device=self.source.model.device)
        fine, coarse = like.new_zeros(h * q, h * q), like.new_zeros(h, h)
        for root in inside:
            fine += self._outputs(root, h * q, aligned)
        if key in self.maps and self.maps[key][0].shape == (h * q, h * q):
            cross, own_x, own_y = self.maps[key]
            fine += cross / (own_x.unsqueeze(1) * own_y).clamp_min(1e-30).sqrt()
        else:  # without maps: the agreement of queries, keys and values after the best rotation
            for root in inside:
                for site in self._sites_inside(root):
                    assert site.cross is not None
                    n = self.signature.sizes[root]
                    if len(site.cross) != h * n:
                        continue
                    x, y = (square.view(h, n).sum(-1) for square in site.square)
                    cross = site.cross.view(h, n, h, n).transpose(1, 2)
                    coarse += nuclear(cross) / (x.unsqueeze(1) * y).clamp_min(1e-30).sqrt()
        return fine.view(h, q, h, q).transpose(1, 2), coarse

    def _sites_inside(self, root: str) -> list[Site]:
        """Return the sites of a space inside heads: in the layers that read it, else in those that write it."""
        read = [site for _, site in self.readers.get(root, [])]
        sites = read or [site for site in self.written.get(root, []) if self._roots(site)[-1] == root]
        return [site for site in sites if site.cross is not None]

    def _inside(self, root: str, index: Tensor, order: Tensor, aligned: Alignment) -> Tensor | None:
        """Return the normalised cross-moments of the chosen pairs of heads, (h, n, n) [anchor, source]."""
        h, n = len(index), self.signature.sizes[root]
        chosen = []
        for site in self._sites_inside(root):
            assert site.cross is not None
            number = len(site.cross) // n  # heads, or query heads
            if number not in (h, len(order)):
                continue
            pairs = index if number == h else order
            chosen.append(site.cross.view(number, n, number, n)[torch.arange(number, device=pairs.device), :, pairs])
        for role, _ in self.readers.get(root, []):
            a, s = (self._by_head(role, root, tensor) for tensor in self._aligned(role, aligned))
            chosen.append(a @ s[index if len(s) == h else order].mT)
        if not chosen:
            return None
        crosses = [cross.view(h, -1, n, n).sum(1) for cross in chosen]
        return torch.stack([c / torch.linalg.matrix_norm(c)[:, None, None].clamp_min(1e-30) for c in crosses]).sum(0)

    def _outputs(self, root: str, h: int, aligned: Alignment) -> Tensor:
        """Return the cosines of the (query) heads' outputs into the stream, centred over the samples: (h, h)."""
        total = torch.zeros(h, h, dtype=self.source.model.dtype, device=self.source.model.device)
        for role, site in self.readers.get(root, []):
            a, s = (self._by_head(role, root, tensor) for tensor in self._aligned(role, aligned))
            n = a.shape[1]
            if site.cross is None or len(a) != h or len(site.cross) != h * n:  # heads that are inside of others
                continue
            cross = site.centred().view(h, n, h, n).transpose(1, 2)
            dot = torch.einsum("ijnm,ind,jmd->ij", cross, a, s)
            norms = []
            for which, matrix in enumerate((a, s)):
                own = site.covariance(which).view(h, n, h, n).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
                norms.append((own * (matrix @ matrix.mT)).sum((-2, -1)).clamp_min(1e-30).sqrt())
            total += dot / (norms[0].unsqueeze(1) * norms[1])
        return total

    def _aligned(self, role: str, aligned: Alignment) -> tuple[Tensor, Tensor]:
        """Return a tensor of the anchor, and that of the source in the anchor's stream."""
        source = aligned.apply(self.signature, role, self.source.parameter[role].detach())
        return self.anchor.parameter[role].detach(), source

    def _by_head(self, role: str, root: str, tensor: Tensor) -> Tensor:
        """Return a matrix that reads the space as (heads, n, outputs), with query heads if they are in the axis."""
        entry = self.signature.tensors[role]
        for view, leaves in blocks(tensor, entry.axes, self.signature.sizes):
            roots = [self.signature.root.get(leaf.space, "") for leaf in leaves]
            if root in roots:
                place = roots.index(root)
                outer = range(roots.index(self.signature.spaces[root].batch[0]), place)
                rest = [dim for dim in range(len(roots)) if dim not in outer and dim != place]
                heads = view.permute(*outer, place, *rest)[..., None]  # a vector has one output
                return heads.flatten(len(outer) + 1).flatten(0, len(outer) - 1)
        raise AssertionError(role)


def _maps(maps: Tensor | Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys), or one for each image -> (heads, entries), with the mean of each row subtracted,
    and 0 for padding."""
    if not isinstance(maps, Tensor):
        return torch.cat([_maps(one, None) for one in maps], 1)
    maps = maps - maps.mean(-1, keepdim=True)
    if mask is not None and maps.shape[::2] == mask.shape:
        maps = maps * mask[:, None, :, None]
    return maps.transpose(0, 1).flatten(1)
