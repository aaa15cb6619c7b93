# SPDX-License-Identifier: Apache-2.0
"""Tables inferred from model classes: exact on twins, equal to the tables written by hand, usable by every command."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterator
from datetime import date
from math import inf
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhiForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

import onebasin
from onebasin.families import tables
from onebasin.models import Canonical, Folder, ModelError
from onebasin.running import compare_rewritten, inference, twins
from onebasin.running.inference import full_size, known, proof, search, tracing
from onebasin.running.inference.sizes import key_of_size, list_of_layers
from onebasin.running.inference.text import sizes_in, table_text, with_fixed
from onebasin.running.shrinking import Scale
from onebasin.symmetry import acting_groups, read_table
from onebasin.symmetry.inference.atoms import index, joined, new
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.trace import KEY, Label, Trace
from onebasin.symmetry.inference.writing.draft import STYLES, Draft, Line
from onebasin.symmetry.inference.writing.settling import settle_gains
from onebasin.symmetry.tables.signature import MOVES, Signature

# A type each of what tables have to tell apart; none but the first four has a table by hand, and of the others a third
# is inferred every day.
# mobilebert: layers that differ a little; segformer: stages, and norms before padding; vit_msn: layers without the
# prefix on disk; bamba: a norm over heads; voxtral: vectors put among those of tokens; lxmert: modules of several kinds
# in a row; dinov3_vit: a tensor of no numbers; lw_detr_vit: parts of an axis whose sizes nothing tells;
# openai_privacy_filter: sinks at every place, then interleaved rotations by place; recurrent_gemma: an output bias of a
# later kind of layers stands before the norm that follows it; bros: one frequency in the smallest twin, more in others;
# qwen3_vl: biases written at different depths, with an unseen reader between; levit: a stage of more layers at the end;
# zamba: what some layers share, read by what each has alone, and a norm of two vectors side by side.
KINDS = ["llama", "gpt2", "bert", "mixtral", "granite", "gpt_oss", "glm4_moe", "phimoe", "smollm3", "mpnet", "marian",
         "mobilebert", "segformer", "vit_msn", "bamba", "voxtral", "lxmert", "dinov3_vit", "lw_detr_vit",
         "openai_privacy_filter", "recurrent_gemma", "bros", "qwen3_vl", "levit", "zamba"]  # fmt: skip
TODAY = [*KINDS[:4], *KINDS[4 + date.today().toordinal() % 3 :: 3]]
WITHOUT_TABLE = ["granite", "phimoe", "marian"]


def saved(kind: str, folder: Path, seed: int = 0) -> Path:
    model, _ = twins.build(kind, seed=seed)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def dimension(signature: Signature) -> int:
    """The continuous directions in which a model can move, at the level that allows most."""
    total = 0
    for root, group in acting_groups(signature, "invertible", rescale="joint").items():
        copies = 1
        for outer in signature.spaces[root].batch:
            copies *= signature.sizes[outer]
        total += copies * group.dimension(signature.spaces[root].size)
    return total


@pytest.mark.parametrize("kind", TODAY)
def test_what_is_inferred_leaves_the_twins_function_as_it_is(kind: str) -> None:
    found = inference.infer(kind)
    assert found.departure < 1e-9
    assert found.free > 0.5  # sinusoidal positions keep marian's streams still
    assert not found.lowered


def test_what_a_file_cuts_across_an_axis_stays() -> None:
    """OLMo Hybrid's convolution is stored in three parts that are not its queries, keys and values."""
    found = inference.infer("olmo_hybrid")
    assert found.departure < 1e-9 and found.free > 0.5


def test_types_that_take_turns_are_exact_too() -> None:
    every = twins_of_today(4)
    for kind in every:
        try:
            found = inference.infer(kind)
        except ModelError as error:  # it says why; nothing is guessed
            assert kind in str(error) or "infer" in str(error), kind
        else:
            assert found.departure < 1e-9, kind


