# SPDX-License-Identifier: Apache-2.0
"""Completeness: the signature generates every flat direction of a tiny model, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import build, save

from onebasin.families import table_for, tables
from onebasin.models import Folder
from onebasin.studies import audit as studied
from onebasin.studies import random_points
from onebasin.studies.audit import audit, audit_checkpoint, audit_inferred
from onebasin.studies.random_points import as_functions
from onebasin.symmetry import Signature, read_table, resolve
from onebasin.symmetry.audit.null_space import Audit, jacobian, orthonormal, smallest
from onebasin.symmetry.audit.null_space import audit as audit_signature
from onebasin.symmetry.audit.special import lone_readers

ONE = dict(num_hidden_layers=1, vocab_size=14)
RECORDED = json.loads((Path(__file__).parents[2] / "docs" / "audits.json").read_text("utf-8"))

# Half of what docs/audits.json records is audited every day, and half of these.
AUDITS: dict[str, dict[str, Any]] = {
    **{name: entry["settings"] for name, entry in RECORDED.items() if "reason" not in entry},
    "gemma3_text": ONE, "mistral": ONE, "qwen2": ONE, "qwen3": ONE,
    "deberta-v2: both": dict(ONE, relative_attention=True, max_position_embeddings=8, max_relative_positions=6,
                             pos_att_type=["p2c", "c2p"]),
    "gptj: all turn": dict(num_hidden_layers=1, rotary_dim=4),
    "stablelm: norms and biases": dict(num_hidden_layers=1, qk_layernorm=True, use_qkv_bias=True),
}  # fmt: skip

# Types without a table by hand: of biogpt two positions that nothing looks up, of granitemoeshared a router that asks
# the stream for its dtype, of qwen2_vl_text a norm whose output leaves the model; of nomic_bert post-norm sums without
# biases; of mpnet positions that count what does not pad; of openai_privacy_filter gates that are cut off; of
# chinese_clip_vision_model a class token with a row of positions, of minicpmv4_7_vision positions in another order, of
# yoso heads divided by their length, of esm norms with a gamma and a beta, of exaone4_5_vision patches side by side;
# of pixio several class tokens, of mlcd turns by a parameter, of mra a matrix whose input is zero, of persimmon
# LayerNorms of queries and keys that turn, of siglip_vision_model a probe that asks for all images; of nanochat pairs
# that turn under a norm, of fnet a last layer unlike the others; of siglip2 positions in an image of any shape, of
# mistral3 a norm whose vectors are read four at a time, and a tower that needs more inputs than a text, of
# vision-text-dual-encoder vectors divided by their length, of dinov3_vit
# turns by angles that two patches in a row do not tell apart, of sam_vision_model windows whose places are
# parameters, distances that queries read, and a last sum that LayerNorms and a narrower matrix read; of eomt norms
# after convolutions of each channel, and one by whose output a matrix multiplies.
INFERRED = ["apertus", "recurrent_gemma", "nanochat", "fnet", "granite", "glm4", "phi", "biogpt", "granitemoeshared",
            "qwen2_vl_text", "nomic_bert", "mpnet", "openai_privacy_filter",
            "chinese_clip_vision_model", "yoso", "esm",
            "pixio", "mlcd_vision_model", "mra", "persimmon", "siglip_vision_model", "siglip2",
            "dinov3_vit"]  # fmt: skip
SLOW = ["mistral3", "sam_vision_model", "eomt", "minicpmv4_7_vision", "exaone4_5_vision",
        "vision-text-dual-encoder"]  # fmt: skip
DAY = date.today().toordinal()
TODAY = [*INFERRED[DAY % 6 :: 6], SLOW[DAY % len(SLOW)]]  # a sixth of them, and a slow one

BERT = dict(
    vocab_size=14, max_position_embeddings=4, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=5, type_vocab_size=2, num_labels=3,
)  # fmt: skip
GPT2 = dict(vocab_size=7, n_positions=4, n_embd=6, n_layer=1, n_head=2, n_inner=5, num_labels=3)
IMAGE = dict(
    image_size=4, patch_size=2, num_channels=1, hidden_size=6, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=5,
)  # fmt: skip
UNTIED = dict(tie_word_embeddings=False)

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 tokens": ("GPT2ForTokenClassification", GPT2),
    "gpt2 headless": ("GPT2Model", GPT2),
    "gpt2 relu": ("GPT2LMHeadModel", dict(GPT2, activation_function="relu")),
    "vit headless": ("ViTModel", dict(IMAGE, num_hidden_layers=1)),
    "vit masked": ("ViTForMaskedImageModeling", dict(IMAGE, encoder_stride=2)),
    "bert untied": ("BertForMaskedLM", dict(BERT, **UNTIED)),
    "bert all heads": ("BertForPreTraining", BERT),
    "bert sequence": ("BertForSequenceClassification", dict(BERT, num_labels=16)),
    "bert headless": ("BertModel", BERT),
    "roberta tokens": ("RobertaForTokenClassification", dict(BERT, pad_token_id=0)),
}


def complete(found: Audit) -> bool:
    assert found.gap[0] > 1e-8 and found.gap[1] < 1e-13  # the rank is beyond doubt
    assert found.largest_change < 1e-12
    assert found.complete == (found.nullity == found.dimension)
    return found.complete


PARTS = """family parts
types parts

