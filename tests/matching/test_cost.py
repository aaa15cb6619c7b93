# SPDX-License-Identifier: Apache-2.0
"""The work of matching, counted from shapes alone, against a count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import TEXT, build, save

import onebasin
from onebasin.matching import cost, order_proof
from onebasin.matching.cost import (
    ALONE,
    COPIES,
    ENDS,
    GROWTH,
    ORDERED,
    PASSING,
    PROGRAM,
    PROVING,
    SCORES,
    Work,
    _passing,
    numbers_held,
    seconds,
    work,
)
from onebasin.models import Folder
from onebasin.symmetry import acting_groups


def counted(folder: Path, level: str, sweeps: int = 1, **config: int) -> Work:
    signature = Folder(save(build("BertForTokenClassification", **{**TEXT, **config}), folder)).signature
    return work(signature, list(signature.tensors), acting_groups(signature, level), sweeps)


def test_the_work_of_one_pass_is_what_it_is_by_hand(tmp_path: Path) -> None:
    """Width 12, 3 heads of 4, 10 neurons, 2 layers: queries and keys with their biases, values and outputs, neurons.
    Rotations are found, and applied for the distance, to verify, and to write."""
    found = counted(tmp_path, "paper", sweeps=7)
    heads, neurons = (2 * (144 + 12)) + (144 + 12 + 144), 120 + 10 + 120
    assert found.products == 2 * (2 * 4 * heads * (1 + ENDS) + 2 * 10 * neurons)
    assert found.factored == 2 * 2 * 3 * 4**3 and found.assigned == 2 * 10**GROWTH
    assert found.scaled == found.wide == found.blocks == 0


def test_orders_that_few_columns_prove_need_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_proof, "FROM", 10)
    signature = Folder(save(build("BertForTokenClassification", **TEXT), tmp_path)).signature
    far, near = (work(signature, list(signature.tensors), acting_groups(signature, "paper"), 1, one) for one in (0, 1))
    assert near.assigned == 0 and near.numbers == far.numbers + 2 * PROVING * (120 + 10 + 120 + 10**2)
    assert far.products - near.products == 2 * 2 * 10 * (120 + 10 + 120)


def test_memory_is_what_it_is_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 neurons of width 12: the scores of all pairs are the most where nothing proves the order, and otherwise
    what is written: while the first of two matrices passes, its bias and the second wait. At level full, a worker holds
    all three tensors of a layer's neurons."""
    monkeypatch.setattr(order_proof, "FROM", 200)
    signature = Folder(
        save(build("BertForTokenClassification", **{**TEXT, "intermediate_size": 200}), tmp_path)
    ).signature

    def held(level: str, workers: int, near: bool) -> int:
        return numbers_held(signature, list(signature.tensors), acting_groups(signature, level), workers, near)

    largest, biases = 200 * 12, 200
    for workers in (1, 2):
        assert held("paper", workers, False) == workers * (COPIES * largest + (SCORES - 1) * 200**2)
        coupled = COPIES * largest + 2 * (largest + biases)
        assert held("full", workers, False) == workers * (coupled + SCORES * 200**2)
    assert held("paper", 1, True) == max(COPIES * largest, PASSING * largest + biases + largest)


def test_tensors_pass_in_order() -> None:
    """A large one at either end, with small ones between: two workers meet both only where nothing is between. With
    one worker, two more wait to be written; with two, four futures run or wait."""
    ends = [100, 1, 1, 1, 1, 1, 1, 100]
    assert _passing(ends, 1) == PASSING * 100 and _passing(ends, 1, written=True) == PASSING * 100 + 2
    assert _passing(ends, 2) == PASSING * 101 and _passing(ends, 2, written=True) == PASSING * 101 + 4
    assert _passing([100, 100], 2) == PASSING * 200 and _passing([], 2) == 0