def twins_of_today(count: int) -> list[str]:
    """Model types with a causal head, others every day; a failure names its type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return random.Random(str(date.today())).sample(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), count)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt", "phi3", "mixtral", "gpt_neox"])
def test_inference_finds_as_many_directions_as_the_table_by_hand(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "model")
    table = tmp_path / "table.txt"
    table.write_text(inference.of_config(Folder(folder).raw_config).text, "utf-8")
    by_hand, inferred = Folder(folder), Folder(folder, str(table))
    assert by_hand.table.family in tables()
    assert dimension(inferred.signature) == dimension(by_hand.signature)


@pytest.mark.parametrize("kind", WITHOUT_TABLE)
def test_a_scrambled_model_of_a_type_without_a_table_is_matched_back(kind: str, tmp_path: Path) -> None:
    import onebasin
    from onebasin.symmetry import Alignment

    source = Folder(saved(kind, tmp_path / "model"))
    signature = source.signature
    generator = torch.Generator().manual_seed(1)
    elements = {}
    for root, group in acting_groups(signature, "permutation").items():
        space = signature.spaces[root]
        elements[root] = group.random(space.size, tuple(signature.sizes[key] for key in space.batch), generator)
    assert elements
    alignment = Alignment(elements, {root: signature.spaces[root].batch for root in elements})
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    scrambled = {name: tensor.clone() for name, tensor in stored.items()}
    for role, entry in signature.tensors.items():
        moved = alignment.apply(signature, role, source.read(role, torch.float64))
        for name, part in entry.split(moved):
            scrambled[name] = part.to(torch.float32).contiguous()
    other = tmp_path / "scrambled"
    other.mkdir()
    (other / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    save_file(scrambled, other / "model.safetensors", {"format": "pt"})
    onebasin.match(str(other), str(tmp_path / "model"), output=str(tmp_path / "back"), symmetry="permutation")
    back = load_file(tmp_path / "back" / "model.safetensors")
    worst = max(float((back[name] - tensor).norm() / tensor.norm().clamp_min(1e-12)) for name, tensor in stored.items())
    assert worst < 1e-5


@pytest.mark.parametrize(
    "kind",
    [
        "resnet",  # channels that batch norms leave a sign, and blocks by name
        "mamba2",  # neurons and factors for every entry of spaces that stay
        "dinov3_vit",  # a tensor that holds nothing
        "gpt_oss",  # neurons of permuted experts, gate and up side by side
        "smollm3",  # layers with and without positions
        "llava",  # two towers
        "smolvlm",  # groups of patches in one row
    ],
)
def test_a_twin_whose_every_space_was_scrambled_is_recovered(kind: str) -> None:
    recovery = pytest.importorskip("benchmarks.recovery")
    found = recovery.recovery(kind)
    assert found["before"] > 0.5 and found["spaces"] >= 5
    assert found["after"] < 1e-5 and found["starts"] == 1


def test_the_command_writes_a_table_that_can_be_corrected_and_used(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from onebasin.cli import app

    saved("granite", tmp_path / "model")
    runner = CliRunner()
    table = tmp_path / "table.txt"
    assert runner.invoke(app, ["infer", str(tmp_path / "model"), "-o", str(table)]).exit_code == 0
    assert "rmsnorm: stream ->" in table.read_text("utf-8")
    shown = runner.invoke(app, ["inspect", str(tmp_path / "model"), "--family", str(table), "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["dimension"] > 0
    assert runner.invoke(app, ["infer", "granite", "-o", str(table)]).exit_code != 0  # it exists
    printed = runner.invoke(app, ["infer", str(tmp_path / "model")])
    assert read_table(printed.stdout, "printed") == read_table(table.read_text("utf-8"), "printed")


@pytest.mark.parametrize(
    ("name", "sizes", "key"),
    [
        ("head", (4, 6), "heads"),
        ("head", (2, 3), "inner.few"),
        ("qk", (6, 10), "width / heads"),
        ("inner", (48, 120), "width * 2"),
        ("inner", (4, 4), "4"),
        ("inner", (9, 9), "9"),  # not stages.0
        ("head", (8, 1), "stages.1"),
        ("inner", (5, 7), None),  # not label2id.b
        ("inner", (11, 13), "n_layers"),
        ("inner", (44, 78), None),  # not heads * n_layers
    ],
)
def test_a_size_is_told_from_what_two_configurations_say(name: str, sizes: tuple[int, int], key: str | None) -> None:
    configs = [
        {"width": 24, "heads": 4, "inner": {"few": 2}, "stages": [9, 8], "label2id": {"b": 5}, "n_layers": 11},
        {"width": 60, "heads": 6, "inner": {"few": 3}, "stages": [9, 1], "label2id": {"b": 7}, "n_layers": 13},
    ]
    assert key_of_size(name, sizes, configs) == key


@pytest.mark.parametrize(
    ("name", "sizes", "key"),
    [
        ("head", (3, 6), "heads / groups"),  # not num_layers
        ("qk", (12, 24), None),  # not heads
        ("qk", (6, 12), None),  # not heads / 2
        ("qk", (2, 4), "hidden_size / heads"),
        ("qk", (5, 5), None),  # it may be larger than in both
        ("vo", (4, 4), "even head_dim * rope.rotary_factor"),
    ],
)
def test_the_size_of_a_head_is_no_number_of_heads_or_layers(name: str, sizes: tuple[int, int], key: str | None) -> None:
    configs = [
        {"hidden_size": 24, "heads": 12, "groups": 4, "num_layers": 3, "head_dim": 16, "rope": {"rotary_factor": 0.25}},
        {"hidden_size": 96, "heads": 24, "groups": 4, "num_layers": 6, "head_dim": 16, "rope": {"rotary_factor": 0.25}},
    ]
    assert key_of_size(name, sizes, configs) == key


@pytest.mark.parametrize(("kinds", "config", "found"), [
    (["a", "b", "a"], {"depth": 3, "inner": {"types": ["x", "y", "x"]}}, ("inner.types", ["x", "y", "x"])),
    (["a", "b", "a"], {"types": ["x", "y", "x", "y"]}, None),  # of other layers
    (["a", "b", "a"], {"types": ["x", "y", "y"]}, None),
    (["a", "b", "a"], {"types": ["x", "y", "x"], "rope": [1, 0, 1]}, None),  # in larger models they may differ
    (["a", "b", "a"], {"types": ["x", "y", "x"], "rope": [1, 1, 0]}, ("types", ["x", "y", "x"])),
])  # fmt: skip
def test_kinds_of_layers_are_told_by_the_only_list_that_can(kinds, config, found) -> None:  # type: ignore[no-untyped-def]
    assert list_of_layers(kinds, config) == found


def test_layers_without_positions_move_more_than_those_with(tmp_path: Path) -> None:
    """SmolLM3 turns queries and keys in some layers, which its configuration lists."""
    model = Folder(saved("smollm3", tmp_path))
    kinds = [model.signature.kinds[f"layers.{n}.rope"] for n in model.signature.layers]
    told = model.raw_config["no_rope_layers"]  # 1: it turns
    assert set(told) == {0, 1} and kinds == [("linear", "rotary")[turns] for turns in told]


def test_experts_that_no_token_reached_are_found_in_another_run() -> None:
    found = inference.traced(*twins.build("switch_transformers"))
    experts = [name for name in found.axes if ".experts." in name]
    assert experts and not set(experts) - found.trace.seen.keys()


class OddConfig(PretrainedConfig):
    model_type = "odd_one"


class Odd(PreTrainedModel):
    """A model with an operation that no rule knows: the inverse of a matrix made of its weights."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.first = nn.Linear(5, 8)
        self.mixed = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.free = nn.Linear(8, 8)
        self.post_init()

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(input_values))
        mixing = torch.linalg.matrix_exp(self.mixed(torch.eye(8, dtype=hidden.dtype)))
        return self.last(torch.tanh(self.free(hidden @ mixing)))


