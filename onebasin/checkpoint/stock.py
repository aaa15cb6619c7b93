# SPDX-License-Identifier: Apache-2.0
"""A stock `transformers` model that holds a checkpoint's tensors, and the way from each tensor to its module.

A tensor's name in memory may differ from its name on disk, by rules that change with every release. They are not
repeated here but observed: the class loads tensors that hold their own numbers, and where a number ends up is where
that tensor goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from onebasin.symmetry import Alignment, Signature

from .reader import Checkpoint, CheckpointError, one_line
from .verification import _class, _quietly

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Stock:
    """A model in eval mode. owner: role -> name of the module that holds it. parameter: role -> the tensor itself.

    A role whose tensor the class stores in another shape (experts stacked into one, say) is in neither.
    """

    model: PreTrainedModel
    signature: Signature
    owner: Mapping[str, str]
    parameter: Mapping[str, nn.Parameter]

    def module(self, role: str) -> nn.Module:
        return self.model.get_submodule(self.owner[role])

    def shared(self, role: str) -> bool:
        """Whether several modules hold this parameter (tied embeddings)."""
        mine = self.parameter[role]
        return sum(p is mine for module in self.model.modules() for p in module._parameters.values()) > 1

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Take every tensor from `read(role)`."""
        for role, parameter in self.parameter.items():
            parameter.copy_(read(role))


def stock_model(
    checkpoint: Checkpoint,
    alignment: Alignment | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str | None = None,
) -> Stock:
    """The checkpoint, rewritten by `alignment`, as a model of the class that its config names. Nothing is written.

    attention: the implementation (`eager` gives attention maps). Raises CheckpointError where the class does not
    take the tensors as they are.
    """
    signature = checkpoint.signature
    entries = {role: entry for role, entry in signature.tensors.items() if entry.stored}
    numbers = {role: float(number) for number, role in enumerate(entries, 1)}
    marked = {
        name: part.contiguous()
        for role, entry in entries.items()
        for name, part in entry.split(torch.full(entry.shape, numbers[role]))
    }
    assert checkpoint.config  # refuses a damaged config.json in one sentence
    try:
        model = _load(checkpoint, marked, attention)
    except Exception as error:  # each model class fails in its own way
        raise CheckpointError(f"'{checkpoint.given}' does not load: {one_line(error)}") from None
    roles = {number: role for role, number in numbers.items()}
    owner: dict[str, str] = {}
    parameter: dict[str, nn.Parameter] = {}
    for name, tensor in model.named_parameters():
        role = roles.get(float(tensor.detach().flatten()[0]))
        if role is None or not bool((tensor == numbers[role]).all()) or tuple(tensor.shape) != entries[role].shape:
            raise CheckpointError(f"'{checkpoint.given}': {type(model).__name__} keeps '{name}' in another form than "
                                  "the folder, so its activations cannot be followed")  # fmt: skip
        owner[role], parameter[role] = name.rpartition(".")[0], tensor
    module: nn.Module = model
    module.to(device=device, dtype=dtype).train(False)
    for tensor in model.parameters():
        tensor.requires_grad_(False)
    stock = Stock(model, signature, owner, parameter)
    moved = alignment or Alignment()
    stock.fill(lambda role: moved.apply(signature, role, checkpoint.read(role, dtype, device)))
    return stock


def _load(checkpoint: Checkpoint, state: dict[str, Tensor], attention: str | None) -> PreTrainedModel:
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    with _quietly():
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        for key, value in checkpoint.config_updates.items():
            setattr(config, key, value)
        cls = _class(config)
        build: dict[str, Any] = {"config": config, "state_dict": state, "output_loading_info": True, **options}
        model, info = cls.from_pretrained(None, **build)
        if info["missing_keys"] and all("pooler." in name for name in info["missing_keys"]):
            model, info = cls.from_pretrained(None, **build, add_pooling_layer=False)
    found: PreTrainedModel = model
    return found