def test_a_stream_is_larger_than_heads_and_members_are_solved_in_pairs(tmp_path: Path) -> None:
    """Width 128 with 8 heads of 16, four for each of two for keys and values: SVDs are wide for the stream alone."""
    config = LlamaConfig(vocab_size=9, hidden_size=128, intermediate_size=10, num_attention_heads=8,
                         num_key_value_heads=2, num_hidden_layers=3)  # fmt: skip
    signature = Folder(save(LlamaForCausalLM(config), tmp_path)).signature
    found = work(signature, list(signature.tensors), acting_groups(signature, "full", rescale="joint"), 5)
    assert found.wide == 5 * 128**3 and found.blocks == 5 * 3
    assert found.factored == 5 * 3 * (2 * 2) * (4 * 4) * 16**3


def test_a_stream_that_is_only_permuted_soon_stands_still(tmp_path: Path) -> None:
    """Though the heads turn: two layers, whose heads have keys and values of their own."""
    found = {sweeps: counted(tmp_path / str(sweeps), "full", sweeps) for sweeps in (1, ORDERED, 40)}
    assert found[1].blocks == 2 * ALONE
    assert found[40] == found[ORDERED] and found[40].blocks == ORDERED * found[1].blocks


def test_work_grows_with_depth_and_with_what_is_coupled(tmp_path: Path) -> None:
    found = [counted(tmp_path / str(n), "paper", num_hidden_layers=n) for n in (1, 2, 4)]
    assert [each.products / found[0].products for each in found] == [1, 2, 4]
    more = counted(tmp_path / "more", "permutation")
    assert more.assigned > found[1].assigned and more.numbers > found[1].numbers


def test_sweeps_cost_alike(tmp_path: Path) -> None:
    """What is done once, before and after them, is the same for any number."""
    one, two, three = (counted(tmp_path / str(sweeps), "full", sweeps) for sweeps in (1, 2, 3))
    assert two.products - one.products == three.products - two.products > 0
    assert two.wide - one.wide == three.wide - two.wide and two.factored == 2 * one.factored
    assert two.visits - one.visits == three.visits - two.visits > 0


def test_every_pair_of_neurons_is_asked_for_its_scale(tmp_path: Path) -> None:
    """A gated layer's neurons have a factor each: 3 layers of 10 neurons. Heads' scales come with their rotations."""
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=10, num_attention_heads=2, num_hidden_layers=3)
    signature = Folder(save(LlamaForCausalLM(config), tmp_path / "llama")).signature
    for rescale in ("joint", "none"):
        found = work(signature, list(signature.tensors), acting_groups(signature, "full", rescale=rescale), 4)
        assert found.scaled == 4 * 3 * 10**2


@pytest.mark.parametrize("level", ["paper", "full"])
def test_more_work_takes_longer(level: str, tmp_path: Path) -> None:
    small, large = (counted(tmp_path / str(n), level, num_hidden_layers=n) for n in (1, 3))
    assert 0 < seconds(small) < seconds(large)
    found = onebasin.check(*[tmp_path / "1"] * 2)["seconds"]
    assert all(0 < near <= far for near, far in found.values())
    assert found["paper"][0] < found["full"][0] and found["paper"][1] < found["full"][1]


@pytest.mark.parametrize("small", [False, True])
def test_the_time_is_that_of_the_workers_that_run(small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where every worker has the same rates, whatever the number of its cores; a small model has one
    worker, unless more are asked for."""
    monkeypatch.setattr("onebasin.matching.components.SMALL", 1e9 if small else 1)
    monkeypatch.setattr(cost, "_rates", lambda: Work(*[1e3] * 8))
    monkeypatch.setattr(cost.os, "cpu_count", lambda: 8)
    model = save(build("BertForTokenClassification", **TEXT), tmp_path / "model")
    one, four, all_cores = (onebasin.check(model, model, workers=count)["seconds"] for count in (1, 4, None))
    for level in one:
        alone, shared, most = ([end - PROGRAM for end in each[level]] for each in (one, four, all_cores))
        assert alone == pytest.approx([4 * end for end in shared], rel=0.01)
        assert most == pytest.approx([end / (1 if small else 8) for end in alone], rel=0.01)