def test_an_operation_without_a_rule_fixes_what_it_touches_and_is_named() -> None:
    torch.manual_seed(0)
    model = Odd(OddConfig()).double().eval()
    found = inference.traced(model, {"input_values": torch.randn(4, 5, dtype=torch.float64)})
    assert set(found.trace.unknown) == {"linalg_matrix_exp"}
    assert all(not leaf.moves for axis in found.axes["mixed.weight"] if axis is not None for leaf in axis.leaves)
    (neurons, _) = found.axes["free.weight"]
    assert neurons is not None and "permute" in neurons.moves  # elsewhere all is as it was


def test_maps_along_an_axis_take_no_memory_for_what_they_do_not_vary_along() -> None:
    """A head is turned by position, moved and cut, for every row and every other head alike."""
    batch, time, heads, size = 4, 8, 6, 10
    weight = nn.Parameter(torch.randn(heads * size, 3, dtype=torch.float64))
    setattr(weight, KEY, Label([new(heads * size), new(3)], name="weight"))
    angles = torch.arange(time).view(-1, 1) * torch.linspace(0.1, 1, size // 2).repeat(2)
    turned = []
    with torch.no_grad(), Trace(rules=RULES):
        x = nn.functional.linear(torch.randn(batch, time, 3, dtype=torch.float64), weight)
        x = x.view(batch, time, heads, size).transpose(1, 2)
        turned.append(x * angles.cos())
        turned.append(torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * angles.sin())
        turned.append((turned[0] + turned[1]) * 0.5)
        turned.append(-turned[2].transpose(1, 2))
        turned.append(torch.stack([turned[3], turned[3]], 0)[1])
        turned.append(torch.view_as_real(torch.view_as_complex(turned[4].unflatten(-1, (-1, 2)))))
    maps = [getattr(one, KEY).linear for one in turned]
    assert all(each.images.shape == (each.axis.size, *one.shape) for each, one in zip(maps, turned, strict=True))
    assert max(each.images.untyped_storage().nbytes() for each in maps) <= 2 * 8 * time * size * size
    axes = Trace(rules=RULES).axes(turned[3])
    assert [None if axis is None else axis.size for axis in axes] == [None, None, heads, size]
    assert axes[3] is not None and axes[3].moves == MOVES["rotary"]


def test_spaces_to_blame_are_found_by_halves() -> None:
    names, wrong, asked = [f"space{n}" for n in range(64)], {"space5": 0.3, "space40": 2.0}, list[list[str]]()

    def change(some: Collection[str]) -> float:
        asked.append(list(some))
        return max((wrong.get(name, 1e-15) for name in some), default=0.0)

    assert proof._blamed(change, names) == wrong
    assert len(asked) < 32
    assert proof._blamed(change, ["space1", "space2"]) == proof._blamed(change, []) == {}


ODD = """family odd_one
types odd_one

spaces
    ffn relu ffn
    in fixed
    out fixed
    kept fixed

tensors
    first.weight  ffn in
    first.bias  ffn
    last.weight  out ffn'
    last.bias  out
    mixed.weight  kept kept
    mixed.bias  kept
    free.weight  kept kept
    free.bias  kept
"""


class Masked(Odd):
    """A model of whose outputs some are no finite numbers, whatever its weights are."""

    places, filler = [1], -inf

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        found = self.last(torch.relu(self.first(input_values)))
        return torch.where(torch.isin(torch.arange(3), torch.tensor(self.places)), self.filler, found)


@pytest.mark.parametrize("filler", [-inf, float("nan")])
def test_outputs_that_are_no_numbers_prove_nothing(filler: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Masked, "filler", filler)
    model, given = Masked(OddConfig()).double().eval(), {"input_values": torch.randn(4, 5, dtype=torch.float64)}
    found = inference.traced(model, given)
    assert inference.proved(ODD, found)[0] < 1e-12
    too_much = ODD.replace("ffn relu ffn", "ffn linear ffn")
    assert inference.proved(too_much, found)[0] > 0.01  # the others are looked at
    monkeypatch.setattr(Masked, "places", [0, 1, 2])
    with pytest.raises(ValueError, match="do not depend on its parameters"):
        inference.proved(too_much, inference.traced(model, given))


@pytest.mark.parametrize("kind", ["conditional_detr", "qwen3_vl", "layoutlmv3", "mobilebert"])
def test_nothing_is_left_out_where_norms_share_a_space_with_parts(kind: str) -> None:
    """Norms whose vector is divided by other layers, that read a part of what another reads, or that are gains."""
    found = inference.infer(kind)
    assert found.style == STYLES[0] and found.lowered == [] and found.departure < 1e-12


@pytest.mark.parametrize(
    ("kind", "cls", "more"),
    [
        ("csm", None, lambda model, given: {"labels": given["input_ids"].clone()}),
        ("whisper", "WhisperForCausalLM", lambda model, given: {"encoder_outputs": (random_states(model.config),)}),
        ("longformer", None, lambda model, given: {"global_attention_mask": 1 - given["global_attention_mask"]}),
    ],
)
def test_tables_hold_for_inputs_that_reach_what_the_run_did_not_use(
    kind: str, cls: str | None, more: Callable[[PreTrainedModel, dict[str, torch.Tensor]], dict[str, object]]
) -> None:
    """The decoder of sounds of CSM runs with labels, the cross attention of Whisper's decoder with an encoder."""
    text = inference.infer(kind, cls).text
    model, given = twins.build(kind, cls)
    departure, _ = proof.proved(text, tracing.untraced(model, {**given, **more(model, given)}))
    assert departure < proof.TOLERANCE


def random_states(config: PretrainedConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, config.d_model, generator=generator, dtype=torch.float64)


def test_spaces_beside_what_is_unused_stay() -> None:
    """An unused parameter may meet what enters or leaves several layers, and what is in its own module."""

    def fixed(unused: str, *sizes: int, seen: Collection[str] = ()) -> set[str]:
        stream, neurons, others = new(4), new(6), new(6)
        axes = {"lm.embed.weight": [None, stream],
                "lm.0.up.weight": [neurons, stream], "lm.0.down.weight": [stream, neurons],
                "lm.1.up.weight": [others, stream], "lm.1.down.weight": [stream, others]}  # fmt: skip
        tracing._hold_around([unused], axes | {unused: [new(size) for size in sizes]}, set(seen))
        spaces = {"stream": stream, "neurons": neurons, "others": others}
        return {name for name, axis in spaces.items() if not axis.moves}

    assert fixed("map", 4) == fixed("map", 8, 3) == fixed("lm.2.map.weight", 4) == {"stream"}
    assert fixed("map", 6) == fixed("map", 6, 5) == fixed("bias", 8) == set()
    assert fixed("lm.0.map.weight", 6) == {"neurons"}
    assert fixed("map", 4, seen=["map"]) == fixed("mask_token", 4) == fixed("criterion.map", 4) == set()


class HastyConfig(PretrainedConfig):
    model_type = "hasty"

    def __init__(self, num_hidden_layers: int = 4, **more: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**more)


class Hasty(PreTrainedModel):
    """A model that ends after the first layer whose gate says so."""

    config_class = HastyConfig
    main_input_name = "input_ids"

    def __init__(self, config: HastyConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(60, 24), nn.Linear(24, 60, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(24) for _ in range(config.num_hidden_layers))
        self.up = nn.ModuleList(nn.Linear(24, 40) for _ in self.norms)
        self.down = nn.ModuleList(nn.Linear(40, 24) for _ in self.norms)
        self.gates = nn.ModuleList(nn.Linear(24, 1) for _ in self.norms)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for norm, up, down, gate in zip(self.norms, self.up, self.down, self.gates, strict=True):
            h = norm(x)
            x = x + down(torch.relu(up(h)))
            if gate(h).mean() > 0:
                break
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gate", [None, 50.0])
def test_layers_that_the_twin_left_out_can_still_be_reached(gate: float | None) -> None:
    """The table also holds for inputs that pass through all layers: either another run reached them, or the stream
    stays."""
    model, given = twins.build(HastyConfig(), Hasty)

    def gates(bias: float) -> None:
        for each in model.gates:
            each.bias.data.fill_(bias)

    if gate is not None:
        gates(gate)
    found = inference.traced(model, given)
    moves = {move for axis in found.axes["embed.weight"] if axis is not None for move in axis.moves}
    text = table_text(found, STYLES[0])
    assert gate is None or not moves
    gates(-50.0)
    departure, _ = proof.proved(text, tracing.untraced(model, given))
    assert departure < proof.TOLERANCE


def test_experts_that_each_take_a_copy_of_all_tokens_move() -> None:
    """Llama 4 multiplies copies of the tokens by all scores, most of which are zero: they are set to minus infinity
    beside those that were chosen."""
    assert re.search(r"(?m)^    expert permutation ", inference.infer("llama4_text").text)


def test_a_part_that_nothing_reads_stays() -> None:
    """Positions past the end of the inputs are written and not read. Experts are neither, since they only permute."""
    past, stream, experts, pooled = new(3), new(4), index(2), new(5)
    positions = joined([new(2, frozenset()), past])
    tracing._hold_unread([[positions, stream], [joined([experts, index(1)]), ~stream], [pooled, ~stream]])
    assert not past.moves and stream.moves == pooled.moves == MOVES["linear"]
    assert experts.moves == MOVES["permutation"]


def test_a_space_has_the_size_of_what_stands_in_its_place_in_another_twin() -> None:
    """Names may differ, and what the other writes in another way says nothing."""

    def draft(sizes: dict[str, int], *axes: str) -> Draft:
        lines = [Line(n, "layers", f"{n}.weight", each, "", False) for n, each in enumerate(axes)]
        return Draft(Trace(), [], "", STYLES[0], sizes=sizes, lines=lines)

    mine = draft(
        {"head": 2, "qk": 3, "fixed": 5, "odd": 4}, "(head qk) fixed", "odd fixed'", "odd qk'", "rmsnorm: fixed"
    )
    other = draft({"head2": 6, "vo": 7, "fixed": 8, "odd": 9, "head": 1}, "(head2 vo') fixed", "odd fixed", "head vo")
    assert sizes_in(other, mine) == {"head": 6, "qk": 7, "fixed": 8}  # "odd" meets two
    assert sizes_in(draft(other.sizes, "[head2 | vo] fixed"), mine) == {}


def test_outputs_of_another_length_differ() -> None:
    assert proof._difference(torch.ones(3), torch.ones(4)) == inf


def test_where_the_canonical_form_is_wrong_other_spaces_are_blamed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"good", "wrong"}

    def levels(*_: object) -> Iterator[tuple[str, set[str], Callable[[Collection[str]], float]]]:
        yield "invertible", {"deep"}, lambda some: 1.0
        yield "permutation", names, lambda some: 1.0 if "wrong" in some else 0.0

    monkeypatch.setattr(proof, "_levels", levels)
    twin = inference.traced(Odd(OddConfig()).double().eval(), {"input_values": torch.randn(4, 5, dtype=torch.float64)})
    assert proof.to_blame("", twin) == {"wrong": 1.0}
    names.remove("wrong")
    with pytest.raises(ValueError, match="notes on constants"):
        proof.to_blame("", twin)


class Deaf(Odd):
    """A model whose outputs are about its inputs alone."""

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        return input_values + self.last(torch.relu(self.first(input_values))).sum() * 0


def test_outputs_that_no_parameter_changes_prove_nothing() -> None:
    torch.manual_seed(0)
    found = inference.traced(Deaf(OddConfig()).double().eval(), {"input_values": torch.randn(4, 5).double()})
    with pytest.raises(ValueError, match="do not depend on its parameters"):
        inference.proved(ODD, found)


def test_a_table_is_written_in_several_ways_from_one_run() -> None:
    """What one way lowers, the next finds as it was."""
    texts = []
    for order in (STYLES, STYLES[::-1]):
        found = inference.traced(*twins.build("marian"))
        for style in order:
            with tracing.as_before(found):
                texts.append(table_text(found, style))
    assert texts[:5] == texts[:4:-1] and len(set(texts)) > 1


@pytest.mark.parametrize("kind", ["blenderbot", "pegasus"])
def test_a_tensor_that_is_no_longer_tied_has_its_name_in_the_class(tmp_path: Path, kind: str) -> None:
    """The canonical form gives the encoder's embedding numbers of its own, under a name that the file left out."""
    model, _ = twins.build(kind)
    model.to(torch.float32).save_pretrained(tmp_path / "model")
    onebasin.canonical(tmp_path / "model", tmp_path / "form")
    made = Folder(tmp_path / "form").shapes
    assert made.keys() - Folder(tmp_path / "model").shapes.keys()
    assert made.keys() <= model.state_dict().keys()


def test_what_acts_only_beside_another_is_found() -> None:
    def change(some: Collection[str]) -> float:
        return 1.0 if {"a3", "a9"} <= set(some) or "a5" in some else 0.0

    names = [f"a{n}" for n in range(12)]
    assert proof._blamed(change, names) == {"a5": 1.0}
    assert proof._blamed(change, [n for n in names if n != "a5"]) == {"a3": 1.0}


@pytest.mark.parametrize("kind", ["codegen", "gptj"])
def test_tables_hold_for_more_heads_and_more_pairs_than_twins_have(kind: str) -> None:
    """CodeGen's queries, values and keys stand side by side in each of four shards of its heads, and the first entries
    of every head turn in pairs that stand next to each other. In the smallest twin, a shard has one head, and a head
    has one pair."""
    found = inference.infer(kind)
    assert re.search(r"(?m)^ +rope interleaved", found.text) and re.search(r"(?m)^ +qk linear", found.text)
    config = AutoConfig.for_model(kind, n_embd=192, n_head=16, n_layer=2, rotary_dim=8, vocab_size=67, n_positions=40)
    model = twins.random_model(config, type(AutoModelForCausalLM.from_config(config)))
    twin = tracing.untraced(model, {"input_ids": torch.arange(20).view(2, 10)})
    assert proof.proved(found.text, twin)[0] < 1e-9


@pytest.mark.parametrize(
    ("kind", "head", "kept"), [("qwen3_next", 24, frozenset()), ("neomme", 32, search.EVERY_LAYER)]
)
def test_tables_hold_for_larger_heads_of_which_a_part_turns(kind: str, head: int, kept: frozenset[str]) -> None:
    found = inference.infer(kind)
    cls = type(twins.build(kind)[0]).__name__
    twin = tracing.untraced(*twins.build(kind, cls, 2, Scale(head, kept=kept)))
    assert proof.proved(found.text, twin)[0] < 1e-9


def test_a_number_of_groups_that_no_key_tells_is_not_taken_for_a_quotient() -> None:
    """DETR's masks have convolutions with 8 groups, which is also another size over the number of heads."""
    found = re.findall(r"(?m)^size expert\d* = (.*)$", inference.infer("detr").text)
    assert found and all(size.isdigit() for size in found)


def test_what_is_wrongly_taken_stays() -> None:
    """A convolution over channels stands between the biases of two layers, and no axis tells that it reads the sum."""
    found = inference.infer("convnext")
    assert found.style == STYLES[0] and found.departure < 1e-9
    assert re.findall(r"(?m)^ +\S*dwconv.bias .*; stays$", found.text)
    assert not re.findall(r"(?m)^ +\S*pwconv\d.weight .*; stays$", found.text)


def test_where_all_layers_are_too_many_what_differs_in_them_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """DETR's backbone has stages that differ, so its table names all layers."""
    monkeypatch.setattr(twins, "LARGEST", 400_000)
    monkeypatch.setattr(twins, "_FOUND", {})
    monkeypatch.setattr(twins, "_REFUSED", {})
    found = inference.infer("detr")
    assert found.departure < 1e-9 and 0.5 < found.free < search.LOSS


def test_a_factor_that_stays_has_a_size_still() -> None:
    text = "family a\ntypes a\n\nspaces\n    ffn permutation ffn\n    scale factor ffn\n\ntensors\n    x  (ffn scale)\n"
    assert with_fixed(text, {"ffn": 1.0, "scale": 1.0}).splitlines()[2:6] == [
        "size scale = 1", "", "spaces", "    ffn fixed ffn"]  # fmt: skip


def inferred_again(folder: Path) -> inference.Inferred:
    """As another process would."""
    known._of_config.cache_clear()
    return inference.of_config(Folder(folder).raw_config)


def test_a_table_is_inferred_once_and_kept_with_its_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    folder = saved("granite", tmp_path / "model")
    first = inferred_again(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))

    def refuse(*_: object) -> None:
        raise AssertionError("a twin was made")

    with monkeypatch.context() as patched:
        patched.setattr(twins, "build", refuse)
        assert inferred_again(folder) == first
        assert Folder(folder).signature.family == "granite"
        (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0", "dtype": "float16"}))
        assert inferred_again(folder) == first
        (entry,) = (tmp_path / "cache").iterdir()
        whole = entry.read_bytes()
        entry.write_bytes(whole[:-20])  # as a power cut may leave it
        with pytest.raises(AssertionError, match="a twin was made"):
            inferred_again(folder)
        entry.write_bytes(whole)
        for changes in ({"num_key_value_heads": 1}, {"architectures": ["GraniteModel"]}):  # other tables
            (folder / "config.json").write_text(json.dumps({**config, **changes}))
            with pytest.raises(AssertionError, match="a twin was made"):
                inferred_again(folder)
        (folder / "config.json").write_text(json.dumps(config))
        patched.setattr(known.transformers, "__version__", "0.0")
        known._code.cache_clear()
        with pytest.raises(AssertionError, match="a twin was made"):
            inferred_again(folder)
    known._code.cache_clear()
    entry.write_bytes(whole[:-20])
    assert inferred_again(folder) == first  # made anew
    assert entry.read_bytes() == whole


def test_what_was_not_proven_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBASIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "proved", lambda *_: (1.0, "permutation"))
    with pytest.raises(ModelError, match="no exact table could be inferred"):
        inferred_again(saved("granite", tmp_path / "model"))
    assert not (tmp_path / "cache").exists()


