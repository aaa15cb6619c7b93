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

    Attributes:
        models: The aligned models.
        weights: One number per model.
        anchor: The model that the others are aligned to, counted from 0.
        template: The model from which the result takes its config and all that the models do not share, counted from 0.
    """

    models: Sequence[Model]
    weights: Sequence[float]
    anchor: int = 0
    template: int = 0

    @cached_property
    def shared(self) -> frozenset[str]:
        """Return the roles that all models have, which are merged."""
        return frozenset(common_roles(self.models).roles)

    @property
    def signature(self) -> Signature:
        """Return the signature of the result."""
        return self.models[self.template].signature

    def has(self, role: str) -> bool:
        """Return whether all models have a tensor of the result, or what it is tied to."""
        return role in self.shared or self.signature.tensors[role].alias in self.shared

    def read(self, role: str, means: Means) -> list[Tensor]:
        """Return a tensor of every model: the one under this name, or the one that the result's is tied to."""
        alias = str(self.signature.tensors[role].alias)
        names = (role if role in model.signature.tensors else alias for model in self.models)
        return [model.read(name, means.dtype, means.device) for model, name in zip(self.models, names, strict=True)]


@dataclass(frozen=True)
class Merged:
    """The result of a method.

    Attributes:
        tensors: (name on disk, tensor) of the whole result, made as they are read.
        facts: About the merge, for its result and onebasin.json; complete once all tensors have been read.
    """

    tensors: Iterable[tuple[str, Tensor]]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method(Settings):
    """A way to merge. Subclasses are frozen dataclasses whose fields, made with `settings.setting`, are their settings.

    Attributes:
        fitted: Whether it needs exact copies of the models, with one vocabulary.
        any_width: Whether it merges models of different widths without matching; it then implements `carry`.
    """

    section: ClassVar[str] = "Settings of methods"

    fitted: ClassVar[bool] = False
    any_width: ClassVar[bool] = False

    @property
    def needs_data(self) -> bool:
        """Whether it needs calibration data."""
        return False

    @property
    def files(self) -> list[Path]:
        """Return the files that it reads, which no output may replace."""
        return []

    def refuse(self, count: int) -> None:
        """Refuse, before any work, what cannot be merged.

        Args:
            count: The number of models.

        Raises:
            ValueError: The settings do not fit this number of models, or a file is missing.
        """
        for file in self.files:
            if not file.is_file():
                raise ValueError(f"there is no file '{file}'")

    @abstractmethod
    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        """Merge aligned models.

        Args:
            sources: the models.
            data: the calibration data, gathered on first use.
            means: the type and device of the arithmetic, and the number of workers.
            tell: called with a sentence at every step.

        Returns:
            The tensors of the result.

        Raises:
            ValueError: in one sentence, for models or data that it cannot merge.
        """

    def carry(self, models: Sequence[Model], anchor: int, data: Data, means: Means, tell: Tell | None) -> list[Model]:
        """Return the models in the widths of the anchor, to be averaged.

        Args:
            models: The models, of different widths.
            anchor: The model whose widths the others get, counted from 0.
            data: As in `merge`.
            means: As in `merge`.
            tell: As in `merge`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TensorMethod(Method):
    """A way to merge one tensor at a time, from nothing but the models' tensors of one role."""

    @abstractmethod
    def combine(self, tensors: list[Tensor], weights: Sequence[float], signature: Signature, entry: Entry) -> Tensor:
        """Return the merged tensor.

        Args:
            tensors: one per model, of equal shapes; they may be changed in place.
            weights: one number per model.
            signature: of the result.
            entry: of this tensor in the signature.
        """

    def merge(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> Merged:
        from .tensors import merged_tensors  # which knows Sources

        return Merged(merged_tensors(sources, self.combine, means))
