# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of jobs as types, for editors and type checkers. A test compares their names and types with the
settings' dataclasses, which explain them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from onebasin.settings import ExampleKeywords


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options`."""

    symmetry: str
    rescale: str
    parts: Collection[str] | None
    layers: list[int] | None
    match_with: Literal["weights", "activations", "learned"]
    even: bool
    seed: int
    starts: int
    tensor_weights: Mapping[str, float]
    relative: bool
    tolerance: float
    max_sweeps: int
    start: Literal["weights", "activations", "none"]
    steps: int
    lr: float
    patience: int | None
    loss: Literal["divergence", "logits", "task"]
    lambda_range: list[float]
    concentration: float
    permutations: Literal["fixed", "straight-through", "sinkhorn"]
    seconds: float | None
    mixed: bool
    checkpoint: str | None
    columns: Mapping[str, str] | None
    context: int | None
    vocabulary: str | Mapping[str, int] | None
    mask_id: int | None
    mask_share: float
    maskable: list[int] | None
    data: str | Path | Sequence[str | Path] | None
    samples: int
    task: str | None
    noise: float
    precision: Literal["float32", "float64"]
    device: str
    workers: int | None
    ray: str | None
    resume: bool
    family: str | None


class MatchKeywords(OptionKeywords, total=False):
    """Those of `match`, which takes the level of symmetry by other names, too."""

    match: str
    level: str


class LevelKeywords(TypedDict, total=False):
    """The names of the level of symmetry."""

    match: str | None
    symmetry: str | None
    level: str | None


class BarrierKeywords(ExampleKeywords, LevelKeywords, total=False):
    """Those of `barrier`."""


class OutputKeywords(TypedDict, total=False):
    """The fields of `OutputSettings`."""

    shard_size: int | str
    copy_tokenizer: bool
    write_model_card: bool


class MergeKeywords(OptionKeywords, OutputKeywords, total=False):
    """Those of `merge`: also the settings of all methods."""

    level: str
    ground: Literal["wts", "acts"]
    entropy: float
    residual: Literal["one", "average", "weighted"]
    statistics: Sequence[str | Path] | None
    labels: Literal["sampled", "given"]
    draws: int
    eps: float
    normalize: bool
    shrink: float
    spread: bool
    select: bool
    bags: int


class RefineKeywords(OptionKeywords, total=False):
    """Those of `refine`: also the fields of `Refining`."""

    batch: int
    weights: list[float] | None


class StatisticsKeywords(OptionKeywords, total=False):
    """Those of `statistics`: also what is measured of the Fisher information."""

    labels: Literal["sampled", "given"]
    draws: int


class LayersKeywords(MergeKeywords, total=False):
    """Those of `merge_best_layers`: also the arguments of `merge` that it does not have itself."""

    method: str | None
    weights: Sequence[float] | None
    match: str | None
    anchor: int | str
    heads_from: int | None
    soft: float | None
    tokenizer_source: str | None
    dtype: str | None
    overwrite: bool
    verify: bool | str
    verdict: bool
    require: float | None
    report: bool
    tell: Callable[[str], None] | None
    command: str | None
