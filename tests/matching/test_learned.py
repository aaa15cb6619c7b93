# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elements import random_alignment
from pairs import opened
from stopped import stopped_and_continued
from torch import Tensor
from zoo import CASES, inputs, named_outputs

from onebasin.data.teaching import divergence, drawn_shares, forward_of
from onebasin.matching.latents import blend, zeros
from onebasin.matching.learned import Learned, Learning, Lessons, leaning, match_learned
from onebasin.models import Canonical
from onebasin.running.loaded import LoadedModel, loaded_model
from onebasin.symmetry import Alignment, Group, acting_groups
from onebasin.symmetry.coupling import Softened
from onebasin.symmetry.groups import (
    Factors,
    Invertible,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    Rotary,
    ScaledOrthogonal,
    ScaledPermutation,
    SignedPermutation,
)
from onebasin.symmetry.groups.elements import Linear, Monomial
from onebasin.symmetry.groups.group import as_moments

LATENT = [Orthogonal(), OrthogonalFixingOnes(), ScaledOrthogonal(), Invertible(), Rotary(), Rotary(True, "joint"),
          ScaledPermutation(), Factors()]  # fmt: skip
CASE = [
    ("GPT2LMHeadModel", "orthogonal"), ("GPT2LMHeadModel", "invertible"), ("BertForMaskedLM", "full"),
    ("BertForMaskedLM-relu", "full"), ("ViTForImageClassification", "invertible"), ("LlamaForCausalLM", "full"),
    ("GPTJForCausalLM", "orthogonal"), ("AlbertForMaskedLM", "invertible"), ("BertForQuestionAnswering", "full"),
    ("ViTModel-no-pooler", "paper"),
]  # fmt: skip


class Setting:
    """Some different models of one shape in canonical form, a random start for each, and batches."""

    def __init__(self, case: str, level: str, folder: Path, count: int = 2, dtype: torch.dtype = torch.float64) -> None:
        self.models: list[LoadedModel] = []
        for checkpoint in opened(folder, case, count, apart=0.1):
            form = checkpoint if level == "paper" else Canonical(checkpoint, torch.float64)
            self.models.append(loaded_model(form, dtype=dtype))
        model = CASES[case]().double()
        self.signature = self.models[0].signature
        self.groups: dict[str, Group] = acting_groups(self.signature, level, rescale="joint")
        self.starts = [random_alignment(self.signature, self.groups, seed) for seed in range(1, count)]
        self.batches = [
            {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs(model, seed).items()}
            for seed in range(6)
        ]
        self.tensors: list[dict[str, Tensor]] = [
            {role: parameter.detach().clone() for role, parameter in model.parameter.items()} for model in self.models
        ]
        self.forward = forward_of(self.models[0])

    def learn(self, progress: Any = None, held_out: Any = None, **options: Any) -> Learned:
        lessons = Lessons(self.forward, self.batches[:4], held_out or self.batches[4:])
        how = Learning(**{"steps": 6, **options})
        return match_learned(self.signature, self.tensors, self.starts, self.groups, lessons, how, progress)

    def aligned(self, alignments: list[Alignment]) -> list[dict[str, Tensor]]:
        pairs = zip(alignments, self.tensors[1:], strict=True)
        return [{role: g.apply(self.signature, role, t) for role, t in tensors.items()} for g, tensors in pairs]

    def loss(self, alignments: list[Alignment]) -> float:
        """Of the average as a stock model, on the held-out batches; written apart from the code under test."""
        sources, share = self.aligned(alignments), 1 / len(self.models)
        self.models[-1].fill(lambda role: share * sum((s[role] for s in sources), self.tensors[0][role].clone()))
        total = []
        for batch in self.batches[4:]:
            teachers = [self.forward(tensors, batch) for tensors in self.tensors]
            mine = named_outputs(self.models[-1].model, batch)
            total.append(divergence(mine, teachers, [share] * len(self.models), batch))
        return float(torch.stack(total).mean())