spaces
    one permutation head
    other permutation head
    out fixed

tensors
    vector  [one | other]
    reader.weight  out one'
    reader.bias  out
"""


def test_a_vector_of_several_parts_is_not_taken_for_one_of_them() -> None:
    table = read_table(PARTS, "parts")
    shapes = {"vector": (8,), "reader.weight": (3, 6), "reader.bias": (3,)}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    assert not list(lone_readers(resolve(table, shapes, {}), tensors))
    whole = {**shapes, "vector": (6,)}
    alone = read_table(PARTS.replace("[one | other]", "one"), "parts")
    assert list(lone_readers(resolve(alone, whole, {}), {**tensors, "vector": tensors["vector"][:6]}))


@pytest.mark.parametrize("name", list(AUDITS)[DAY % 2 :: 2])
def test_every_flat_direction_of_a_model_type_is_generated(name: str) -> None:
    assert complete(audit(name.partition(":")[0], **AUDITS[name]))


def test_every_family_is_audited() -> None:
    """Towers side by side are audited one by one."""
    families = {table_for(name.partition(":")[0]).family for name in AUDITS}
    assert tables().keys() - families == {"clip", "siglip"}


@pytest.mark.parametrize("name", TODAY)
def test_every_flat_direction_of_an_inferred_table_is_generated(name: str) -> None:
    assert complete(audit(name))


@pytest.mark.parametrize(("zeros", "expected"), [(0, 0), (7, 7), (150, 20), (400, 0)])
def test_small_singular_values_are_counted_as_all_of_them_are(zeros: int, expected: int) -> None:
    """Graded ones, over eight orders of magnitude, and exact zeros, more than expected or fewer."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(500, 500, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    planted = torch.logspace(0, -8, 500, dtype=torch.float64)
    planted[500 - zeros :] = 0
    matrix = u * planted @ v
    found, vectors = smallest(matrix, expected, 1e-12)
    assert int((found <= 1e-12).sum()) == zeros and float(found[len(found) - zeros :].sum()) < 1e-12
    assert abs(float(found[-zeros - 1]) / float(planted[-zeros - 1]) - 1) < 0.2
    assert not zeros or float((matrix @ vectors[:, len(found) - zeros :]).abs().max()) < 1e-12


def test_a_twin_is_audited_in_the_precision_that_it_was_proven_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-4V interpolates positions in float32, whatever its parameters are."""

    made: list[torch.Tensor] = []

    def run(signature: Signature, tensors: dict[str, torch.Tensor], functions: list[Any]) -> Audit:
        tied = {role: tensors[entry.alias] for role, entry in signature.tensors.items() if entry.alias is not None}
        made.append(functions[0]({**tensors, **tied}))
        return Audit(1, 1, 0, (1.0, 0.0), 0, 0.0)

    monkeypatch.setattr(studied, "audit_signature", run)
    audit_inferred("glm4v")
    assert len(made) == 1 and made[0].dtype == torch.float64 and bool(made[0].isfinite().all())


def test_a_type_without_a_table_takes_no_settings() -> None:
    with pytest.raises(ValueError, match="the table of 'granite' is inferred"):
        audit("granite", num_hidden_layers=1)


@pytest.mark.parametrize("name", HEADS)
def test_every_flat_direction_of_a_head_is_generated(name: str, tmp_path: Path) -> None:
    kind, config = HEADS[name]
    assert complete(audit_checkpoint(Folder(save(build(kind, **config), tmp_path))))


@pytest.mark.parametrize(
    ("name", "settings", "numbers"),
    [
        ("gpt2", dict(GPT2, **UNTIED), (383, 236, 147)),
        ("gpt2", dict(GPT2, n_layer=2, **UNTIED), (646, 391, 255)),
        ("llama", dict(ONE, vocab_size=9), (480, 402, 78)),
    ],
)
def test_known_numbers(name: str, settings: dict[str, Any], numbers: tuple[int, int, int]) -> None:
    """Untied GPT-2 of width 6; Llama: 4 for two rotary pairs, 16 of GL(4) on values, 5 scales of the ungated half, 28
    of O(8), the scale of the stream, 24 norm weights."""
    found = audit(name, **settings)
    assert (found.parameters, found.rank, found.nullity) == numbers
    assert complete(found)


# --- directions that are known and not generated ------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 10])
def test_a_norm_alone_between_two_bases_has_one_direction_more(width: int) -> None:
    """Two rotations of the complement of ones, R D S with D diagonal, must give a diagonal again: with n = width - 1,
    n (n - 1) unknowns meet n^2 - (n + 1) equations, one fewer. Only a one-layer ELECTRA has such a norm: its stream
    starts raw and ends in its second norm."""
    found = audit("electra", num_hidden_layers=1, vocab_size=14, hidden_size=width)
    assert not complete(found) and found.nullity - found.dimension == 1


TWICE = """
family twice
types twice
spaces
    inputs fixed
    stream linear stream
    out fixed
