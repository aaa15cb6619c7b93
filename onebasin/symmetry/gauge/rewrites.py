# SPDX-License-Identifier: Apache-2.0
"""The steps to the canonical form. Each is exact, local to a few tensors, and derived from the signature alone:

    scales    a factor per channel (LayerScale) moves into the tensors that write those channels
    tables    the mean row of a summed table moves into the table it is summed with
    norms     weight and bias of a norm move into the readers of its output; readers of a LayerNorm lose the all-ones
              direction, in which a centred vector has no component
    passed    a value bias moves through attention into the output bias, a post-LN bias into the biases up to the
              next norm
    sums      biases in the same sum (attention and FFN side by side) move into the first of them
    unseen    these are set to zero: a key bias under softmax, the mean of rows over which a softmax runs (a router),
              and the part of a vector that is orthogonal to everything it is multiplied with
    writers   tensors that are only read by LayerNorms, of the stream or of a head's queries and keys, lose their
              all-ones direction
    degrees   of neurons whose power another tensor reads (squared ReLU), the writer has a fixed share of the length

A step changes one tensor given a few others, so that every tensor of the form can be computed by itself from those that
it depends on. Nothing is divided by a norm's weight, so a weight of zero is no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from ..tables.axes import Leaf
from ..tables.signature import Signature, bias_beside
from .dataflow import (
    Outlet,
    absorb,
    along,
    bias_of,
    cut,
    downstream,
    fed,
    moves,
    noted,
    outlets,
    sharing,
    speaks_of,
    summands,
    traded,
    vectors,
    writers,
)


@dataclass(frozen=True)
class Step:
    """A change of the tensor `role` in place, by `run`, which is called with it and the tensors `given`, by role."""

    role: str
    given: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], None]


def steps(signature: Signature) -> Iterator[Step]:
    """Yield all steps, in order."""
    for rewrite in (_scales, _tables, _norms, _passed, _sums, _unseen, _writers, _degrees):
        yield from rewrite(signature)


def _scales(signature: Signature) -> Iterator[Step]:
    for role, entry in signature.tensors.items():
        targets = [target for target in entry.scaled if target in signature.tensors and moves(signature, role)]
        for target in targets:
            yield Step(target, (role,), partial(_multiply, signature, role, target))
        if targets:
            yield Step(role, (), partial(_fill, role, 1.0))


def _multiply(signature: Signature, role: str, target: str, tensors: Mapping[str, Tensor]) -> None:
    for view in along(signature, target, tensors[target], signature.leaves(signature.tensors[role])[0]):
        view *= tensors[role]


def _tables(signature: Signature) -> Iterator[Step]:
    for role in (role for role, _ in noted(signature, "into") if moves(signature, role)):
        rows, rest = summands(signature, signature.tensors[role])
        for target, some in rows:
            yield Step(target, (role,), partial(_add_rows, signature, role, some, target))
        taken = max((some.stop for _, some in rows), default=0)
        for target in rest:
            yield Step(target, (role,), partial(_add_mean, signature, role, taken, target))
        yield Step(role, (), partial(_without_mean, signature, role, taken, bool(rest)))


def _vectors(signature: Signature, role: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Leaf]]:
    """Yield views (rows, part) of a table of vectors, and the leaves of the parts of which these consist."""
    for view, axes in cut(signature, role, tensors[role]):
        yield view.reshape(-1, view.shape[-1]), axes[-1]


def _add_rows(signature: Signature, role: str, rows: slice, target: str, tensors: Mapping[str, Tensor]) -> None:
    for (table, _), (own, _) in zip(*(_vectors(signature, one, tensors) for one in (role, target)), strict=True):
        own += table[rows]


def _add_mean(signature: Signature, role: str, rows: int, target: str, tensors: Mapping[str, Tensor]) -> None:
    means: dict[Leaf, list[Tensor]] = {}
    for table, leaf in _vectors(signature, role, tensors):
        means.setdefault(leaf, []).append(table[rows:].mean(0))
    for leaf, each in means.items():  # a space may come several times in a vector
        for view, mean in zip(along(signature, target, tensors[target], leaf), cycle(each), strict=False):
            view += mean


def _without_mean(signature: Signature, role: str, rows: int, rest: bool, tensors: Mapping[str, Tensor]) -> None:
    for table, _ in _vectors(signature, role, tensors):
        table[:rows] = 0
        if rest:
            table[rows:] -= table[rows:].mean(0)


def _norms(signature: Signature) -> Iterator[Step]:
    for outlet in outlets(signature):
        role, bias, leaf = outlet.role, outlet.bias, Leaf(outlet.norm.target)
        layer_norm = outlet.norm.kind == "layernorm"
        if bias is not None:
            places = downstream(signature, bias, (leaf,))
            yield from _moved(signature, bias, None, (leaf,), places)
            bias = None if places else bias
        if not moves(signature, role) or not signature.sharing.isdisjoint(outlet.readers):
            continue
        folds = outlet.free and (bias is None or layer_norm)
        for reader in outlet.readers if folds else ():
            given = (role,) if bias is None else (role, bias)
            yield Step(reader, given, partial(_fold, signature, outlet, reader, bias))
        if folds:
            yield Step(role, (), partial(_fill, role, outlet.norm.unit))
        if folds and bias is not None:
            yield Step(bias, (), partial(_fill, bias, (outlet.norm.copies * signature.sizes[leaf.space]) ** -0.5))
        elif layer_norm and (bias is None or "padded" not in signature.tensors[bias].notes):
            for reader in outlet.readers:
                yield from _unreach(signature, outlet, reader, bias)


def _fold(signature: Signature, outlet: Outlet, reader: str, bias: str | None, tensors: Mapping[str, Tensor]) -> None:
    """Fold a norm's weight into a reader, and the bias of a LayerNorm if the reader has none. The normed vector has no
    component along ones, so that direction can carry constants:
    (W + c 1^T / sqrt(d)) (x + 1 / sqrt(d)) = W x + c, where W 1 = 0 and 1^T x = 0."""
    for view in fed(signature, outlet, reader, tensors[reader]):
        constant = None if bias is None else view @ tensors[bias]
        view *= outlet.norm.weight(tensors[outlet.role])
        if constant is not None:
            view += constant.unsqueeze(-1) * view.shape[-1] ** -0.5 - view.mean(-1, keepdim=True)


def _fill(role: str, value: float, tensors: Mapping[str, Tensor]) -> None:
    tensors[role].fill_(value)


def unreached(gain: Tensor) -> Tensor:
    """Return the direction h to which a LayerNorm's output (less its bias) is orthogonal: h D is a multiple of ones, or
    zero."""
    least = gain.abs().min()
    return (gain == 0).to(gain) if least == 0 else least / gain


def _unreach(signature: Signature, outlet: Outlet, reader: str, bias: str | None) -> Iterator[Step]:
    """Remove the part of a reader along that direction, in which its input is just the norm's bias, if any."""
    target = bias_of(signature, reader, outlet.source)
    if bias is not None:
        if target is None:
            return
        yield Step(target, (reader, outlet.role, bias), partial(_meet, signature, outlet, reader, bias, target))
    yield Step(reader, (outlet.role,), partial(_remove, signature, outlet, reader))