def same(a: Alignment, b: Alignment) -> bool:
    return set(a) == set(b) and all(
        torch.equal(getattr(a.elements[key], part), getattr(b.elements[key], part))
        for key in a for part in ("matrix", "index") if hasattr(a.elements[key], part)
    )  # fmt: skip


def numbers(setting: Setting, scale: float) -> list[dict[str, dict[str, Tensor]]]:
    """Random free numbers for every source."""
    generator = torch.Generator().manual_seed(3)
    like = next(iter(setting.tensors[0].values()))
    return [
        {root: {name: scale * torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in latent.items()}
         for root, latent in zeros(setting.signature, setting.groups, like).items()}
        for _ in setting.starts
    ]  # fmt: skip


@pytest.mark.parametrize("group", LATENT, ids=lambda group: group.name)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_zeros_are_the_identity_and_gradients_there_are_finite(group: Group, batch: tuple[int, ...]) -> None:
    def latents(scale: float) -> dict[str, Tensor]:
        n = {"OrthogonalFixingOnes": 5}.get(type(group).__name__, 6)
        shapes = {
            Orthogonal: {"turn": (n, n)}, OrthogonalFixingOnes: {"turn": (n, n)}, Invertible: {"shear": (n, n)},
            ScaledOrthogonal: {"turn": (n, n), "stretch": ()}, ScaledPermutation: {"stretch": (n,)},
            Factors: {"stretch": (n,)},
        }.get(type(group), {"phase": (3,)})  # fmt: skip
        if isinstance(group, Rotary) and group.rescale != "none":
            shapes["stretch"] = (3,)
        generator = torch.Generator().manual_seed(0)
        return {
            name: (scale * torch.randn((*batch, *shape), generator=generator, dtype=torch.float64)).requires_grad_()
            for name, shape in shapes.items()
        }

    x = torch.randn(*batch, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nothing = latents(0.0)
    for dual in (False, True):
        moved = group.element(nothing).act(x, dual)
        assert torch.allclose(moved, x, atol=1e-14)
        for gradient in torch.autograd.grad((moved * torch.arange(6.0).unsqueeze(1)).sum(), list(nothing.values())):
            assert gradient.isfinite().all()
    element = group.element(latents(0.5))
    back = element.act(x, True) * element.act(x, False)  # (g^-T x) . (g x) = |x|^2
    assert torch.allclose(back.sum(-2), x.square().sum(-2))
    if isinstance(group, Rotary) and isinstance(element, Linear):
        turn = Rotary(group.interleaved).element({"phase": torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)})
        assert isinstance(turn, Linear)
        assert torch.allclose(turn.matrix @ element.matrix, element.matrix @ turn.matrix)  # as RoPE's own turns do


@pytest.mark.parametrize(("case", "level"), CASE)
def test_gradients_agree_with_finite_differences(case: str, level: str, tmp_path: Path) -> None:
    setting = Setting(case, level, tmp_path, count=3)
    sources, batch, shares = setting.aligned(setting.starts), setting.batches[0], [0.3, 0.5, 0.2]
    teachers = [setting.forward(tensors, batch) for tensors in setting.tensors]
    at, direction = numbers(setting, 0.1), numbers(setting, 1.0)

    def loss(step: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        free, along = [], []
        latents: list[dict[str, dict[str, Tensor]]] = []
        for here, way in zip(at, direction, strict=True):
            latents.append({})
            for root, latent in here.items():
                latents[-1][root] = {k: (t + step * way[root][k]).requires_grad_() for k, t in latent.items()}
                free += latents[-1][root].values()
                along += way[root].values()
        elements = [{root: setting.groups[root].element(latent) for root, latent in all_of.items()}
                    for all_of in latents]  # fmt: skip
        merged = blend(setting.signature, setting.tensors[0], sources, elements, shares)
        return divergence(setting.forward(merged, batch), teachers, shares, batch), free, along

    value, free, along = loss(0.0)
    assert free
    gradients = torch.autograd.grad(value, free)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True))
    h = 1e-5
    measured = float((loss(h)[0] - loss(-h)[0]).detach()) / (2 * h)
    assert slope == pytest.approx(measured, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("case", "level"), CASE)
