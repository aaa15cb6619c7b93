# SPDX-License-Identifier: Apache-2.0
"""A way of merging: a dataclass of settings that turns aligned models into the tensors of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from onebasin.data.calibration import Data
from onebasin.engine import Means, Tell
from onebasin.models import Model, common_roles
from onebasin.settings import Settings
from onebasin.symmetry import Entry, Signature


@dataclass(frozen=True)
class Sources:
    """The models of a merge, all aligned to one of them.

    weights: one number per model. anchor: the model that the others are aligned to. template: the model that gives the
    result its config, and what the models do not share. Both count from 0.
    """

    models: Sequence[Model]
    weights: Sequence[float]
    anchor: int = 0
    template: int = 0

    @cached_property
    def shared(self) -> frozenset[str]:
        """The roles that all models hold, which are merged."""
        return frozenset(common_roles(self.models).roles)

    @property
    def signature(self) -> Signature:
        """That of the result."""
        return self.models[self.template].signature


@dataclass(frozen=True)
class Merged:
    """The result of a method.

    tensors: (name on disk, tensor) of the whole result, made as they are read. facts: what the result and onebasin.json
    say about the merge; complete when all tensors were read.
    """

    tensors: Iterable[tuple[str, Tensor]]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method(Settings):
    """A way to merge. A subclass is a frozen dataclass whose fields are its settings, made with `settings.setting`.

    fitted: whether it needs the models as exact copies, with one vocabulary. any_width: whether it merges models of
    different widths without matching; it then has `carry`.
    """

    section: ClassVar[str] = "Settings of methods"

    fitted: ClassVar[bool] = False
    any_width: ClassVar[bool] = False

    @property
    def needs_data(self) -> bool:
        """Whether it looks at calibration data."""
        return False

    @property
    def files(self) -> list[Path]:
        """The files that it reads, which no output may replace."""
        return []

    def refuse(self, count: int) -> None:
        """Raise ValueError, before any work, where settings do not fit this number of models, or files are missing."""
        for file in self.files:
            if not file.is_file():
                raise ValueError(f"there is no file '{file}'")

    @abstractmethod
    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        """Merge aligned models.

        Args:
            sources: the models.
            data: the calibration data, which are gathered when they are first asked for.
            means: the type and device of the arithmetic, the workers.
            tell: what is called with a sentence at every step, or None.

        Returns:
            The tensors of the result.

        Raises:
            ValueError: for models or data that it cannot merge, in one sentence.
        """

    def carry(self, models: Sequence[Model], anchor: int, data: Data, means: Means, tell: Tell | None) -> list[Model]:
        """Return the models in the widths of `models[anchor]`, to be averaged."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorMethod(Method):
    """A way to merge one tensor at a time, which knows nothing but the models' tensors of one role."""

    @abstractmethod
    def combine(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        """Return the merged tensor.

        Args:
            tensors: one per model, of equal shapes; they may be written to.
            weights: one number per model.
            signature: what is known of the result's spaces.
            entry: what is known of this tensor.
        """

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        from .tensors import merged_tensors  # which knows Sources

        return Merged(merged_tensors(sources, self.combine, means))