def test_no_style_is_left_out_for_want_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, tried = search._with_constants, list[str]()

    def fails_at_first(text: str, *found: tracing.Traced | None) -> tuple[str, float, str]:
        tried.append(text)
        if len(tried) < len(STYLES):  # every style but the last; no space is to blame
            raise ValueError("not this one")
        return finish(text, *found)

    monkeypatch.setattr(search, "_with_constants", fails_at_first)
    monkeypatch.setattr(time, "process_time", lambda: 100.0 * len(tried))  # each takes minutes
    assert inference.infer("granite").style == STYLES[-1]


@pytest.mark.parametrize("stated", [["logging"], ["pipeline"], "GraniteModel", [3], 3, None])
def test_only_model_classes_are_run(stated: object, tmp_path: Path) -> None:
    folder = saved("granite", tmp_path / "model")
    config = Folder(folder).raw_config
    assert inference.of_config({**config, "architectures": stated}).text == inference.of_config(config).text


def test_a_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not know the model type 'no_such'"):
        inference.of_config({"model_type": "no_such"})


def test_tied_weights_stay_tied_in_the_table() -> None:
    config = AutoConfig.for_model("granite", tie_word_embeddings=True)
    found = inference.infer(config)
    assert "tied embed_tokens.weight" in found.text


