# SPDX-License-Identifier: Apache-2.0
"""Transport plans against permutations and marginals; whole models against planted copies of other widths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from zoo import CASES, GPT2, ROTARY, TEXT, build, inputs, named_outputs, save

from onebasin.engine import Means
from onebasin.fusion.couplings import OptimalTransport, transport, units
from onebasin.fusion.transport import Transport, Transported, plan
from onebasin.models import Folder, Rewritten
from onebasin.running.loaded import loaded_model
from onebasin.symmetry import Alignment, acting_groups
from onebasin.symmetry.groups.coupling import Coupling
from onebasin.symmetry.groups.elements import Monomial

CASE = ["BertForMaskedLM", "GPT2LMHeadModel", "ViTForImageClassification", "LlamaForCausalLM"]

FLOAT64 = Means(precision="float64")


def planted(case: str, folder: Path, seed: int = 0) -> tuple[Folder, Folder, Alignment]:
    """A model, and the copy of it whose neurons, heads, head dimensions and stream were permuted."""
    anchor = Folder(save(CASES[case]().double(), folder / "anchor"))
    signature, generator = anchor.signature, torch.Generator().manual_seed(seed)
    roots = {root for unit in units(signature) for root in unit.roots}
    elements = {
        root: group.random(signature.spaces[root].size,
                           tuple(signature.sizes[outer] for outer in signature.spaces[root].batch), generator)
        for root, group in acting_groups(signature, "permutation").items() if root in roots
    }  # fmt: skip
    moved = Alignment(elements, {root: signature.spaces[root].batch for root in elements})
    loaded_model(Rewritten(anchor, moved, torch.float64), dtype=torch.float64).model.save_pretrained(folder / "source")
    return anchor, Folder(folder / "source"), moved


def functions(checkpoint: Folder, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return named_outputs(loaded_model(checkpoint, dtype=torch.float64).model, batch)


@pytest.mark.parametrize("ground", ["wts", "acts"])
@pytest.mark.parametrize("case", CASE)
def test_hard_transport_recovers_a_planted_permutation(case: str, ground: str, tmp_path: Path) -> None:
    anchor, source, _ = planted(case, tmp_path)
    batches = [inputs(CASES[case]().double(), seed) for seed in range(4)]
    found = transport(source, anchor, OptimalTransport(ground=ground), batches, FLOAT64)
    moved = Transported(source, found, anchor)
    for role in anchor.signature.tensors:
        assert torch.allclose(moved.read(role, torch.float64), anchor.read(role, torch.float64), atol=1e-9), role


@pytest.mark.parametrize("case", CASE)
def test_hard_transport_between_any_two_models_keeps_the_function(case: str, tmp_path: Path) -> None:
    """One plan for the stream, no entropy: permutations of everything, so the carried model is the source's copy."""
    anchor, source, _ = planted(case, tmp_path)
    torch.manual_seed(5)
    other = CASES[case]().double()
    for parameter in other.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    source = Folder(save(other, tmp_path / "other"))
    found = transport(source, anchor, means=FLOAT64)
    assert all(isinstance(one, Monomial) for one in found.maps.values())
    assert any(not one.is_identity() for one in found.maps.values())  # type: ignore[union-attr]
    batch = inputs(other, 7)
    ours = functions(Transported(source, found, anchor), batch)
    for name, value in functions(source, batch).items():
        assert torch.allclose(ours[name], value, atol=1e-9), name


