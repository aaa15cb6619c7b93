# SPDX-License-Identifier: Apache-2.0
"""Even norms: with them the stream of a post-norm model can rotate, and its function is nearly the same.

The weight of a norm that writes back, y = g * n + b, allows only permutations of the stream: R diag(g) R^T is not
diagonal. In trained models g is nearly constant. Let m be its root mean square. If y becomes m n + b, whatever reads it
before the next norm can make up for the difference:

    W (g * n + b) + c = W diag(g / m) (m n + b) + c + W ((1 - g / m) * b)

The sum that the next norm takes (the residual path) loses (g - m) * n, and so does a reader that the signature does not
know. A reader without a bias gets W ((g / m) * b) instead of W b. The more g varies, the more the function changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..tables.axes import Axis, Leaf, size
from ..tables.signature import MOVES, Entry, Norm, Signature
from .dataflow import Outlet, absorb, bias_of, fed, outlet_of
from .rewrites import Step


def evened(signature: Signature) -> Signature | None:
    """Return the signature with even norms, on whose weights nothing acts; None if no stream would get more freedom."""
    tensors = {role: _even(signature, entry) for role, entry in signature.tensors.items()}
    found = replace(signature, tensors=tensors)
    gains = (MOVES[found.kinds[root]] - MOVES[kind] for root, kind in signature.kinds.items())
    return found if any(gains) else None


def _even(signature: Signature, entry: Entry) -> Entry:
    norm = uneven(signature, entry)
    if norm is None:
        return entry
    constant: tuple[Axis, ...] = tuple(Leaf(str(size(axis, signature.sizes))) for axis in entry.axes)
    return replace(entry, axes=constant, norm=replace(norm, even=True))


def uneven(signature: Signature, entry: Entry) -> Norm | None:
    """Return the norm whose weight this is, if that writes back into a stream."""
    norm = entry.norm
    return norm if norm and norm.writes_back and signature.spaces[norm.target].part == "stream" else None


def evening(signature: Signature) -> Iterator[Step]:
    """Yield the steps that make the norms of a signature even."""
    for role, entry in signature.tensors.items():
        norm = uneven(signature, entry)
        if norm is None:
            continue
        outlet = outlet_of(signature, role)
        if outlet is not None and signature.sharing.isdisjoint(outlet.readers):
            for reader in outlet.readers:
                target = bias_of(signature, reader, outlet.source) if outlet.bias is not None else None
                if outlet.bias is not None and target is not None:
                    given = (reader, role, outlet.bias)
                    yield Step(target, given, partial(_make_up, signature, outlet, reader, outlet.bias, target))
                yield Step(reader, (role,), partial(_take_in, signature, outlet, reader))
        yield Step(role, (), partial(_level, norm, role))


def _mean(gain: Tensor) -> Tensor:
    return gain.square().mean().sqrt()


def _ratio(norm: Norm, stored: Tensor) -> Tensor:
    """Return g / m."""
    gain = norm.weight(stored)
    return gain / _mean(gain).clamp_min(1e-30)


def _take_in(signature: Signature, outlet: Outlet, reader: str, tensors: Mapping[str, Tensor]) -> None:
    ratio = _ratio(outlet.norm, tensors[outlet.role])
    for view in fed(signature, outlet, reader, tensors[reader]):
        view *= ratio


def _make_up(
    signature: Signature, outlet: Outlet, reader: str, bias: str, target: str, tensors: Mapping[str, Tensor]
) -> None:
    rest = (1 - _ratio(outlet.norm, tensors[outlet.role])) * tensors[bias]
    absorb(signature, tensors, reader, target, rest, (Leaf(outlet.norm.target),))


def _level(norm: Norm, role: str, tensors: Mapping[str, Tensor]) -> None:
    tensors[role].fill_(float(_mean(norm.weight(tensors[role]))) - (1 - norm.unit))