@pytest.mark.parametrize(("kind", "free"), [("squeezebert", 0.9), ("udop", 0.6)])
def test_ties_that_a_line_cannot_state(kind: str, free: float) -> None:
    """SqueezeBERT's embedding is divided into groups, and its head reads a vector that is not; of UDOP's tables of
    distances, the first one is tied."""
    found = inference.infer(kind)
    assert found.departure < 1e-12 and found.free > free and not found.unknown


def test_sizes_that_agree_by_chance_on_one_twin_are_told_apart(tmp_path: Path) -> None:
    """Half of each head of Phi turns: on a small twin as many dimensions as heads, or an eighth of the width."""
    sizes = dict(hidden_size=160, intermediate_size=48, num_attention_heads=8, num_hidden_layers=2, vocab_size=50)
    phi = PhiConfig(**sizes)
    assert phi.rope_parameters["partial_rotary_factor"] == 0.5
    PhiForCausalLM(phi).save_pretrained(tmp_path)
    (tmp_path / "phi.txt").write_text(inference.infer("phi").text, "utf-8")
    spaces = Folder(tmp_path, str(tmp_path / "phi.txt")).signature.spaces.values()
    assert {space.size for space in spaces if space.name == "rope"} == {10}


def test_embeddings_that_a_file_holds_once_move_alike_in_encoder_and_decoder(tmp_path: Path) -> None:
    from onebasin.running.trial import _changed
    from onebasin.studies.tiny_models import tiny_model

    tiny_model("bart").save_pretrained(tmp_path)
    table = tmp_path / "table.txt"
    table.write_text(inference.of_config(Folder(tmp_path).raw_config).text, "utf-8")
    model = Folder(tmp_path, str(table))
    assert "permutation" in {model.signature.kinds[root] for root in model.signature.kinds if root.startswith("stream")}
    assert _changed(model, model, "permutation") < 1e-12