def test_the_start_is_where_it_starts(case: str, level: str, tmp_path: Path) -> None:
    setting = Setting(case, level, tmp_path, count=3)
    learned = setting.learn(lr=1e-30)
    assert learned.losses[0] == pytest.approx(setting.loss(setting.starts), rel=1e-9)
    for mine, given in zip(setting.aligned(learned.alignments), setting.aligned(setting.starts), strict=True):
        assert all(torch.allclose(mine[role], given[role], atol=1e-10) for role in given)


@pytest.mark.parametrize(("case", "level"), CASE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_comes_out_is_exact_and_no_worse(case: str, level: str, dtype: torch.dtype, tmp_path: Path) -> None:
    setting = Setting(case, level, tmp_path, dtype=dtype)
    learned = setting.learn(lr=0.02, steps=8)
    assert learned.losses[learned.step] == min(learned.losses.values())
    if dtype == torch.float64:
        assert learned.losses[learned.step] == pytest.approx(setting.loss(learned.alignments), rel=1e-9)
    exact = Setting(case, level, tmp_path)
    after = exact.aligned(learned.alignments)[0]
    for batch in exact.batches:
        ours, theirs = exact.forward(after, batch), exact.forward(exact.tensors[1], batch)
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-9) for name in theirs)


@pytest.mark.parametrize("level", ["orthogonal", "invertible"])
def test_a_planted_turn_is_undone(level: str, tmp_path: Path) -> None:
    """A copy of the anchor, turned a little: learning must bring the average back to the function of both."""
    setting = Setting("GPT2LMHeadModel", level, tmp_path)
    small = {
        root: setting.groups[root].element({name: 0.1 * t for name, t in latent.items()})
        for root, latent in numbers(setting, 1.0)[0].items()
    }
    turned = Alignment(small, {root: setting.signature.spaces[root].batch for root in small})
    setting.tensors[1] = {role: turned.apply(setting.signature, role, t) for role, t in setting.tensors[0].items()}
    setting.starts = [Alignment()]
    learned = setting.learn(steps=100, lr=0.01)
    assert learned.losses[0] > 1e-4
    assert learned.losses[learned.step] < 0.1 * learned.losses[0]


@pytest.mark.parametrize("stop", [3, 20])
def test_an_interrupted_run_ends_as_an_undisturbed_one(stop: int, tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path, count=3)
    whole = setting.learn(steps=20, checkpoint=str(tmp_path / "whole"))
    resumed, again = stopped_and_continued(
        lambda progress: setting.learn(steps=20, checkpoint=str(tmp_path / "run"), progress=progress), stop
    )
    assert again == 20 - (stop - 1)  # what was saved is not done twice
    assert resumed.losses == whole.losses and resumed.step == whole.step
    assert all(map(same, resumed.alignments, whole.alignments))
    finished = setting.learn(steps=20, checkpoint=str(tmp_path / "whole"))
    assert all(map(same, finished.alignments, whole.alignments))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["run", "whole"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    setting.learn(steps=4, checkpoint=str(tmp_path / "run"))
    for other in ({"steps": 5}, {"lambda_range": [0.0, 1.0]}):
        with pytest.raises(ValueError, match="belongs to another run"):
            setting.learn(**{"steps": 4, "checkpoint": str(tmp_path / "run"), **other})
    for role, tensor in setting.tensors[1].items():
        if setting.signature.tensors[role].norm is None:
            tensor += 0.01 * torch.randn_like(tensor)
    with pytest.raises(ValueError, match="belongs to another run"):
        setting.learn(steps=4, checkpoint=str(tmp_path / "run"))
    (tmp_path / "run").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="cannot be read"):
        setting.learn(steps=4, checkpoint=str(tmp_path / "run"))


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    first, second, other = (setting.learn(seed=seed) for seed in (1, 1, 2))
    assert first.losses == second.losses and first.losses != other.losses


