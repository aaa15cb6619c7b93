# SPDX-License-Identifier: Apache-2.0
"""Do two model folders compute the same function? Asked of plain transformers, with no code of onebasin's.

Both run in float64 on the same random inputs. Rewriting rounds every weight once more, and transformers computes some
norms and rotary tables in float32 whatever the dtype, so how much two equal functions may differ follows from a
control: the source with noise of the size of one rounding of its stored weights. A wrong map differs by order 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from .cases import Finding
from .folders import BASES

UNIT = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Roundings that a rewritten weight may be off by: it is a sum of products with up to four matrices in a row, of which
# those of the level `invertible` multiply rounding by their condition, at most CONDITION. Measured: 3, and 106 there.
ROUNDINGS, CONDITION = 8, 1000
CONTROLS = 3


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a folder in float64, in the class that its config names. Raises where it does not load."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = getattr(config, "architectures", None) or [""]
    cls: Any = getattr(transformers, str(names[0]), None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):  # the class that these are the tensors of
        kinds = [getattr(transformers, kind) for kind, _ in BASES.values()]
        cls = next((kind for kind in kinds if kind.config_class is type(config)), AutoModel)
    how: dict[str, Any] = {"dtype": torch.float64, "output_loading_info": True, "local_files_only": True}
    model, info = cls.from_pretrained(folder, **how)
    if info["missing_keys"] and all("pooler" in key for key in info["missing_keys"]):
        model, info = cls.from_pretrained(folder, add_pooling_layer=False, **how)
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ValueError(f"{folder.name} lacks {', '.join(wrong[:3])}")
    model.double().eval()
    return model  # type: ignore[no-any-return]


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], typical: bool = False) -> float:
    """Return the largest difference over the outputs, relative to each output's largest number; typical: the median
    over its rows instead of the largest (a router sends a row elsewhere, or does not)."""
    assert ours and ours.keys() == theirs.keys(), (list(ours), list(theirs))
    largest = 0.0
    for name, x in ours.items():
        y = theirs[name]
        if x.shape != y.shape:
            return float("inf")
        apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
        scale = float(x[x.isfinite()].abs().max()) if bool(x.isfinite().any()) else 1.0
        rows = apart.flatten(2).amax(2).flatten() if x.dim() > 2 else apart.flatten()
        found = float(rows.median() if typical else rows.max())
        largest = max(largest, found / scale if scale else (float("inf") if found else 0.0))
    return largest


def outputs(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs, with zeros at padding: a padded query may have no key left to attend to, and then nothing
    is defined there (rows of attention that sum to zero, in a window that looks both ways)."""
    found = zoo.named_outputs(model, given)
    mask = given.get("attention_mask")
    if mask is None or getattr(model.config, "is_encoder_decoder", False):  # the mask is not of what is put out
        return found
    at = {name: mask.bool().reshape(*mask.shape, *[1] * (value.dim() - mask.dim())) for name, value in found.items()
          if value.shape[: mask.dim()] == mask.shape}  # fmt: skip
    return {name: value.where(at[name], 0.0) if name in at else value for name, value in found.items()}


@torch.no_grad()
def explained(model: PreTrainedModel, given: dict[str, Tensor], unit: float, typical: bool) -> float:
    """Return what one rounding of the weights changes: the largest of a few draws, each weight moved by up to `unit`
    times the larger of itself and its tensor's root mean square."""
    own = outputs(model, given)
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    found = 0.0
    for _ in range(CONTROLS):
        for name, parameter in model.named_parameters():
            noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
            size = torch.maximum(kept[name].abs(), kept[name].square().mean().sqrt()) if parameter.numel() else 0.0
            parameter.copy_(kept[name] + unit * size * noise)
        found = max(found, difference(own, outputs(model, given), typical))
    for name, parameter in model.named_parameters():
        parameter.copy_(kept[name])
    return found


def compare(source: Path, copy: Path) -> tuple[float, float]:
    """Return how much the copy differs from the source and how much one rounding to its dtypes does, both relative."""
    with one_by_one():
        return _compared(load(source), load(copy), unit(copy))


def refuse_difference(source: Path, copy: Path, told: Sequence[object]) -> float:
    """Return by how many roundings a copy differs that a command made. Raises Finding where they are too many."""
    found, explained = compare(source, copy)
    allowed = ROUNDINGS * (CONDITION if "invertible" in map(str, told) else 1)
    if found > allowed * explained:
        raise Finding(f"wrong function: {copy.name} differs by {found:.3g}, one rounding explains {explained:.3g}")
    return found / explained if explained else 0.0


def one_rounding(folder: Path) -> float:
    """Return what one rounding to float32 of a model's weights changes, relative to its outputs."""
    with one_by_one():
        model = load(folder)
        return explained(model, zoo.inputs(model), UNIT[torch.float32], routes(model))


def routes(model: PreTrainedModel) -> bool:
    """Return whether the model has a router, which sends a row elsewhere, or does not."""
    return any("router" in name or name.endswith("gate.weight") for name, _ in model.named_parameters())


def unit(folder: Path) -> float:
    """Return the unit roundoff of the coarsest floating-point dtype that a folder stores."""
    found = [UNIT[torch.float32]]
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            codes = {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        found += [UNIT[DTYPES[code]] for code in codes if code in DTYPES]
    return max(found)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Experts one after the other: their grouped product takes no float64 and no odd widths."""
    plain = ExpertsInterface.get_interface
    ExpertsInterface.get_interface = lambda self, name, default: default  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ExpertsInterface.get_interface = plain  # type: ignore[method-assign]


def _compared(ours: PreTrainedModel, theirs: PreTrainedModel, unit: float) -> tuple[float, float]:
    given = zoo.inputs(ours)
    routed = routes(ours)
    found = difference(outputs(ours, given), outputs(theirs, given), routed)
    return found, explained(ours, given, unit, routed)
