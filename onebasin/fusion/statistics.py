# SPDX-License-Identifier: Apache-2.0
"""Statistics of one model on data: saved, checked against the model, and moved by an alignment."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from onebasin.data.calibration import Data
from onebasin.engine import Means, Tell
from onebasin.models import Model, Rewritten
from onebasin.models.published import public_name
from onebasin.settings import setting
from onebasin.symmetry import Alignment, Entry, Signature
from onebasin.symmetry.alignment import load_whole, save_in_order
from onebasin.symmetry.groups.elements import Monomial
from onebasin.symmetry.tables.axes import Axis, Flat, Leaf, size

from . import name_of
from .method import Method, Sources

FORMAT = "onebasin-statistics-1"
LOOKED_AT = 1024  # leading entries of a tensor by which its model is recognised
TOLERANCE = 0.01  # what rounding to 16 bits may change in them


@dataclass(frozen=True)
class Statistics:
    """Statistics of one model on data, for that model or a rewritten copy of it.

    kind: `fisher`, role -> diagonal in the shape of the tensor; or `gram`, role of a linear layer's weight -> mean of x
    x^T over its inputs x, (n, n), or (experts, n, n) for experts. samples: number of examples. columns: the weights
    stored as (outputs, inputs). model: name of the model that was measured, for messages. marks: role -> numbers by
    which that model is recognised.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    samples: int
    columns: frozenset[str]
    model: str
    marks: Mapping[str, tuple[float, float]]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: one tensor per role. Raises OSError where that fails."""
        facts = {
            "samples": self.samples,
            "columns": sorted(self.columns),
            "model": self.model,
            "marks": {role: list(mark) for role, mark in self.marks.items()},
        }
        tensors = {role: tensor.cpu().contiguous() for role, tensor in self.tensors.items()}
        save_in_order(tensors, path, {"format": FORMAT, "kind": self.kind, "facts": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote. Raises ValueError, naming the file, where it is something else."""
        tensors, metadata = load_whole(path, "statistics", FORMAT)
        try:
            facts = json.loads(metadata["facts"])
            marks = {role: (float(x), float(y)) for role, (x, y) in facts["marks"].items()}
            return cls(metadata["kind"], tensors, facts["samples"], frozenset(facts["columns"]), facts["model"], marks)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise ValueError(f"'{path}' holds no statistics that can be read; measure them anew") from None

    def of(self, model: Model) -> Statistics:
        """Return these statistics. Raises ValueError, naming a tensor, if they were not measured on `model`."""
        mine = marks(model)
        for role, (norm, look) in self.marks.items():
            ours = mine.get(role, (float("nan"), 0.0))
            if not (abs(ours[0] - norm) <= TOLERANCE * norm and abs(ours[1] - look) <= TOLERANCE):
                raise ValueError(
                    f"the statistics of '{self.model}' were not measured on '{model.name}' as it is merged ('{role}' "
                    "differs); levels that move the residual stream need them measured with --canonical"
                )
        return self

    def moved(self, signature: Signature, alignment: Alignment) -> Statistics:
        """Return the statistics of the model that `alignment` makes of this one.

        Gram matrices move exactly: inputs x become g x, so G becomes g G g^T. A Fisher diagonal F of a weight that is
        multiplied by s becomes F / s^2. Raises ValueError for a Fisher diagonal and a rotation, whose result depends on
        entries off the diagonal, which were not measured.
        """
        if self.kind == "gram":
            moved = {role: self._gram(signature, role, gram, alignment) for role, gram in self.tensors.items()}
            return replace(self, tensors=moved)
        scaled = {}
        for root, element in alignment.elements.items():
            if isinstance(element, Monomial):
                scaled[root] = Monomial(element.index, None if element.scale is None else element.scale**-2)
            elif not element.is_identity():
                raise ValueError(
                    f"a saved Fisher diagonal does not survive the rotation of '{root}'; match with permutations only "
                    "(--match permutation), or leave --statistics out and give --data: the matched model is measured"
                )
        squares = Alignment(scaled, alignment.batch)
        return replace(self, tensors={r: squares.apply(signature, r, t) for r, t in self.tensors.items()})

    def _gram(self, signature: Signature, role: str, gram: Tensor, alignment: Alignment) -> Tensor:
        """Return g G g^T, one axis at a time: a space may be on both."""
        inputs = _activation(_inputs(signature.tensors[role], role in self.columns))
        axes: tuple[Axis, ...] = (inputs, Leaf(str(gram.shape[-1])))
        if signature.tensors[role].pieces:
            axes = (*_of_experts(signature, role, inputs), axes[1])
        entry = Entry(role, role, tuple(gram.shape), axes)
        alone = replace(signature, tensors={role: entry})
        half = alignment.apply(alone, role, gram)
        if gram.dim() == 3:  # experts were reordered, and will be again
            order = Entry(role, role, (len(gram),), axes[:1])
            places = alignment.apply(replace(signature, tensors={role: order}), role, torch.arange(len(gram)).double())
            half = half[places.long().argsort()]
        return alignment.apply(alone, role, half.mT.contiguous())