def test_the_proof_ties_what_a_file_holds_once() -> None:
    """The canonical form takes from the embedding what norms do not see; a head that is tied to it would."""
    found = inference.traced(*twins.build("bart"))
    text = table_text(found, STYLES[0])
    assert inference.proved(text, found)[0] < 1e-9
    alone = re.sub(r"; (tied|beside) .*", "", text)  # as if no other name had these numbers
    assert inference.proved(alone, found)[0] > 1e-3


@pytest.mark.parametrize("kind", ["jais2", "nemotron"])
def test_neurons_under_a_squared_relu_take_factors(kind: str) -> None:
    line = "mlp.up_proj.weight  ffn post_attention_layernorm_out'  ; degree 2 mlp.down_proj.weight\n"
    assert line in inference.infer(kind).text


def test_a_gain_whose_product_is_used_twice_stays() -> None:
    """LayerScale moves into the matrix before it only where nothing else reads what that makes."""

    class Scaled(nn.Module):
        def __init__(self, twice: bool) -> None:
            super().__init__()
            self.twice = twice
            self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.inner(x)
            return self.outer(made * self.gain + (made if self.twice else 0))

    moves = []
    for twice in (False, True):
        module = Scaled(twice)
        trace = Trace(rules=RULES, silent=SILENT)
        for name, parameter in module.named_parameters():
            setattr(parameter, KEY, Label([new(n) for n in parameter.shape], name=name))
        with torch.no_grad(), trace:
            module(torch.randn(2, 3))
        assert bool(settle_gains(trace, (), wanted=True)) != twice
        moves.append("rotate" in trace.axes(module.gain)[0].moves)
    assert moves == [True, False]


