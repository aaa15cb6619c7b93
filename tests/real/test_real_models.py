# SPDX-License-Identifier: Apache-2.0
"""The promises of matching and merging, kept on models that people trained."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

import onebasin
from onebasin.matching.moments import cross_moments
from onebasin.models import read_pair, shared_roles, write_model
from onebasin.symmetry import Alignment, acting_groups
from onebasin.symmetry.groups import Orthogonal, ScaledOrthogonal

pytestmark = pytest.mark.real

Real = Callable[[str], Path]
ONE_BASE = [("rxn-ft", "rxn-pretrained"), ("rxn-classes", "rxn-pretrained"), ("rxn-classes", "rxn-ft")]
INDEPENDENT = ("albert-1024", "albert-512")
POSITIONS = "albert.embeddings.position_embeddings.weight"


def matched(source: Path, anchor: Path, out: Path, **options: object) -> dict[str, object]:
    """Match, and check what holds for every pair: same function, never further away, a falling objective."""
    result = onebasin.match(source, anchor, out, **options)
    verdict = onebasin.verify(source, out)
    assert verdict.same and verdict.outputs, verdict
    objective = result["objective"]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(objective))
    target = result.get("anchor_output", anchor)
    assert onebasin.distance(out, target).distance == pytest.approx(result["distance_after"], rel=1e-4)
    return result


@pytest.mark.parametrize(("source", "anchor"), ONE_BASE)
def test_fine_tunes_of_one_base_are_exact_and_come_closer(source: str, anchor: str, real: Real, tmp_path: Path) -> None:
    result = matched(real(source), real(anchor), tmp_path / "out")
    assert result["distance_before"] == pytest.approx(onebasin.distance(real(source), real(anchor)).distance)
    assert result["distance_after"] < result["distance_before"]


@pytest.mark.parametrize("level", ["permutation", "full"])
def test_all_symmetries_keep_fine_tunes_exact(level: str, real: Real, tmp_path: Path) -> None:
    result = matched(real("rxn-ft"), real("rxn-pretrained"), tmp_path / "out", symmetry=level)
    assert result["distance_after"] <= result["distance_before"]


@pytest.mark.parametrize("level", ["paper", "permutation", "full"])
def test_independent_models_are_exact_and_come_closer(level: str, real: Real, tmp_path: Path) -> None:
    source, anchor = map(real, INDEPENDENT)
    result = matched(source, anchor, tmp_path / "out", symmetry=level)
    assert result["distance_after"] < result["distance_before"]
    positions = load_file(tmp_path / "out" / "model.safetensors")[POSITIONS]
    assert len(positions) == 1024  # the source keeps its own size


@pytest.mark.parametrize("anchor", [0, 1])
def test_a_merge_has_the_size_of_its_anchor(anchor: int, real: Real, tmp_path: Path) -> None:
    models = [real(name) for name in INDEPENDENT]
    onebasin.merge(models, tmp_path / "out", match="paper", anchor=anchor, verdict=False)
    stored = [load_file(model / "model.safetensors")[POSITIONS] for model in models]
    merged = load_file(tmp_path / "out" / "model.safetensors")[POSITIONS]
    # `paper` moves no embedding: the shared rows are plain averages, the others the anchor's own.
    torch.testing.assert_close(merged[:512], (stored[0][:512] + stored[1][:512]) / 2)
    assert torch.equal(merged[512:], stored[anchor][512:])
    loads_with_positions(tmp_path / "out", (1024, 512)[anchor])


@pytest.mark.parametrize("anchor", [0, 1])
def test_a_merge_over_all_symmetries_has_the_size_of_its_anchor(anchor: int, real: Real, tmp_path: Path) -> None:
    models = [real(name) for name in INDEPENDENT]
    onebasin.merge(models, tmp_path / "out", match="full", anchor=anchor, verdict=anchor == 0)
    loads_with_positions(tmp_path / "out", (1024, 512)[anchor])


def loads_with_positions(folder: Path, number: int) -> None:
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert model.config.max_position_embeddings == number
    with torch.no_grad():  # a sequence of all positions that the model says it has
        assert model((torch.arange(number) % 1000)[None]).logits.isfinite().all()


@pytest.mark.parametrize("level", ["paper", "permutation"])
def test_a_scrambled_model_is_recovered(level: str, real: Real, tmp_path: Path) -> None:
    """Random rotations, scales and permutations of every head and every neuron, found again."""
    model = onebasin.Folder(real("minilm"))
    signature = model.signature
    generator = torch.Generator().manual_seed(0)
    elements, batch = {}, {}
    for root, group in acting_groups(signature, level, rescale="joint").items():
        space = signature.spaces[root]
        heads = tuple(signature.spaces[outer].size for outer in space.batch)
        elements[root], batch[root] = group.random(space.size, heads, generator), space.batch
    scramble = Alignment(elements, batch)
    write_model(
        tmp_path / "scrambled",
        ((entry.name, scramble.apply(signature, role, model.read(role, torch.float64)))
         for role, entry in signature.tensors.items()),
        model,
    )  # fmt: skip
    assert onebasin.verify(model.folder, tmp_path / "scrambled").same
    assert onebasin.distance(tmp_path / "scrambled", model.folder).relative > 0.1
    matched(tmp_path / "scrambled", model.folder, tmp_path / "out", symmetry=level, rescale="joint")
    assert onebasin.distance(tmp_path / "out", model.folder).relative < 1e-5


@pytest.mark.parametrize(("source", "anchor"), [*ONE_BASE, INDEPENDENT])
def test_joint_rescaling_beats_rescaling_after_beats_none_on_every_head(source: str, anchor: str, real: Real) -> None:
    mine, theirs = onebasin.Folder(real(source)), onebasin.Folder(real(anchor))
    signature, shared = mine.signature, set(shared_roles(mine, theirs).roles)
    heads = 0
    for root in acting_groups(signature, "paper", parts=["attention"]):
        pairs = [(role, *read_pair(theirs, mine, role, torch.float64), 1.0)
                 for role in signature.touching[root] if role in shared]  # fmt: skip
        moments = cross_moments(signature, root, pairs)
        none, after, joint = (
            moments.value(group.nearest(moments))  # (heads,), less a constant
            for group in (Orthogonal(), ScaledOrthogonal(joint=False), ScaledOrthogonal(joint=True))
        )
        rounding = 1e-10 * (moments.primal_norm + moments.dual_norm).sum(-1)
        assert (after <= none + rounding).all() and (joint <= after + rounding).all()
        assert (joint < none).all()  # no two trained heads agree in scale
        heads += len(joint)
    shared_by_layers = mine.config.get("num_hidden_groups")
    assert heads == 2 * mine.config["num_attention_heads"] * (shared_by_layers or mine.config["num_hidden_layers"])


def test_models_with_and_without_a_head_have_no_output_to_compare(real: Real) -> None:
    with pytest.raises(onebasin.ModelError, match="output"):
        onebasin.verify(real("rxn-pretrained"), real("rxn-ft"))


def test_fine_tuning_changes_the_function(real: Real, tmp_path: Path) -> None:
    """The base's encoder in a fine-tune's place: near in weights, and told apart."""
    base, tuned = onebasin.Folder(real("rxn-pretrained")), onebasin.Folder(real("rxn-ft"))
    write_model(
        tmp_path / "base",
        ((entry.name, base.read(role)) for role, entry in tuned.signature.tensors.items()),
        tuned,
    )
    assert onebasin.verify(tmp_path / "base", tmp_path / "base").max_difference == 0
    verdict = onebasin.verify(tmp_path / "base", real("rxn-ft"))
    assert not verdict.same and "last_hidden_state" in verdict.outputs
    assert 0 < onebasin.distance(tmp_path / "base", real("rxn-ft")).relative < 0.3