tensors
    embed.weight  stream inputs'
    first.weight  layernorm: stream -> stream
    first.bias  stream
    second.weight  rmsnorm: stream -> second_out
    head.weight  out second_out'
"""


@pytest.mark.parametrize("width", [4, 5])
def test_an_rmsnorm_of_an_ellipsoid_hides_two_directions(width: int) -> None:
    """y = D n + b lies on an ellipsoid in a plane: see `on_an_ellipsoid`. Without the generator, two are missing."""
    shapes = {"embed.weight": (width, 6), "first.weight": (width,), "first.bias": (width,),
              "second.weight": (width,), "head.weight": (7, width)}  # fmt: skip
    generator = torch.Generator().manual_seed(width)
    tensors = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    given = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    signature = resolve(read_table(TWICE), shapes, {})

    def run(t: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = given @ t["embed.weight"].mT
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
        y = x * t["first.weight"] + t["first.bias"]
        y = y / y.square().mean(-1, keepdim=True).sqrt() * t["second.weight"]
        return (y @ t["head.weight"].mT).flatten()

    found = audit_signature(signature, tensors, [run])
    assert complete(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onebasin.symmetry.audit.tangents.on_an_ellipsoid", lambda *_: iter(()))
        assert audit_signature(signature, tensors, [run]).dimension == found.dimension - 2


LONE = """
family lone
types lone
spaces
    inner linear inner
    out fixed
tensors
    start.weight  out inner'
    start.vector  inner
"""


def test_a_matrix_that_reads_one_vector_is_known_by_their_product() -> None:
    """W p has 7 numbers; W and p have 7 * 3 + 3, in which GL(3) acts."""
    shapes = {"start.weight": (7, 3), "start.vector": (3,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    given = torch.randn(40, 7, generator=generator, dtype=torch.float64)

    def run(t: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (given * (t["start.weight"] @ t["start.vector"])).flatten()

    found = audit_signature(resolve(read_table(LONE), shapes, {}), tensors, [run])
    assert complete(found) and found.nullity == 7 * 3 + 3 - 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onebasin.symmetry.audit.tangents.lone_products", lambda *_: iter(()))
        assert not complete(audit_signature(resolve(read_table(LONE), shapes, {}), tensors, [run]))


def test_a_clip_that_never_binds_leaves_the_symmetries_of_a_model_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does takes GL(3) from the two heads, once for queries and keys and once for values."""
    monkeypatch.setattr(random_points, "LIMIT", 100.0)
    idle = audit("mpt", **{**AUDITS["mpt: clipped projections"], "attn_config": dict(clip_qkv=100.0)})
    assert not complete(idle)
    assert idle.nullity == audit("mpt", **AUDITS["mpt"]).nullity == idle.dimension + 2 * 2 * 9
    attention = {f"blocks.0.attn.{name}.weight" for name in ("Wqkv", "out_proj")}
    assert sum(count for _, count in idle.missing) == 2 * 2 * 9
    assert all(set(roles) <= attention for roles, _ in idle.missing)


# --- an audit that fails ------------------------------------------------------------------------------------------


def parts(kind: str, folder: Path, **config: Any) -> tuple[Signature, dict[str, torch.Tensor], Any]:
    """A model's signature, tensors and functions, for audits of other signatures than its own."""
    checkpoint = Folder(save(build(kind, **config).double(), folder))
    tensors = {role: checkpoint.read(role, torch.float64) for role in checkpoint.signature.tensors}
    return checkpoint.signature, tensors, as_functions(checkpoint, 1500, torch.Generator().manual_seed(1))