def test_the_task_s_own_loss(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    for batch in setting.batches:
        batch["labels"] = batch["input_ids"]
    learned = setting.learn(loss="task", lr=0.02, steps=20)
    merged = setting.aligned(learned.alignments)[0]
    half = {role: (merged[role] + tensor) / 2 for role, tensor in setting.tensors[0].items()}
    losses = [float(setting.forward(half, batch)["loss"]) for batch in setting.batches[4:]]
    assert learned.losses[learned.step] == pytest.approx(sum(losses) / 2, rel=1e-9)
    with pytest.raises(ValueError, match="labels"):
        setting.learn(loss="task", held_out=[{"input_ids": setting.batches[0]["input_ids"]}])


def test_the_distance_of_logits(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    learned = setting.learn(loss="logits", lr=0.02, steps=20)
    merged = setting.aligned(learned.alignments)[0]
    half = {role: (merged[role] + tensor) / 2 for role, tensor in setting.tensors[0].items()}
    apart = []
    for batch in setting.batches[4:]:
        own, a, b = (setting.forward(tensors, batch)["logits"] for tensors in (half, *setting.tensors))
        apart.append((own - (a + b) / 2).var(-1, correction=0)[batch["attention_mask"].bool()].mean() / 2)
    assert learned.losses[learned.step] == pytest.approx(float(torch.stack(apart).mean()), rel=1e-9)
    assert learned.losses[learned.step] < learned.losses[0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.4, 0.6), (0.9, 1.0), (0.5, 0.5)])
def test_the_second_model_s_weight_is_drawn_from_the_range(
    low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, seen = Setting("GPT2LMHeadModel", "full", tmp_path), list[float]()

    def blended(*given: Any) -> dict[str, Tensor]:
        if torch.is_grad_enabled():  # a step, no look at held-out data
            seen.append(given[4][1])
        return blend(*given)

    monkeypatch.setattr("onebasin.matching.learned.blend", blended)
    setting.learn(lambda_range=[low, high], steps=20)
    assert len(seen) == 20 and low <= min(seen) <= max(seen) <= high
    assert low == high or max(seen) - min(seen) > (high - low) / 2


@pytest.mark.parametrize("concentration", [0.1, 1.0, 20.0])
def test_weights_of_three_models_vary_as_dirichlet_s_do(concentration: float) -> None:
    """The variance of each of k weights is (k - 1) / (k^2 (k c + 1))."""
    drawn = torch.tensor(drawn_shares(np.random.default_rng(0), 20_000, 3, [0.4, 0.6], concentration))
    assert drawn.sum(1) == pytest.approx(1)
    assert drawn.mean(0) == pytest.approx(1 / 3, abs=0.02)
    assert drawn.var(0) == pytest.approx(2 / 9 / (3 * concentration + 1), rel=0.05)


def test_a_small_concentration_learns_at_the_simplex_s_corners(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "orthogonal", tmp_path, count=3)
    wide, usual = (setting.learn(concentration=each, permutations="straight-through") for each in (0.001, 20.0))
    assert all(np.isfinite(list(wide.losses.values()))) and wide.losses != usual.losses
    assert leaning([1.0, 0.0, 0.0]) == leaning([0.4, 0.3, 0.3])


@pytest.mark.parametrize(
    ("given", "said"),
    [({"lambda_range": [0.6, 0.4]}, "lower end first"), ({"lambda_range": [0.5]}, "lambda-range"),
     ({"lambda_range": [0.4, 1.1]}, "lambda-range"), ({"concentration": 0}, "concentration")],
)  # fmt: skip
def test_ranges_that_are_none_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Learning(**given)


def test_patience_ends_a_run_early(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    steps: list[str] = []
    setting.learn(steps=200, lr=1e-30, patience=2, progress=lambda text, loss: steps.append(text))
    assert len(steps) <= 60  # rounding may look like progress once or twice


def test_every_state_of_the_numbers_is_projected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path, count=3)
    made: list[Group] = []

    for kind in {type(group) for group in setting.groups.values()}:

        def counted(group: Group, latent: dict[str, Tensor], settle: bool = False, own: Any = kind.element) -> Any:
            if not settle:
                made.append(group)
            return own(group, latent, settle)

        monkeypatch.setattr(kind, "element", counted)
    setting.learn(steps=5)  # a look after every step
    spaces = len(zeros(setting.signature, setting.groups, setting.tensors[0]["wte.weight"]))
    assert len(made) == (5 + 1) * 2 * spaces


@pytest.mark.parametrize(
    ("case", "level", "kind"),
    [
        ("GPT2LMHeadModel", "orthogonal", Permutation),
        ("BertForMaskedLM", "permutation", Permutation),
        ("OPTForCausalLM", "full", ScaledPermutation),
        ("BertForSequenceClassification", "full", SignedPermutation),
    ],
)
def test_permutations_learned_straight_through_are_exact(case: str, level: str, kind: type, tmp_path: Path) -> None:
    setting = Setting(case, level, tmp_path)
    like = next(iter(setting.tensors[0].values()))
    learned = setting.learn(permutations="straight-through", steps=20, lr=0.1)
    moved = [learned.alignments[0].elements[root] for root, group in setting.groups.items()
             if isinstance(group, kind)]  # fmt: skip
    free = zeros(setting.signature, setting.groups, like, "straight-through")
    assert all("order" in free[root] for root, group in setting.groups.items() if isinstance(group, kind))
    assert moved and all(isinstance(element, Monomial) for element in moved)
    assert learned.losses[learned.step] == pytest.approx(setting.loss(learned.alignments), rel=1e-6)
    after = setting.aligned(learned.alignments)[0]
    for batch in setting.batches:
        ours, theirs = setting.forward(after, batch), setting.forward(setting.tensors[1], batch)
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-9) for name in theirs)


