# SPDX-License-Identifier: Apache-2.0
"""The options of jobs: models, settings, weights, dtypes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from safetensors.torch import save_file

from onebasin.data.calibration import Calibration
from onebasin.engine import Means
from onebasin.engine import Tell as Tell
from onebasin.matching.learned import Learning
from onebasin.matching.weights import Weights
from onebasin.models import DTYPES, Folder
from onebasin.settings import Factor, Indices, Settings, Weight, checked, refuse_choice, setting
from onebasin.symmetry import PARTS, RESCALE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StateDict:
    """A model in memory, with the config that its table reads.

    Attributes:
        tensors: The tensors, by their names in the table.
        config: The contents of config.json; its `model_type` chooses the table unless one is named.
        table: A family, or the file of a table.
        name: The name of the model in messages and cards.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    table: str | None = None
    name: str = "state dict"

    def write(self, folder: Path) -> None:
        """Write the folder that stands for it: config.json and model.safetensors."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(self.config)), "utf-8")
        owned = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(owned, folder / "model.safetensors", {"format": "pt"})


ModelSource: TypeAlias = "str | Path | PreTrainedModel | Folder | StateDict"

STREAM_LEVELS = ("orthogonal", "full", "invertible")


@dataclass(frozen=True)
class Matching(Settings):
    """The spaces to match, and the criterion: weights, activations on calibration data, or the loss of the average of
    both models on that data, which is learned from a start. The levels are in `onebasin.symmetry.levels`."""

    section: ClassVar[str] = "Matching"

    symmetry: str = setting("paper", "The group that acts, from small to large: paper, permutation, orthogonal, full, "
                            "invertible.")  # fmt: skip
    rescale: str = setting("joint", "Scale every head too: none, after its rotation, or joint with it (best).",
                           choices=RESCALE)  # fmt: skip
    parts: Collection[str] | None = setting(None, "Move only these parts, of attention,ffn,stream,head [default: all].",
                                            choices=PARTS)  # fmt: skip
    layers: Indices | None = setting(None, "Move only these layers, such as 0-4,11 [default: all].")
    match_with: Literal["weights", "activations", "learned"] = setting(
        "weights", "What is compared: weights, activations on --data, or learned there."
    )
    even: bool = setting(False, "Make the weights of norms behind a sum even first, so that the streams of post-norm "
                         "models can rotate too. This changes the function a little.")  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(self.layers, str):
            raise ValueError(f"layers '{self.layers}': give numbers; onebasin.merge_best_layers chooses them")
        super().__post_init__()


@dataclass(frozen=True)
class Options(Means, Calibration, Learning, Weights, Matching):
    """All settings of matching, which jobs take as keyword arguments. The command line explains each of them.

    Attributes:
        family: The table that the models are read by, or its file (default: by model type).
    """

    family: str | None = setting(None, "Family or table file, for a model type that has none [default: by type].")

    @property
    def files(self) -> list[Path]:
        """Return the files and folders that are read besides the models."""
        return [*self.data_files, *([Path(self.family)] if self.family and os.path.exists(self.family) else [])]

    @property
    def measures(self) -> bool:
        """Whether matching measures the models on calibration data."""
        return self.match_with != "weights"

    def to_dict(self) -> dict[str, Any]:
        """Return all settings that results depend on, as values for JSON."""
        left_out = ("workers", "ray", "resume")
        return {name: value for name, value in super().to_dict().items() if name not in left_out}

    @property
    def labels(self) -> bool:
        """Whether the calibration data must hold labels."""
        return self.match_with == "learned" and self.loss == "task"


LEVEL_NAMES = ("match", "symmetry", "level")


def level_named(given: dict[str, Any], own: str) -> None:
    """Rename the level of symmetry among keyword arguments: `match`, `symmetry` and `level` are one argument.

    given: keyword arguments, changed in place. own: the name to give it.

    Raises:
        ValueError: where it is given under two names.
    """
    names = [name for name in LEVEL_NAMES if given.get(name) is not None]
    if len(names) > 1:
        raise ValueError(f"{names[0]} and {names[1]} are two names for one argument; leave one of them out")
    for name in names:
        given[own] = given.pop(name)


def take_level(given: dict[str, Any], default: str) -> str:
    """Remove the level of symmetry from keyword arguments, and return it. Raises ValueError as `level_named`."""
    level_named(given, "match")
    return str(given.pop("match", None) or default)


def refuse_even(opt: Matching, level: str) -> None:
    """Raise ValueError for even norms at a level that does not rotate streams."""
    if opt.even and level not in STREAM_LEVELS:
        raise ValueError(f"even norms let streams rotate, which --match {level} does not; choose from "
                         f"{', '.join(STREAM_LEVELS)}")  # fmt: skip


VERIFY = ("outputs", "tensors", "none")


def verification(given: bool | str) -> str:
    """Return how to verify: `outputs` (True) runs the models; `tensors` checks the maps that were found, and the table
    on a tiny twin of the model; `none` (False) checks nothing."""
    how = ("none", "outputs")[given] if isinstance(given, bool) else given
    refuse_choice("verify", how, VERIFY)
    return str(how)


def least_agreement(require: float | None, verdict: bool) -> float | None:
    """Return the agreement that a merge requires. Raises ValueError where it is no share, or where nothing measures
    it."""
    if require is not None and not verdict:
        raise ValueError("require is judged by the verdict; leave out require, or --no-verdict (verdict=False)")
    share: float | None = checked(Factor | None, "require", require)
    return share


def shares_of(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"{count} models need {count} weights, not {len(weights)}")
    shares: list[float] = checked(list[Weight], "weights", list(weights))
    if not any(shares):
        raise ValueError("the weights are all 0, which leaves nothing")
    return shares


def stored_dtype(name: str | None) -> torch.dtype | None:
    if name is not None:
        refuse_choice("dtype", name, DTYPES)
    return DTYPES[name] if name else None


def refuse_out_of_range(option: str, number: int | None, count: int) -> None:
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--{option} {number}: the {count} models count from 0 to {count - 1}")