def test_without_entropy_and_with_equal_masses_a_plan_is_the_best_permutation() -> None:
    """Against POT's own exact solver on the same problem, and against all 120 permutations."""
    import itertools

    import ot

    cost = torch.rand(5, 5).double()
    found = plan(cost)
    assert isinstance(found, Monomial)
    mass = torch.full((5,), 0.2).double()
    assert torch.allclose(5 * ot.emd(mass, mass, cost), found.dense().matrix)
    best = min(sum(float(cost[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(5)))
    assert sum(float(cost[i, j]) for i, j in enumerate(found.index)) == pytest.approx(best)


@pytest.mark.parametrize("shape", [(6, 6), (4, 6), (6, 3)])
def test_plans_have_their_marginals_and_tend_to_the_exact_one(shape: tuple[int, int]) -> None:
    cost = torch.rand(shape).double()
    values = []
    for entropy in (1.0, 0.3, 0.1, 0.0):
        found = plan(cost, entropy)
        if isinstance(found, Monomial):
            found = Coupling(found.dense().matrix)
        assert isinstance(found, Coupling)
        dual = found.matrix if found.dual is None else found.dual
        assert (found.matrix >= 0).all()
        assert torch.allclose(found.matrix.sum(1), torch.ones(shape[0]).double(), atol=1e-5)
        assert torch.allclose(dual.sum(0), torch.ones(shape[1]).double(), atol=1e-5)
        values.append(float((found.matrix * cost).sum() / shape[0]))
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1] + 1e-3 and values[2] == pytest.approx(values[3], abs=5e-2)


def test_a_plan_is_the_same_with_and_without_logarithms() -> None:
    """One cost that is far away from all others takes the way by logarithms; where it was, no mass goes anyway."""
    cost = torch.rand(8, 8).double()
    cost[0, 7] = 40.0
    entropy = 0.1 / float(cost.std(correction=0))  # the same weight with either way
    found = plan(cost, entropy)
    cost[0, 7] = 20.0
    by_products = plan(cost, 0.1 / float(cost.std(correction=0)))
    assert isinstance(found, Coupling) and isinstance(by_products, Coupling)
    assert torch.allclose(found.matrix, by_products.matrix, atol=1e-9)
    assert found.matrix[0, 7] < 1e-80


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_model_whose_neurons_were_all_doubled_is_carried_exactly(kind: str, tmp_path: Path) -> None:
    """Doubled neurons with halved effect are the same function; transport merges each pair, and splits them again."""
    config, width = (TEXT, "intermediate_size") if "Bert" in kind else (GPT2, "n_inner")
    narrow, wide = (build(kind, **{**config, width: size}).double() for size in (10, 20))
    state = narrow.state_dict()
    order = torch.randperm(20) % 10
    for name, tensor in wide.state_dict().items():
        mine = state[name]
        for dim in range(tensor.dim()):
            if mine.shape[dim] == 10 and tensor.shape[dim] == 20:
                mine = mine.index_select(dim, order)
                if "output.dense.weight" in name or "c_proj.weight" in name:
                    mine = mine / 2
        tensor.copy_(mine)
    models = [Folder(save(model, tmp_path / str(i))) for i, model in enumerate((narrow, wide))]
    batch = inputs(narrow, 3)
    for source, anchor in (models, reversed(models)):
        found = transport(source, anchor, means=FLOAT64)
        moved = Transported(source, found, anchor)
        assert moved.signature.sizes == anchor.signature.sizes
        for role in anchor.signature.tensors:
            assert torch.allclose(moved.read(role, torch.float64), anchor.read(role, torch.float64), atol=1e-9), role
        ours = functions(moved, batch)
        assert all(torch.allclose(ours[n], v, atol=1e-9) for n, v in functions(source, batch).items())


@pytest.mark.parametrize("residual", ["average", "weighted"])
@pytest.mark.parametrize("ground", ["wts", "acts"])
@pytest.mark.parametrize("case", CASE)
def test_plans_block_by_block(case: str, ground: str, residual: str, tmp_path: Path) -> None:
    """A model carried to itself stays; what reads the stream after a sum takes a mean of plans, whose rows sum to 1."""
    anchor, source, _ = planted(case, tmp_path)
    batches = [inputs(CASES[case]().double(), seed) for seed in range(4)]
    how = OptimalTransport(ground=ground, residual=residual), batches, FLOAT64
    same = Transported(anchor, transport(anchor, anchor, *how), anchor)
    for role in anchor.signature.tensors:
        assert torch.allclose(same.read(role, torch.float64), anchor.read(role, torch.float64), atol=1e-9), role
    found: Transport = transport(source, anchor, *how)
    own = [act for maps in found.own.values() for act in maps.values() if isinstance(act, Coupling)]
    assert own
    for act in own:
        assert torch.allclose(act.matrix.sum(-1), torch.ones(12).double())
    moved = Transported(source, found, anchor)
    for role in anchor.signature.tensors:  # the copy is planted: every plan is the same permutation, and so is a mean
        assert torch.allclose(moved.read(role, torch.float64), anchor.read(role, torch.float64), atol=1e-9), role


OTHERS = ["SwinModel", "Phi3ForCausalLM", "T5ForConditionalGeneration", "CLIPModel", "MixtralForCausalLM"]


@pytest.mark.parametrize("case", OTHERS)
def test_a_model_of_any_family_carried_to_itself_stays(case: str, tmp_path: Path) -> None:
    """Experts are carried by their weights alone: their activations cannot be followed."""
    model = CASES[case]()
    checkpoint = Folder(save(model, tmp_path))
    for ground in ("wts", "acts")[: 1 if "Mixtral" in case else 2]:
        found = transport(checkpoint, checkpoint, OptimalTransport(ground=ground), [inputs(model)])
        same = Transported(checkpoint, found, checkpoint)
        assert found.maps
        for role in checkpoint.signature.tensors:
            assert torch.equal(same.read(role), checkpoint.read(role)), role


def test_what_cannot_be_carried_is_told(tmp_path: Path) -> None:
    made = [
        Folder(save(build("BertForMaskedLM", **{**TEXT, **changes}), tmp_path / str(number)))
        for number, changes in enumerate(({}, {"vocab_size": 20}, {"num_hidden_layers": 1}))
    ]
    reasons = ("vocab' has 20 entries", "number of layers")
    for source, reason in zip(made[1:], reasons, strict=True):
        with pytest.raises(ValueError, match=reason):
            transport(source, made[0])
    with pytest.raises(ValueError, match="ground 'weights': choose from wts, acts"):
        OptimalTransport(ground="weights")
    with pytest.raises(ValueError, match="residual 'mean': choose from one, average"):
        OptimalTransport(residual="mean")
    with pytest.raises(ValueError, match="needs calibration data"):
        transport(made[0], made[0], OptimalTransport(ground="acts"))
    with pytest.raises(ValueError, match=r"entropy .*: it must"):
        plan(torch.rand(3, 3), -1)


@pytest.mark.parametrize("ground", ["wts", "acts"])
@pytest.mark.parametrize("case", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_heads_are_split_and_joined_exactly_where_they_are_copies(case: str, ground: str, tmp_path: Path) -> None:
    """A model of four heads, two and two of them alike with half the effect each, is one of two heads, and back."""
    some = dict(num_key_value_heads=2, num_attention_heads=2, head_dim=4) if "Llama" in case else dict(num_heads=2)
    more = {key: 4 if "heads" in key else value for key, value in some.items()}
    few, many = (build(case, **{**CONFIGS[case], **sizes}).double() for sizes in (some, more))
    state = {name: halves(name, tensor) for name, tensor in few.state_dict().items()}
    many.load_state_dict(state)
    models = [Folder(save(model, tmp_path / name)) for name, model in (("few", few), ("many", many))]
    batches = [inputs(few, seed) for seed in range(2)]
    for source, anchor in (models, models[::-1]):
        found = transport(source, anchor, OptimalTransport(ground=ground), batches, FLOAT64)
        moved = Transported(source, found, anchor)
        for role in anchor.signature.tensors:
            assert torch.allclose(moved.read(role, torch.float64), anchor.read(role, torch.float64), atol=1e-9), role


CONFIGS = {
    "LlamaForCausalLM": ROTARY,
    "T5ForConditionalGeneration": dict(
        vocab_size=23,
        d_model=12,
        d_kv=4,
        d_ff=10,
        num_layers=2,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
    ),
}


def halves(name: str, tensor: Tensor) -> Tensor:
    """A tensor of two heads for four, in which every head stands twice and is read by half."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", ".q.weight", ".k.weight", ".v.weight")):
        return tensor.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    if name.endswith(("o_proj.weight", "Attention.o.weight")):
        return (tensor.unflatten(1, (2, 4)).repeat_interleave(2, 1) / 2).flatten(1, 2)
    return tensor.repeat_interleave(2, 1) if "relative_attention_bias" in name else tensor
