# SPDX-License-Identifier: Apache-2.0
"""An alignment: one group element per space, applied to tensors, composed, inverted, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .groups.elements import Acts, Element, Linear, Monomial, act_on, product
from .tables.axes import blocks
from .tables.signature import Entry, Signature

FORMAT = "onebasin-alignment-1"


@dataclass(frozen=True)
class Alignment:
    """Group elements that move the spaces of a model.

    Attributes:
        elements: Root space -> element. A space that is absent keeps the identity.
        batch: Root space -> the spaces that its element is batched over (heads, for qk). The batch is indexed by the
            heads of the target, so elements that are applied afterwards permute it.
    """

    elements: Mapping[str, Element] = field(default_factory=dict)
    batch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    # --- acting -------------------------------------------------------------------------------------------

    def apply(self, signature: Signature, role: str, tensor: Tensor) -> Tensor:
        """Return the tensor `role` of the rewritten model: every axis is mapped by the element of its space.

        Args:
            signature: Of the model.
            role: The role of the tensor.
            tensor: The tensor; its shape, dtype and device are kept. It is returned itself if no element acts on it.

        Raises:
            ValueError: A matrix acts on a norm whose weight is not folded away.
        """
        return move(signature, self.elements, role, tensor)

    # --- algebra ------------------------------------------------------------------------------------------

    def after(self, first: Alignment) -> Alignment:
        """Return `self * first`: the alignment that applies `first`, then `self`."""
        batch = {**first.batch, **self.batch}
        elements: dict[str, Element] = {}
        for key in {**first.elements, **self.elements}:
            mine, theirs = self.elements.get(key), first.elements.get(key)
            if theirs is not None:
                theirs = _carry(theirs, key, self.elements, batch)
            if mine is not None and theirs is not None:
                elements[key] = product(mine, theirs)
            else:
                both = mine if mine is not None else theirs
                assert both is not None
                elements[key] = both
        return Alignment(elements, batch)

    def inverse(self) -> Alignment:
        """Return the alignment that undoes this one."""
        elements: dict[str, Element] = {}
        for key in sorted(self.elements, key=lambda key: len(self.batch.get(key, ()))):  # outer spaces first
            elements[key] = _carry(self.elements[key].inverse(), key, elements, self.batch)
        return Alignment(elements, self.batch)

    def __iter__(self) -> Iterator[str]:
        return iter(self.elements)

    # --- on disk ------------------------------------------------------------------------------------------

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file, with the tensors KEY.index, KEY.scale, KEY.matrix and KEY.dual.

        Args:
            path: The file to write.
            notes: Further metadata.
        """
        tensors = {f"{key}.{name}": part.detach().cpu().contiguous()
                   for key, element in self.elements.items() for name, part in element.parts.items()}  # fmt: skip
        batch = {key: list(self.batch.get(key, ())) for key in self.elements}
        metadata = {**(notes or {}), "format": FORMAT, "batch": json.dumps(batch)}
        save_in_order(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Alignment:
        """Read what `save` wrote.

        Raises:
            ValueError: The file contains anything else.
        """
        tensors, metadata = load_whole(path, "alignment", FORMAT)
        try:
            batch = {key: tuple(outer) for key, outer in json.loads(metadata["batch"]).items()}
            elements: dict[str, Element] = {}
            for key in batch:
                if f"{key}.index" in tensors:
                    elements[key] = Monomial(tensors[f"{key}.index"], tensors.get(f"{key}.scale"))
                else:
                    elements[key] = Linear(tensors[f"{key}.matrix"], tensors.get(f"{key}.dual"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise ValueError(f"'{path}' contains no alignment that can be read") from None
        return cls(elements, batch)


def load_whole(path: str | Path, what: str, form: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file.

    Args:
        path: The file.
        what: Its expected contents, for messages.
        form: The format that its metadata must name.

    Raises:
        ValueError: It cannot be read, or is of another format.
    """
    try:
        with safe_open(str(path), "pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read the {what} '{path}': {error}") from None
    if metadata.get("format") != form:
        raise ValueError(f"'{path}' contains no {what} of this version ({form})")
    return tensors, metadata


def save_in_order(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with its metadata sorted by key, since the library's order differs from run to run."""
    save_file(dict(tensors), str(path), dict(metadata))
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))


def move(signature: Signature, elements: Mapping[str, Acts], role: str, tensor: Tensor) -> Tensor:
    """Return the tensor `role` with every axis mapped by the element of its space; see `Alignment.apply`."""
    entry = signature.tensors[role]
    touching = {signature.root[leaf.space] for leaf in signature.leaves(entry)} & elements.keys()
    elements = {root: elements[root] for root in touching if not _stays(elements[root])}
    if not elements:
        return tensor
    pieces = []
    for piece, leaves in blocks(tensor, entry.axes, signature.sizes):
        roots = [signature.root.get(leaf.space, "") for leaf in leaves]
        for dim, (leaf, root) in enumerate(zip(leaves, roots, strict=True)):
            element, batch = elements.get(root), signature.spaces[root].batch if root else ()
            if element is not None and entry.diagonal:
                # A weight that all heads share does not change: only signs act inside them.
                element = _in_norm(element, entry, tensor) if set(batch) <= set(roots) else None
            if element is not None:
                piece = act_on(piece, element, tuple(map(roots.index, batch)), dim, leaf.dual)
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0].reshape(tensor.shape)
    out = torch.empty_like(tensor)
    if any(piece.requires_grad for piece in pieces):
        out = out.requires_grad_().clone()  # a view only gets a gradient if its base requires one
    for (target, _), piece in zip(blocks(out, entry.axes, signature.sizes), pieces, strict=True):
        target.copy_(piece)
    return out


def _stays(element: Acts) -> bool:
    """Whether an element is a permutation that moves nothing, as is common between models of one base. Scales that are
    being learned do not count, even if they are 1."""
    learns = isinstance(element, Monomial) and element.scale is not None and element.scale.requires_grad
    return isinstance(element, Monomial) and not learns and element.is_identity()


def _in_norm(element: Acts, entry: Entry, weight: Tensor) -> Acts | None:
    """Return the action on a norm's weight, a diagonal matrix D -> g D g^-1: permutations and couplings act, a rotation
    requires a multiple of 1."""
    if not isinstance(element, Linear):
        return Monomial(element.index) if isinstance(element, Monomial) else element
    if not bool((weight == weight.flatten()[0]).all()):
        raise ValueError(f"'{entry.name}' must be folded away before a rotation: use the canonical form")
    return None


def _carry(element: Element, key: str, moving: Mapping[str, Element], batch: Mapping[str, tuple[str, ...]]) -> Element:
    """Reorder the batch of `element`, which acts on `key`, by the elements of the spaces that it is batched over.

    These may be batched themselves: query heads permuted inside every group, in `(kv group qk)`.
    """
    over = batch.get(key, ())
    for dim, outer in enumerate(over):
        mover = moving.get(outer)
        if mover is None:
            continue
        within = batch.get(outer, ())
        if not isinstance(mover, Monomial) or any(space not in over[:dim] for space in within):
            raise ValueError(f"space '{outer}' has '{key}' inside it and can only be permuted")
        places = tuple(over.index(space) for space in within)
        element = element.map(partial(act_on, element=Monomial(mover.index), batch=places, dim=dim, dual=False))
    return element