def _along_unreached(signature: Signature, outlet: Outlet, reader: str, tensors: Mapping[str, Tensor]) -> Tensor:
    h = unreached(outlet.norm.weight(tensors[outlet.role])).to(tensors[reader])
    found = torch.zeros_like(tensors[reader])
    parts = fed(signature, outlet, reader, found)
    for view, part in zip(fed(signature, outlet, reader, tensors[reader]), parts, strict=True):
        part += (view @ h).unsqueeze(-1) * h / (h @ h)
    return found


def _meet(
    signature: Signature, outlet: Outlet, reader: str, bias: str, target: str, tensors: Mapping[str, Tensor]
) -> None:
    removed = {**tensors, reader: _along_unreached(signature, outlet, reader, tensors)}
    absorb(signature, removed, reader, target, tensors[bias], (Leaf(outlet.norm.target),))


def _remove(signature: Signature, outlet: Outlet, reader: str, tensors: Mapping[str, Tensor]) -> None:
    tensors[reader].sub_(_along_unreached(signature, outlet, reader, tensors))


def _passed(signature: Signature) -> Iterator[Step]:
    for role, word in noted(signature, "passes"):
        for number, (_, axes) in enumerate(cut(signature, role, _shape(signature, role))):
            if speaks_of(signature, axes, word):
                yield from _moved(signature, role, number, axes, downstream(signature, role, axes))


def _shape(signature: Signature, role: str) -> Tensor:
    return torch.empty(signature.tensors[role].shape, device="meta")


def _sums(signature: Signature) -> Iterator[Step]:
    for first, bias in traded(signature):
        yield from _moved(signature, bias, None, (), [("", first)])


def _moved(
    signature: Signature,
    role: str,
    number: int | None,
    leaves: tuple[Leaf, ...],
    places: list[tuple[str, str]] | None,
) -> Iterator[Step]:
    """Move a constant (block `number` of a tensor, or all of it) into the biases in `places`, and set it to zero; leave
    it unchanged if there are none."""
    for reader, bias in places or ():
        given = (reader, role) if reader else (role,)
        yield Step(bias, given, partial(_add_constant, signature, role, number, leaves, reader, bias))
    if places:
        yield Step(role, (), partial(_clear, signature, role, number))


