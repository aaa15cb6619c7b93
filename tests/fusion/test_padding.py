# SPDX-License-Identifier: Apache-2.0
"""What is measured on sequences does not depend on how far they are padded, not even where the padded length is as
large as another dimension: a classifier's outputs, (batch, n), look like a mask then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pairs import opened
from torch import Tensor
from zoo import VOCAB

from onebasin.engine import Means
from onebasin.fusion.couplings import OptimalTransport, transport
from onebasin.fusion.method import Sources
from onebasin.fusion.progressive import ProgressiveMerge, merge_progressively
from onebasin.fusion.regmean import input_grams
from onebasin.models import Folder
from onebasin.running.loaded import loaded_model
from onebasin.symmetry.groups.elements import Monomial

LENGTHS = (2, 3)  # of the sequences


def padded(length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(12):
        ids = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
        mask = torch.tensor([[int(i < own) for i in range(length)] for own in LENGTHS])
        ids = torch.nn.functional.pad(ids, (0, length - max(LENGTHS)))
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


@pytest.fixture
def models(tmp_path: Path) -> list[Folder]:
    """Classifiers of width 12 with 3 labels."""
    return opened(tmp_path, "BertForSequenceClassification")


@pytest.mark.parametrize("length", [3, 12])  # as many as labels, as many as dimensions
def test_measures_do_not_see_padding(models: list[Folder], length: int) -> None:
    plain, other = padded(7), padded(length)
    stock = loaded_model(models[0], dtype=torch.float64)
    grams, same = input_grams(stock, plain)[0], input_grams(stock, other)[0]
    assert grams.keys() == same.keys()
    for role, found in grams.items():
        assert torch.allclose(found, same[role]), role

    how = {"how": ProgressiveMerge(ridge=0.1), "means": Means(precision="float64")}
    fits = [merge_progressively(Sources(models, [0.5, 0.5]), some, **how).tensors for some in (plain, other)]
    for role, tensor in fits[0].items():
        assert torch.allclose(tensor, fits[1][role]), role

    plans = [
        transport(*models, OptimalTransport(ground="acts"), batches, Means(precision="float64"))
        for batches in (plain, other)
    ]
    for root, act in plans[0].maps.items():
        assert isinstance(act, Monomial) and torch.equal(act.index, plans[1].maps[root].index), root
