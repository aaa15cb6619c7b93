# SPDX-License-Identifier: Apache-2.0
"""The inputs of experts: a matrix sees only the tokens that the router sends to its expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from onebasin.running.loaded import LoadedModel

Look = Callable[[str, int, Tensor], None]


class expert_inputs(TorchFunctionMode):
    """Call `look(role, expert, rows)` with the inputs of every expert matrix that is multiplied in the block.

    A product is recognised by the memory of its matrix, which may hold several roles (gate and up projection).
    """

    def __init__(self, stock: LoadedModel, look: Look) -> None:
        super().__init__()
        self.look = look
        self.held: dict[int, list[tuple[int, str, int]]] = {}
        for role, parts in stock.parts.items():
            for expert, part in enumerate(parts):
                place = part.of(stock.model)
                within = self.held.setdefault(place.untyped_storage().data_ptr(), [])
                within.append((int(place.storage_offset()), role, expert))

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear and self.held:
            rows, weight = args[:2]
            first = weight.storage_offset()
            for place, role, expert in self.held.get(weight.untyped_storage().data_ptr(), []):
                if first <= place < first + weight.numel():
                    self.look(role, expert, rows.detach().reshape(-1, rows.shape[-1]))
        return func(*args, **(kwargs or {}))


class ExpertGrams:
    """Sums of x x^T over the inputs of each expert: role -> (experts, n, n) float64."""

    def __init__(self, stock: LoadedModel) -> None:
        self.counts = {role: len(parts) for role, parts in stock.parts.items()}
        self.sums: dict[str, Tensor] = {}

    def add(self, role: str, expert: int, rows: Tensor) -> None:
        n = rows.shape[-1]
        if role not in self.sums:
            self.sums[role] = rows.new_zeros((self.counts[role], n, n), dtype=torch.float64)
        self.sums[role][expert] += (rows.mT @ rows).double()