def test_a_wrong_symmetry_changes_outputs(tmp_path: Path) -> None:
    """A query bias that the table calls invisible is found out."""
    signature, tensors, functions = parts("BertForTokenClassification", tmp_path, **BERT)
    query = "encoder.layer.0.attention.self.query.bias"
    signature.tensors[query].notes["invisible"] = ""  # type: ignore[index]
    found = audit_signature(signature, tensors, functions)
    del signature.tensors[query].notes["invisible"]  # type: ignore[attr-defined]
    assert found.largest_change > 1e-4 and not found.complete


def test_a_missing_symmetry_leaves_a_difference(tmp_path: Path) -> None:
    """Heads whose inner bases the signature holds fixed: 2 heads of gl(3) twice are missing."""
    signature, tensors, functions = parts("GPT2LMHeadModel", tmp_path, **GPT2, **UNTIED)
    spaces = dict(signature.spaces)
    for key in ("h.0.qk", "h.0.vo"):
        spaces[key] = type(spaces[key])(**{**vars(spaces[key]), "kind": "fixed"})
    poorer = Signature(signature.family, signature.tensors, spaces, signature.root, signature.absent)
    found = audit_signature(poorer, tensors, functions)
    assert found.nullity - found.dimension == 2 * 2 * 9 and not found.complete


def test_a_rank_that_the_tolerance_decides_proves_nothing() -> None:
    clear = Audit(parameters=9, rank=6, nullity=3, gap=(1e-5, 1e-15), dimension=3, largest_change=0.0)
    assert clear.complete and not replace(clear, gap=(3e-12, 8e-13)).complete
    assert replace(clear, rank=9, nullity=0, gap=(1e-5, 0.0), dimension=0).complete


@pytest.mark.parametrize(("missing", "asked"), [([0], 1), ([3, 0], 2), ([3, 2, 1, 0], 3)])
def test_one_point_at_which_nothing_is_missing_is_enough(
    missing: list[int], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = []

    def at_a_point(checkpoint: Folder, seed: int, given: object) -> Audit:
        points.append(seed)
        more = missing[len(points) - 1]
        return Audit(9, 6 - more, 3 + more, (1e-5, 1e-15), 3, 0.0)

    monkeypatch.setattr(studied, "audit_checkpoint", at_a_point)
    found = audit_inferred("phi", seed=4)
    assert points == [4, 5, 6][:asked] and found.nullity - found.dimension == missing[asked - 1]


def test_a_table_that_is_wrong_for_a_twin_is_inferred_from_the_twin_s_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sapiens 2 says how many heads each layer has in a list, and in a number beside it, which may differ."""
    asked = []
    changes = iter([1e-3, 0.0])
    known = studied.of_config

    def of_config(config: Any) -> Any:
        asked.append(config)
        return known(config)

    monkeypatch.setattr(studied, "of_config", of_config)
    monkeypatch.setattr(studied, "audit_checkpoint", lambda *_: Audit(9, 6, 3, (1e-5, 1e-15), 3, next(changes)))
    assert audit_inferred("phi").complete and len(asked) == 2
    assert asked[1]["hidden_size"] < asked[0]["hidden_size"]


def test_a_basis_is_found_where_the_faster_algorithm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.randn(7, 3, dtype=torch.float64) @ torch.randn(3, 5, dtype=torch.float64)
    expected = orthonormal(columns)

    def fails(*given: object, **kwargs: object) -> None:
        raise RuntimeError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    found = orthonormal(columns)
    assert found.shape == (7, 3)
    torch.testing.assert_close(found @ found.mT, expected @ expected.mT)


def test_too_few_outputs_and_zero_norms_are_refused(tmp_path: Path) -> None:
    signature, tensors, functions = parts("GPT2LMHeadModel", tmp_path, **GPT2)
    with pytest.raises(ValueError, match="give more inputs"):
        audit_signature(signature, tensors, [lambda given: functions[0](given)[:50]])
    tensors["ln_f.weight"][2] = 0
    with pytest.raises(ValueError, match=r"ln_f\.weight"):
        audit_signature(signature, tensors, functions)


def test_a_point_whose_outputs_or_gradients_are_not_finite_is_refused() -> None:
    zero = {"a": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(ValueError, match="some outputs are not finite at random parameters"):
        jacobian([lambda given: given["a"] / given["a"]], zero)
    with pytest.raises(ValueError, match="some gradients are not finite at random parameters"):
        jacobian([lambda given: given["a"].sqrt()], zero)
