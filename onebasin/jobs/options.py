# SPDX-License-Identifier: Apache-2.0
"""What a job can be told: models, options, weights, dtypes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from safetensors.torch import save_file

from onebasin.data.teaching import LOSSES
from onebasin.engine import Tell as Tell
from onebasin.matching.latents import PERMUTATIONS
from onebasin.matching.weights import typical_size
from onebasin.models import DTYPES, Folder
from onebasin.settings import (
    Context,
    Count,
    Factor,
    Few,
    Index,
    Indices,
    Rate,
    Seed,
    Share,
    Strength,
    Weight,
    check_fields,
    checked,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StateDict:
    """A model as a dictionary: tensors by the names that its table knows, and the config that the table reads.

    config: as in config.json; `model_type` chooses the table unless one is named. table: a family, or the file of a
    table. name: what messages and cards call it.
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

MATCH_WITH = ("weights", "activations", "learned")
STARTS = ("weights", "activations", "none")  # of learning
STREAM_LEVELS = ("orthogonal", "full", "invertible")
READING = ("context", "vocabulary", "mask_id", "mask_share", "maskable", "columns")  # how `load_task` reads data


@dataclass(frozen=True)
class Options:
    """How to match: the levels are in `onebasin.symmetry.levels`, the descent in `onebasin.matching.match_weights`.

    relative: divide every tensor's squared distance by the root of the product of both norms.
    match_with: weights, the activations on calibration data, or learned: from `start` (weights, activations, or none:
    the models as they are, to compare the others with), `steps` steps of gradient descent at the learning rate `lr` on
    what the average of all predicts there. loss, of learning: `divergence` from the models' own predictions, distance
    from their `logits` (see `onebasin.data.teaching`), or the `task`'s own, which needs labels. permutations, patience:
    see `onebasin.matching.learned`. checkpoint: a file that learning is saved in, and continued from. data: those data,
    `self` (causal language models write them) or a file, or several of these; samples: how many sequences or images;
    noise: standard deviation of the noise on copies of images and sounds, see `onebasin.data.calibration.noisy`; task,
    context, vocabulary, mask_id, mask_share, maskable, columns: as in `onebasin.data.load_task`. workers: threads of
    weight matching (default: one per core), on which no result depends.
    ray: address of a Ray cluster that matches and writes instead, or `local`. resume: go on where a run with the same
    output was killed. units: the folder in which finished units of weight matching are kept; jobs that write a folder
    choose it.
    """

    symmetry: str = "paper"
    rescale: str = "joint"
    parts: Collection[str] | None = None
    layers: Indices | None = None
    precision: str = "float32"
    device: str = "cpu"
    family: str | None = None
    starts: Few = 1
    seed: Seed = 0
    tolerance: Factor = 1e-6
    max_sweeps: Count = 100
    tensor_weights: Mapping[str, Strength] = field(default_factory=dict)
    relative: bool = False
    match_with: str = "weights"
    start: str = "weights"
    steps: Count = 200
    lr: Rate = 8e-3
    patience: Count | None = None
    loss: str = "divergence"
    permutations: str = "fixed"
    checkpoint: str | None = None
    data: str | Sequence[str] | None = None
    task: str | None = None
    samples: Count = 256
    noise: Strength = 0.0
    context: Context | None = None
    vocabulary: str | None = None
    mask_id: Index | None = None
    mask_share: Share = 0.15
    maskable: Indices | None = None
    columns: Mapping[str, str] | None = None
    workers: Few | None = None
    ray: str | None = None
    resume: bool = False
    units: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision '{self.precision}': the mathematics runs in float32 or float64")
        if isinstance(self.layers, str):
            raise ValueError(f"layers '{self.layers}': give numbers; onebasin.merge_best_layers chooses them")
        check_fields(self)
        for option, given, known in (
            ("match-with", self.match_with, MATCH_WITH),
            ("start", self.start, STARTS),
            ("loss", self.loss, LOSSES),
            ("permutations", self.permutations, PERMUTATIONS),
        ):
            if given not in known:
                raise ValueError(f"{option} '{given}': choose one of {', '.join(known)}")
        refuse_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def files(self) -> list[Path]:
        """Files and folders that are read besides the models."""
        data = [self.data] if isinstance(self.data, str) else list(self.data or ())
        named = [name.rpartition("#")[0] or name for name in data] + [self.vocabulary, self.family]
        return [Path(name) for name in named if name and os.path.exists(name)]

    @property
    def measures(self) -> bool:
        """Whether matching looks at what the models do on calibration data."""
        return self.match_with != "weights"

    @property
    def told(self) -> dict[str, Any]:
        """All that results depend on."""
        left_out = ("workers", "ray", "resume", "units")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}

    @property
    def labels(self) -> bool:
        """Whether the calibration data must hold labels."""
        return self.match_with == "learned" and self.loss == "task"

    @property
    def descent(self) -> dict[str, Any]:
        """What `match_weights` and `match_universe` are told about the descent."""
        return {
            "weights": self.weight,
            "relative": self.relative,
            "tolerance": self.tolerance,
            "max_sweeps": self.max_sweeps,
            "starts": self.starts,
            "seed": self.seed,
        }

    def weigh(self, role: str, anchor: torch.Tensor, source: torch.Tensor) -> float:
        """A tensor's weight in the objective, of either kind."""
        return self.weight(role) / (typical_size(anchor, source) if self.relative else 1.0)

    def weight(self, role: str) -> float:
        """A tensor's weight in the objective: that of the first given name part that its role contains, else 1."""
        return next((weight for part, weight in self.tensor_weights.items() if part in role), 1.0)