@pytest.mark.parametrize("group", [Permutation(), SignedPermutation(), ScaledPermutation()], ids=lambda g: g.name)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dual", [False, True])
def test_an_order_acts_as_itself_and_learns_as_if_it_were_its_scores(
    group: Group, batch: tuple[int, ...], dual: bool
) -> None:
    """As diag(a) (P + Z - Z.detach()) does, with the dense matrix P."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    latent = {"order": drawn(6, 6).requires_grad_()}
    if isinstance(group, ScaledPermutation):
        latent["stretch"] = drawn(6).requires_grad_()
    x, weight = drawn(6, 4).requires_grad_(), drawn(6, 4)
    free = [x, *latent.values()]
    order = SignedPermutation() if isinstance(group, SignedPermutation) else Permutation()
    score = latent["order"]
    dense = order.nearest(as_moments(score.detach())).dense().matrix + score - score.detach()
    expected = dense @ x
    if "stretch" in latent:
        expected = expected * (-latent["stretch"] if dual else latent["stretch"]).exp().unsqueeze(-1)
    found = group.element(latent).act(x, dual)
    assert torch.allclose(found, expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad((each * weight).sum(), free) for each in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


NEURONS = [("OPTForCausalLM", "full", "decoder.layers.0.ffn"), ("GPT2LMHeadModel", "orthogonal", "h.0.ffn")]
ANY = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()


def planted(case: str, level: str, root: str, order: Tensor, folder: Path) -> Setting:
    """The anchor, and a copy of it with the neurons `root` in another order; only their order is free."""
    setting = Setting(case, level, folder)
    setting.groups = {root: setting.groups[root]}
    if case.startswith("OPT"):
        setting.tensors[0][root.replace("ffn", "fc1.bias")] += 1  # so that every neuron fires on some inputs
    moved = Alignment({root: Monomial(order)})
    setting.tensors[1] = {role: moved.apply(setting.signature, role, t) for role, t in setting.tensors[0].items()}
    setting.starts = [Alignment()]
    setting.batches = [inputs(setting.models[0].model, seed) for seed in range(40)]
    return setting


@pytest.mark.parametrize("cycle", [(3, 6, 8), (4, 7, 9, 1, 0)])
def test_a_planted_order_of_relu_neurons_is_recovered(cycle: tuple[int, ...], tmp_path: Path) -> None:
    """A copy of the anchor with some neurons of one layer in other places: the relaxed order must lead back."""
    order = torch.arange(10)
    order[list(cycle)] = torch.tensor(cycle).roll(1)
    case, level, root = NEURONS[0]
    setting = planted(case, level, root, order, tmp_path)
    lessons = Lessons(setting.forward, setting.batches[:36], setting.batches[36:])
    how = Learning(permutations="sinkhorn", steps=200, lr=0.3)
    learned = match_learned(setting.signature, setting.tensors, setting.starts, setting.groups, lessons, how)
    found = learned.couplings[0][root].matrix.argmax(-1)
    assert torch.equal(order[found], torch.arange(len(order)))
    assert learned.losses[learned.step] < 0.02 * learned.losses[0]


@pytest.mark.parametrize(("case", "level", "root"), NEURONS)
@pytest.mark.parametrize("order", [[1, 9, 2, 3, 0, 5, 6, 4, 8, 7], ANY])
def test_straight_through_leads_back_from_a_planted_order(
    case: str, level: str, root: str, order: list[int], tmp_path: Path
) -> None:
    setting = planted(case, level, root, torch.tensor(order), tmp_path)
    lessons = Lessons(setting.forward, setting.batches[:36], setting.batches[36:])
    how = Learning(permutations="straight-through", lr=0.03)
    learned = match_learned(setting.signature, setting.tensors, setting.starts, setting.groups, lessons, how)
    found = learned.alignments[0].elements[root]
    assert isinstance(found, Monomial)
    assert torch.equal(torch.tensor(order)[found.index], torch.arange(len(order)))
    assert learned.losses[learned.step] < 0.05 * learned.losses[0]


@pytest.mark.parametrize(("case", "level", "root"), NEURONS)
def test_putting_two_neurons_back_is_downhill_from_the_anchor_alone(
    case: str, level: str, root: str, tmp_path: Path
) -> None:
    """Halfway the average's two neurons are equal, and first-order gains of an exchange are zero."""
    swap = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7, 8, 9])
    setting = planted(case, level, root, swap, tmp_path)
    anchor, source = setting.tensors
    batch = setting.batches[0]
    answers = [setting.forward(tensors, batch) for tensors in setting.tensors]

    def gain(shares: list[float]) -> Tensor:
        free = zeros(setting.signature, setting.groups, source["lm_head.weight"], "straight-through")
        element = setting.groups[root].element(free[root])
        merged = blend(setting.signature, anchor, [source], [{root: element}], shares)
        loss = divergence(setting.forward(merged, batch), answers, shares, batch)
        (slope,) = torch.autograd.grad(loss, [free[root]["order"]])
        return (slope[swap] - slope).diagonal().sum() / slope.abs().max()

    assert abs(gain([0.5, 0.5])) < 1e-9
    assert gain(leaning([0.5, 0.5])) < -1e-2


