# SPDX-License-Identifier: Apache-2.0
"""A stock `transformers` model with the tensors of a checkpoint, and the mapping from tensors to modules.

A tensor's name in memory may differ from its name on disk, by rules that change with every release. They are not
repeated here but observed: every tensor is filled with its own number, the class loads these, and where a number ends
up is where that tensor goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onebasin.models import Model
from onebasin.models.errors import ModelError, one_line
from onebasin.symmetry import Entry, Signature

from .divided import Piece, divided, joined
from .expert_layout import Part, assembled, observed, one_by_one, one_by_one_where_needed
from .loading import built

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode. owner: role -> name of its module. parameter: role -> the tensor itself. parts: role -> the
    places of the tensors of all experts, in order, where the class stores them in another shape than the table; such a
    role is in neither of the others. pieces: role -> the parameters among which the class divides the tensor; it is in
    none of the others. buffer: role -> name in memory of a tensor that is not a parameter (running statistics, a
    router's corrections), and is neither learned nor fitted.
    """

    model: PreTrainedModel
    signature: Signature
    owner: Mapping[str, str]
    parameter: Mapping[str, nn.Parameter]
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    buffer: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> list[str]:
        """The roles of all tensors that the model has as parameters."""
        return [*self.parameter, *self.parts, *self.pieces]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return role -> tensor in its shape in the table, for all of `roles`."""
        return {role: self.tensor(role) for role in self.roles}

    def tensor(self, role: str) -> Tensor:
        """Return a tensor in its shape in the table."""
        if role in self.parameter:
            return self.parameter[role]
        if role in self.pieces:
            return joined(self.model, self.pieces[role])
        return self.signature.tensors[role].whole([part.of(self.model) for part in self.parts[role]])

    @cached_property
    def names(self) -> dict[str, str]:
        """Role -> name in memory, for every `parameter`."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {role: names[id(parameter)] for role, parameter in self.parameter.items()}

    def state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name in memory -> tensor, for a model with `tensors` (by role, all of `roles`) instead of its own."""
        return {name: tensors[role] for role, name in self.names.items()} | self.rearranged(tensors)

    def rearranged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name in memory -> tensor, for those that the class stacks from all `parts`, or cuts into `pieces`."""
        stacked = {
            part: one
            for role, parts in self.parts.items()
            for part, (_, one) in zip(parts, self.signature.tensors[role].split(tensors[role]), strict=True)
        }
        cut = {piece.parameter: piece.of(tensors[role]) for role, pieces in self.pieces.items() for piece in pieces}
        return assembled(stacked) | cut

    def module(self, role: str) -> nn.Module:
        return self.model.get_submodule(self.owner[role])

    def shared(self, role: str) -> bool:
        """Return whether several modules share this parameter (tied embeddings)."""
        mine = self.parameter[role]
        return sum(p is mine for module in self.model.modules() for p in module._parameters.values()) > 1

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Set every parameter to `read(role)`."""
        for role, parameter in self.parameter.items():
            parameter.copy_(read(role))
        for role, parts in self.parts.items():
            for part, (_, one) in zip(parts, self.signature.tensors[role].split(read(role)), strict=True):
                part.of(self.model).copy_(one)
        for role, pieces in self.pieces.items():
            whole = read(role)
            for piece in pieces:
                self.model.get_parameter(piece.parameter).copy_(piece.of(whole))

    def fill_buffers(self, read: Read) -> None:
        """Set every stored buffer to `read(role)`."""
        for role, name in self.buffer.items():
            self.model.get_buffer(name).copy_(read(role))


def loaded_model(
    checkpoint: Model,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str | None = None,
    experts: bool = True,
) -> LoadedModel:
    """Return a model as an object of the class that its config names. Nothing is written.

    Args:
        checkpoint: A folder or a view of one.
        dtype: Of the parameters.
        device: Where it runs.
        attention: The implementation (`eager` returns attention maps).
        experts: Accept classes that stack the tensors of experts, which run one expert after another, or that divide
            fused tensors; `parts` and `pieces` have the places of these.

    Raises:
        ModelError: The class changes the tensors when it loads them.
    """
    signature = checkpoint.signature
    entries = {role: entry for role, entry in signature.tensors.items() if entry.stored}
    stored = [(role, name) for role, entry in entries.items() for name in entry.names]
    numbers = {name: float(number) for number, (_, name) in enumerate(stored, 1)}
    marked = {
        name: torch.full_like(part, numbers[name]).contiguous()
        for entry in entries.values()
        for name, part in entry.split(torch.empty(entry.shape))
    }
    assert checkpoint.config  # raises ModelError for a damaged config.json
    try:
        model = _load(checkpoint, marked, attention)
    except Exception as error:  # each model class fails in its own way
        raise ModelError(f"'{checkpoint.name}' does not load: {one_line(error)}") from None
    roles = {float(number): role for number, (role, _) in enumerate(stored, 1)}
    owner: dict[str, str] = {}
    parameter: dict[str, nn.Parameter] = {}
    places: dict[float, Part] = {}
    filled = {name: tensor for name, tensor in model.named_parameters() if tensor.numel()}  # DINOv3 has no registers
    seen = {name: observed(name, tensor) for name, tensor in filled.items()}
    pieces = _pieces(checkpoint, marked, numbers, seen) if experts else {}
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # the class computes them (Marian's positions)
    cut = {piece.parameter for several in pieces.values() for piece in several}
    for name, tensor in filled.items():
        if name in cut:
            continue
        boxes = seen[name]
        known = boxes is not None and boxes.keys() <= roles.keys() - places.keys()
        if not known and name in unsaved:
            continue
        if boxes is None or not known or not (experts or _whole(tensor, boxes, roles, entries)):
            raise ModelError(f"'{checkpoint.name}': {type(model).__name__} keeps '{name}' in another form than "
                             "the folder, so its activations cannot be followed")  # fmt: skip
        if _whole(tensor, boxes, roles, entries):
            role = roles[next(iter(boxes))]
            owner[role], parameter[role] = name.rpartition(".")[0], tensor
        else:
            places |= boxes
    parts = {
        role: tuple(places[numbers[name]] for name in entry.names)
        for role, entry in entries.items()
        if any(numbers[name] in places for name in entry.names)
    }
    kept = model.state_dict().keys()
    buffer = {}
    for name, held in model.named_buffers():
        boxes = observed(name, held) if name in kept and held.is_floating_point() else None
        if boxes and boxes.keys() <= roles.keys() and _whole(held, boxes, roles, entries):
            buffer[roles[next(iter(boxes))]] = name
    module: nn.Module = model
    module.to(device=device, dtype=dtype).train(False)
    if parts:
        one_by_one(model)
    else:
        one_by_one_where_needed(model)
    for tensor in model.parameters():
        tensor.requires_grad_(False)
    whole = {role: pieces[entry.name] for role, entry in entries.items() if entry.name in pieces}
    stock = LoadedModel(model, signature, owner, parameter, parts, whole, buffer)

    def read(role: str) -> Tensor:
        return checkpoint.read(role, dtype, device)

    stock.fill(read)
    stock.fill_buffers(read)
    return stock


def _pieces(
    checkpoint: Model,
    marked: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    seen: Mapping[str, Mapping[float, Part] | None],
) -> dict[str, tuple[Piece, ...]]:
    """Return tensor -> the parameters among which the class divides it, which have the same mark. seen: parameter ->
    its marks."""
    among: dict[float, list[str]] = {}
    for name, boxes in seen.items():
        for number in boxes or ():
            among.setdefault(number, []).append(name)
    several = {name: among[number] for name, number in numbers.items() if len(among.get(number, ())) > 1}
    return divided(lambda state: _load(checkpoint, state, None), marked, several)


def _whole(
    tensor: Tensor, boxes: Mapping[float, Part], roles: Mapping[float, str], entries: Mapping[str, Entry]
) -> bool:
    """Whether a parameter is a single tensor of the table, in the same shape."""
    entry = entries[roles[next(iter(boxes))]]
    return len(boxes) == 1 and len(entry.names) == 1 and tuple(tensor.shape) == entry.shape


def _load(checkpoint: Model, state: dict[str, Tensor], attention: str | None) -> PreTrainedModel:
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    # In float32, since large numbers would become equal in 16 bits.
    return built(checkpoint.origin, torch.float32, (state, checkpoint.raw_config), **options)[0]