@dataclass(frozen=True)
class Fusion:
    """What single methods of merging are told.

    statistics: one file of `onebasin statistics` for every model. labels, draws, eps, normalize: of `fisher`, see
    `onebasin.fusion.fisher`. shrink: of `regmean`. spread: of `progressive`, see `onebasin.fusion.progressive`. ground,
    entropy, residual: of `ot`, see `onebasin.fusion.couplings`.
    """

    statistics: Sequence[str | Path] | None = None
    labels: str = "sampled"
    draws: Few = 1
    eps: Share = 1e-6
    normalize: bool = False
    shrink: Factor = 0.9
    spread: bool = False
    ground: str = "wts"
    entropy: Strength = 0.0
    residual: str = "one"

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, method: str) -> dict[str, Any]:
        """The settings that a method looks at, as JSON takes them."""
        names = {
            "fisher": ("labels", "draws", "eps", "normalize"),
            "regmean": ("shrink",),
            "progressive": ("spread",),
            "ot": ("ground", "entropy", "residual"),
        }
        found = {name: getattr(self, name) for name in names.get(method, ())}
        files = None if self.statistics is None else [str(file) for file in self.statistics]
        return {**found, "statistics": files} if files and method in ("fisher", "regmean") else found


@dataclass(frozen=True)
class Written:
    """How the output looks. shard_size: of the weight files. copy_tokenizer: whether its files are copied.
    write_model_card: whether README.md is written. files: name -> text, written beside the weights."""

    shard_size: int | str = "5GB"
    copy_tokenizer: bool = True
    write_model_card: bool = True
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What `write_model` is told."""
        return {"shard_size": self.shard_size, "tokenizer": self.copy_tokenizer, "files": self.files}


T = TypeVar("T", Fusion, Written)


def taken(kind: type[T], options: dict[str, Any]) -> T:
    """A `kind` from keyword arguments, of which its fields are then removed."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})


VERIFY = ("outputs", "tensors", "none")


def verification(given: bool | str) -> str:
    """How to verify: `outputs` (True) runs the models, `tensors` checks the maps that were found, and the table on a
    tiny twin of the model, or `none` (False)."""
    how = ("none", "outputs")[given] if isinstance(given, bool) else given
    if how not in VERIFY:
        raise ValueError(f"verify '{how}': choose one of {', '.join(VERIFY)}")
    return str(how)


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
    if name is not None and name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}'; choose from {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def refuse_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).item()  # which `meta` has not
    except (AssertionError, ImportError, RuntimeError):  # torch raises any of these
        raise ValueError(f"the device '{name}' is not available here; choose another, such as cpu") from None


def refuse_out_of_range(option: str, number: int | None, count: int) -> None:
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--{option} {number}: the {count} models count from 0 to {count - 1}")