def test_scales_of_neurons_learn_from_where_they_are_one(tmp_path: Path) -> None:
    """The identity that numbers of zero stand for is not a map that nothing hangs on."""
    setting = Setting("OPTForCausalLM", "full", tmp_path)
    setting.groups = {root: group for root, group in setting.groups.items() if isinstance(group, ScaledPermutation)}
    setting.starts = [Alignment()]
    learned = setting.learn(steps=20, lr=0.01)
    assert learned.losses[learned.step] < learned.losses[0]
    assert any(bool((element.scale != 1).any()) for element in learned.alignments[0].elements.values())


def test_relaxed_permutations_end_in_couplings(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    learned = setting.learn(permutations="sinkhorn", steps=20, lr=0.02)
    couplings = learned.couplings[0]
    assert set(couplings) == {r for r, g in setting.groups.items() if isinstance(g, Permutation) and "ffn" in r}
    for coupling in couplings.values():
        ones = torch.ones(len(coupling.matrix), dtype=torch.float64)
        assert coupling.matrix.min() > 0
        assert torch.allclose(coupling.matrix.sum(0), ones) and torch.allclose(coupling.matrix.sum(1), ones, atol=1e-3)
    softened = Softened(learned.alignments[0], couplings)
    moved = {role: softened.apply(setting.signature, role, tensor) for role, tensor in setting.tensors[1].items()}
    half = {role: (moved[role] + tensor) / 2 for role, tensor in setting.tensors[0].items()}
    losses = []
    for batch in setting.batches[4:]:
        teachers = [setting.forward(tensors, batch) for tensors in setting.tensors]
        losses.append(float(divergence(setting.forward(half, batch), teachers, [0.5, 0.5], batch)))
    assert learned.losses[learned.step] == pytest.approx(sum(losses) / 2, rel=1e-9)
    assert learned.losses[learned.step] < learned.losses[0]
    with pytest.raises(ValueError, match="choose from fixed"):
        setting.learn(permutations="soft")


def test_divergence_is_that_from_the_mixture_without_padding() -> None:
    torch.manual_seed(0)
    own, *theirs = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    mixture = 0.3 * theirs[0].softmax(-1) + 0.7 * theirs[1].softmax(-1)
    expected = torch.nn.functional.kl_div(own.log_softmax(-1), mixture, reduction="none").sum(-1)[mask.bool()].mean()
    found = divergence({"logits": own}, [{"logits": t} for t in theirs], [0.3, 0.7], {"attention_mask": mask})
    assert float(found) == pytest.approx(float(expected))
    assert float(divergence({"logits": mixture.log()}, [{"logits": t} for t in theirs], [0.3, 0.7], {})) < 1e-12


def test_divergence_counts_the_positions_that_have_a_label() -> None:
    torch.manual_seed(0)
    own, *theirs = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(3))
    batch = {"attention_mask": torch.ones(2, 3), "labels": torch.tensor([[-100, 4, -100], [0, -100, -100]])}
    counted = [{"logits": torch.stack([logits[0, 1], logits[1, 0]])} for logits in (own, *theirs)]
    expected = divergence(counted[0], counted[1:], [0.3, 0.7], {})
    found = divergence({"logits": own}, [{"logits": t} for t in theirs], [0.3, 0.7], batch)
    assert float(found) == pytest.approx(float(expected))