def _constant(signature: Signature, role: str, number: int | None, tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors[role] if number is None else cut(signature, role, tensors[role])[number][0]


def _add_constant(
    signature: Signature,
    role: str,
    number: int | None,
    leaves: tuple[Leaf, ...],
    reader: str,
    bias: str,
    tensors: Mapping[str, Tensor],
) -> None:
    constant = _constant(signature, role, number, tensors)
    if reader:
        absorb(signature, tensors, reader, bias, constant, leaves)
    else:
        tensors[bias].add_(constant)


def _clear(signature: Signature, role: str, number: int | None, tensors: Mapping[str, Tensor]) -> None:
    _constant(signature, role, number, tensors).zero_()


def _unseen(signature: Signature) -> Iterator[Step]:
    for role, word in noted(signature, "invisible"):
        for number, (_, axes) in enumerate(cut(signature, role, _shape(signature, role))):
            if speaks_of(signature, axes, word):
                yield Step(role, (), partial(_clear, signature, role, number))
    for role, entry in signature.tensors.items():
        if not moves(signature, role):
            continue
        if "softmax" in entry.notes:
            yield Step(role, (), partial(_shift, signature, role))
        if "against" in entry.notes:
            yield Step(role, (entry.notes["against"],), partial(_project, role, entry.notes["against"]))


def _shift(signature: Signature, role: str, tensors: Mapping[str, Tensor]) -> None:
    for rows in sharing(signature, role):
        tensors[role][rows] -= tensors[role][rows].mean(0)


def differences(table: Tensor) -> Tensor:
    """(rows, *batch, n) -> (*batch, rows - 1, n): each row minus the first."""
    return (table[1:] - table[:1]).movedim(0, -2)


def along_rows(vector: Tensor, rows: Tensor) -> Tensor:
    """Return the part of vectors (*batch, n) in the span of some rows (*batch, m, n)."""
    found: Tensor = (vector.unsqueeze(-2) @ torch.linalg.pinv(rows) @ rows).squeeze(-2)
    return found


def _project(role: str, table: str, tensors: Mapping[str, Tensor]) -> None:
    tensors[role].copy_(along_rows(tensors[role], differences(tensors[table])))


def _writers(signature: Signature) -> Iterator[Step]:
    for role, parts in writers(signature):
        if role not in signature.sharing:
            yield Step(role, (), partial(_centre, signature, role, parts))


def _centre(signature: Signature, role: str, parts: tuple[Leaf, ...], tensors: Mapping[str, Tensor]) -> None:
    for views in vectors(signature, role, tensors[role], parts):
        mean = torch.cat(views, -1).mean(-1, keepdim=True)
        for view in views:
            view -= mean


def _degrees(signature: Signature) -> Iterator[Step]:
    """Yield the steps that balance the writers of neurons with the readers of a power of them."""
    for role, word in noted(signature, "degree"):
        degree, reader = (word or "").split()
        if reader not in signature.tensors or not moves(signature, role):
            continue
        pair = _Powers(signature, role, reader, int(degree))
        bias = bias_beside(role)
        yield Step(reader, (role,), partial(pair.grow, reader, -pair.degree / (pair.degree + 1)))
        if bias in signature.tensors:
            yield Step(bias, (role, reader), partial(pair.grow, bias, 1.0))
        yield Step(role, (reader,), partial(pair.grow, role, 1.0))


@dataclass(frozen=True)
class _Powers:
    """Rows w of a matrix `role`, with entries c of its bias, and columns d of `reader`, which reads a function of
    degree k of them, f(s x) = s^k f(x): s w, s c and s^-k d compute the same for any s > 0.

    The least s^2 |w|^2 + s^-2k |d|^2 has s |w| = k^(1/2) s^-k |d|, so s^(k + 1) = r = k^(1/2) |d| / |w|. Once the
    columns are s^-k d, r has become s.
    """

    signature: Signature
    role: str
    reader: str
    degree: int

    @property
    def inner(self) -> list[str]:
        """Return the spaces that have a factor for each of their entries."""
        mine, others = (list(self.signature.leaves(self.signature.tensors[one])) for one in (self.role, self.reader))
        return [leaf.space for leaf in mine if not leaf.dual and leaf.space in {other.space for other in others}]

    def shared(self, role: str, tensor: Tensor) -> Iterator[Tensor]:
        """Yield views with the dimensions of these spaces first."""
        for view, axes in cut(self.signature, role, tensor):
            front = [[leaf.space for leaf in axes].index(space) for space in self.inner]
            yield view.permute(*front, *(dim for dim in range(view.dim()) if dim not in front))

    def length(self, role: str, tensor: Tensor) -> Tensor:
        views = self.shared(role, tensor)
        squares = [view.square().reshape(*view.shape[: len(self.inner)], -1).sum(-1) for view in views]
        return torch.stack(squares).sum(0).sqrt()

    def grow(self, role: str, power: float, tensors: Mapping[str, Tensor]) -> None:
        """Multiply a tensor by this power of r, or by 1 if |w| or |d| is 0."""
        w, d = (self.length(one, tensors[one]) for one in (self.role, self.reader))
        alive = (w > 0) & (d > 0)
        factor = torch.where(alive, self.degree**0.5 * d / torch.where(alive, w, 1.0), 1.0) ** power
        for view in self.shared(role, tensors[role]):
            view *= factor[(..., *[None] * (view.dim() - factor.dim()))]