@dataclass(frozen=True)
class StatisticsMethod(Method):
    """A method that merges with statistics of each model."""

    fitted: ClassVar[bool] = True
    kind: ClassVar[str]

    statistics: Sequence[str | Path] | None = setting(
        None, "Files of onebasin statistics, one per model, instead of --data."
    )

    @property
    def needs_data(self) -> bool:
        return self.statistics is None

    @property
    def files(self) -> list[Path]:
        return [*map(Path, self.statistics or ())]

    def refuse(self, count: int) -> None:
        if self.statistics is not None and len(self.statistics) != count:
            raise ValueError(f"{count} models need {count} statistics files, not {len(self.statistics)}")
        super().refuse(count)

    @abstractmethod
    def measure(self, model: Model, data: Data, means: Means, tell: Tell | None) -> Statistics:
        """Return the statistics of a model. Raises ValueError for data that it cannot be measured on."""

    def given_labels(self) -> bool:
        """Return whether the data must hold labels."""
        return False

    def of_sources(self, sources: Sources, data: Data, means: Means, tell: Tell | None) -> list[Statistics]:
        """Return the statistics of all aligned models: from files, or measured on these models.

        Raises:
            ValueError: for statistics of another kind, and as `Statistics.of` and `Statistics.moved`.
        """
        models = sources.models
        if self.statistics is None:
            own = [data.of(model, i, len(models), self.given_labels()) for i, model in enumerate(models)]
            return [self.measure(model, mine, means, tell) for model, mine in zip(models, own, strict=True)]
        found = [Statistics.load(file) for file in self.statistics]
        for file, one in zip(self.statistics, found, strict=True):
            if one.kind != self.kind:
                raise ValueError(
                    f"'{file}' holds statistics of kind {one.kind}; {name_of(type(self))} needs {self.kind}"
                )
        moved = []
        for model, one in zip(models, found, strict=True):
            assert isinstance(model, Rewritten)
            moved.append(one.of(model.base).moved(model.signature, model.alignment))
        return moved


def measured(
    kind: str, tensors: Mapping[str, Tensor], samples: int, columns: Collection[str], model: Model
) -> Statistics:
    """Return tensors as `Statistics`, with the marks by which their model is recognised."""
    return Statistics(kind, tensors, samples, frozenset(columns), public_name(model.name), marks(model))


def marks(model: Model) -> dict[str, tuple[float, float]]:
    """Return role -> its norm, and a fixed combination of its leading entries, which depends on their order."""
    found = {}
    for role, entry in model.signature.tensors.items():
        if entry.alias is None:
            tensor = model.read(role).flatten()
            head = tensor[:LOOKED_AT].double()
            direction = torch.arange(1, len(head) + 1, dtype=torch.float64).sin()
            size = float(torch.linalg.vector_norm(head)) or 1.0
            found[role] = float(torch.linalg.vector_norm(tensor)), float(head @ direction) / size
    return found


def _inputs(entry: Entry, columns: bool) -> Axis:
    """Return the axis of a weight's inputs; those of a convolution, (channels, *kernel), are flattened into one."""
    rest = entry.axes[1:] if columns else entry.axes[:-1]
    return rest[0] if len(rest) == 1 else Flat(rest)


def _of_experts(signature: Signature, role: str, inputs: Axis) -> tuple[Axis, Axis]:
    """Return the axis of experts and the axis of an expert's inputs."""
    entry, length, count = signature.tensors[role], 1, 0
    joint = entry.axes[entry.joint]
    parts = joint.parts if isinstance(joint, Flat) else (joint,)
    while length < len(entry.pieces):
        length, count = length * size(parts[count], signature.sizes), count + 1
    experts = parts[0] if count == 1 else Flat(parts[:count])
    if entry.joint == 0:
        return experts, inputs
    assert isinstance(inputs, Flat)
    rest = inputs.parts[count:]
    return experts, rest[0] if len(rest) == 1 else Flat(rest)


def _activation(axis: Axis) -> Axis:
    """Return the axis of the activation that a weight reads: its spaces are dual if those of the weight are not."""
    if isinstance(axis, Leaf):
        return axis if axis.constant else Leaf(axis.space, not axis.dual)
    return type(axis)(tuple(_activation(part) for part in axis.parts))
