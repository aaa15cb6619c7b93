# SPDX-License-Identifier: Apache-2.0
"""A small program of a user, for strict type checking against the installed package (`make package`). It is not run."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

import onebasin


def merge_two(a: PreTrainedModel, b: Path) -> PreTrainedModel:
    found = onebasin.merge([a, b], match="paper", weights=[0.5, 0.5], samples=64)
    print(found.verdict and found.verdict.sentence, found.alignments[0].apply_to(a), found["seconds"])
    model: PreTrainedModel = found.model
    return model


def move(tensors: dict[str, torch.Tensor]) -> float:
    state = onebasin.StateDict(tensors, {"model_type": "gpt2"}, table="gpt2")
    result = onebasin.match(state, "anchor", "out", symmetry="full")
    distance: float = result.distance_after
    return distance


def read(path: str) -> tuple[str, list[int]]:
    model = onebasin.Folder(path)
    signature: onebasin.Signature = model.signature
    return signature.family, signature.layers


print(onebasin.__version__, onebasin.METHODS, onebasin.merge_config("recipe.yml", "out", device="cpu")["method"])