def test_bad_input_is_named(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "full", tmp_path)
    with pytest.raises(ValueError, match="steps 0: it must"):
        setting.learn(steps=0)
    with pytest.raises(ValueError, match=r"lr .*: it must"):
        setting.learn(lr=0.0)
    with pytest.raises(ValueError, match="at least two batches"):
        lessons = Lessons(setting.forward, setting.batches[:1])
        match_learned(setting.signature, setting.tensors, setting.starts, setting.groups, lessons)
    role = next(iter(setting.tensors[1]))
    setting.tensors[1][role] = setting.tensors[1][role][:1]
    with pytest.raises(ValueError, match=role.replace(".", r"\.")):
        setting.learn()


def test_products_in_bfloat16_leave_the_maps_in_float32(tmp_path: Path) -> None:
    setting = Setting("GPT2LMHeadModel", "invertible", tmp_path, dtype=torch.float32)
    exact, setting.forward = setting.forward, forward_of(setting.models[0], mixed=True)
    types = set[Any]()

    def watch(_: Any, __: Any, output: Any) -> None:
        types.add(getattr(output, "dtype", None))

    with torch.nn.modules.module.register_module_forward_hook(watch):
        found = setting.learn(steps=30, mixed=True)
    assert torch.bfloat16 in types
    setting.forward = exact
    start, end = setting.loss(setting.starts), setting.loss(found.alignments)
    assert end < start and [start, end] == pytest.approx([found.losses[0], found.losses[found.step]], rel=0.05)
    for role, tensor in setting.aligned(found.alignments)[0].items():
        assert tensor.dtype == torch.float32, role