@pytest.mark.parametrize("kind", ["efficientnet", "hubert"])
def test_most_of_a_model_moves_whose_widths_or_weights_are_computed(kind: str) -> None:
    """EfficientNet's class multiplies its widths by a number; a convolution of HuBERT has a normed weight."""
    found = inference.infer(kind)
    assert found.free > 0.95 and found.departure < 1e-9 and found.fits


def test_a_softmax_over_the_largest_entries_does_not_see_what_a_router_adds_to_all() -> None:
    assert re.search(r"router\.layer\.weight .*; softmax", inference.infer("granitemoe").text)


def test_a_bias_of_queries_moves_where_keys_come_first() -> None:
    """VideoMAE computes its keys first: constants in these are invisible, and queries have their own bias."""
    text = inference.infer("videomae").text
    assert re.search(r"key\.weight +\(head qk'\)", text) and re.search(r"q_bias +\(head qk\)$", text, re.MULTILINE)


@pytest.mark.usefixtures("three_sweeps")
def test_heads_with_other_numbers_of_classes_are_copied_and_the_rest_is_matched(tmp_path: Path) -> None:
    """As a table by hand says, what counts classes belongs to its task: `labels`."""
    folders = []
    for labels in (3, 5):
        config = PhiConfig(vocab_size=40, hidden_size=32, intermediate_size=30, num_hidden_layers=2, num_labels=labels,
                           num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
        torch.manual_seed(labels)
        folders.append(str(tmp_path / f"{labels}"))
        PhiForSequenceClassification(config).save_pretrained(folders[-1])
    model = Folder(folders[0])
    assert [space.size for space in model.signature.spaces.values() if space.kind == "labels"] == [3]
    onebasin.match(*folders, output=str(tmp_path / "out"), symmetry="orthogonal")
    assert Folder(str(tmp_path / "out")).signature.tensors["score.weight"].shape == (3, 32)


def test_a_head_stays_tied_whose_class_looks_at_ties_when_it_runs(tmp_path: Path) -> None:
    """Switch Transformers scale what a tied head reads, which an untied copy of the weights would lose."""
    twins.build("switch_transformers")[0].save_pretrained(tmp_path)
    folder = Folder(tmp_path)
    form = Canonical(folder, torch.float64)
    assert not form.updates
    assert compare_rewritten(folder, form, dtype=torch.float64).relative_difference < 1e-9


def test_bounds_that_are_infinite_are_copied(tmp_path: Path) -> None:
    """Gemma 4 clips what layers of sounds read, by default to all numbers."""
    folders = [str(tmp_path / str(seed)) for seed in (0, 1)]
    for seed, place in enumerate(folders):
        twins.build("gemma4_audio", seed=seed)[0].float().save_pretrained(place)
    found = onebasin.match(*folders, output=str(tmp_path / "out"), match="permutation")
    assert found.distance_after < found.distance_before
    bound = "layers.0.self_attn.q_proj.input_max"
    assert found.model.state_dict()[bound] == torch.inf and bound in list(Folder(folders[0]).others())


def test_a_size_is_told_otherwise_only_where_the_model_itself_contradicts_it() -> None:
    """Numbers of points and heads are the same in a twin. Where shapes leave it open which of them is wrong, nothing is
    guessed."""
    table = """
    family points
    size head = heads
    size near = heads
    size far = heads
    spaces
        stream fixed
        head   fixed
        near   fixed
        far    fixed
        last   fixed
    tensors
        where (head [near | far | last]) stream'
        scale [near | far | last]
    """
    text = dedent(table)

    class Stated:
        """What a twin is asked for."""

        def __init__(self, **config: int) -> None:
            self.config = SimpleNamespace(to_dict=lambda: config)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"where": torch.zeros(48, 5), "scale": torch.zeros(12)}

    twins_of_it = [tracing.Traced(Stated(heads=4, points=4), {}, Trace(rules=RULES), {}, {})] * 2  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(full_size, "as_stored", lambda _, state: state)

        def sizes(where: int, heads: int, text: str = text) -> dict[str, str]:
            itself = {"where": (where, 5), "scale": (12,)}, {"heads": heads, "points": 4}
            return dict(re.findall(r"(?m)^size (\w+) = (.*)$", full_size.refitted(text, itself, *twins_of_it)))

        stated = dict.fromkeys(("head", "near", "far"), "heads")
        assert sizes(96, 8) == {"head": "heads", "near": "4", "far": "4"}
        assert sizes(48, 4) == sizes(97, 8) == stated
        assert full_size.refitted(text, None, *twins_of_it) == text
        loose = text.replace("    scale [near | far | last]\n", "")
        patched.setattr(Stated, "state_dict", lambda _: {"where": torch.zeros(48, 5)})
        assert full_size.refitted(loose, ({"where": (96, 5)}, {"heads": 8, "points": 4}), *twins_of_it) == loose
