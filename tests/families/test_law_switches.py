# SPDX-License-Identifier: Apache-2.0
"""Law 1 for combinations of switches: tables hold for every pair of values of what a configuration can switch.

Switches are the flags that a model's class reads from its configuration, and what the table asks of it. A combination
that no class runs is left out; one that the table refuses in a sentence is right.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import date
from itertools import combinations, product
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
import zoo
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from onebasin.families import table_for, tables
from onebasin.models import Canonical, Folder, ModelError
from onebasin.running.shrinking import Scale
from onebasin.running.trial import TOLERANCE, _changed, probes
from onebasin.running.twins import build
from onebasin.studies.tiny_models import HEADS, TOWERS
from onebasin.symmetry import Table

TYPES = [kind for table in tables().values() for kind in table.types if kind in CONFIG_MAPPING]
TODAY = TYPES[date.today().toordinal() % 2 :: 2]  # half of them every day
Config = dict[str, Any]

# Not of the function: how training, caching, outputs and attention are done.
ASIDE = re.compile(r"^_|^output_|^return_|use_cache|gradient|is_decoder$|is_encoder_decoder|tie_encoder|chunk|dropout|"
                   r"apply_spec_augment|torchscript|use_flash|ctc_|tf_legacy|use_bfloat16|reference_compile|"
                   r"problem_type|use_amp|summary_|slow_but_exact|dtype|deterministic|sparse_pred|"
                   r"normalize_before|reuse_len|untie_r|use_weighted_layer_sum|return_dict")  # fmt: skip
# What sizes and words switch, which no list of flags shows.
MORE: dict[str, dict[str, list[Any]]] = {
    "deberta-v2": {"relative_attention": [True, False], "share_att_key": [True, False], "conv_kernel_size": [0, 3],
                   "pos_att_type": [["p2c", "c2p"], ["c2p"], ["p2c"], []], "norm_rel_ebd": ["none", "layer_norm"],
                   "position_biased_input": [True, False], "embedding_size": [512, 1536], "type_vocab_size": [0, 2],
                   "position_buckets": [-1, 256]},
    "deberta": {"relative_attention": [True, False], "talking_head": [True, False], "type_vocab_size": [0, 2],
                "pos_att_type": [["p2c", "c2p"], ["c2p"], ["p2c"], []], "position_biased_input": [True, False],
                "embedding_size": [512, 768]},
    "albert": {"num_hidden_groups": [1, 2], "inner_group_num": [1, 2], "embedding_size": [128, 4096]},
    "electra": {"embedding_size": [128, 256]},
    "opt": {"word_embed_proj_dim": [512, 768]},
    # What T5 runs is `dense_act_fn`, which saved configs state beside the setting that it once followed from.
    "t5": {"feed_forward_proj": ["relu", "gated-gelu", "gated-relu"], "dense_act_fn": ["relu", "gelu", "tanh"]},
    "mt5": {"feed_forward_proj": ["relu", "gated-gelu"], "dense_act_fn": ["relu", "gelu"]},
    "falcon": {"num_kv_heads": [71, 1], "num_ln_in_parallel_attn": [None, 1, 2]},
    "mpt": {"clip_qkv": [None, 0.5]},
    "gptj": {"rotary_dim": [64, 256]},
    "wav2vec2": {"feat_extract_norm": ["group", "layer"], "adapter_attn_dim": [None, 16]},
    "hubert": {"feat_extract_norm": ["group", "layer"]},
    "deepseek_v2": {"q_lora_rank": [None, 1536], "n_group": [1, 2], "num_experts_per_tok": [6],
                    "topk_method": ["greedy", "group_limited_greedy"], "topk_group": [1], "num_key_value_heads": [32]},
    "deepseek_v3": {"q_lora_rank": [None, 1536], "n_group": [1, 8], "num_key_value_heads": [128]},
    "olmoe": {"clip_qkv": [None, 0.5]},
}  # fmt: skip
ATTEMPTS, DRAWS = 4, 20
ACTIVATIONS = ("hidden_act", "activation_function", "activation", "ff_activation", "hidden_activation")


def switches(kind: str) -> dict[str, list[Any]]:
    """Every switch of a model type, with its values."""
    cls = CONFIG_MAPPING[kind]
    given = cls().to_dict()
    model = transformers.MODEL_MAPPING[cls]
    model = model[0] if isinstance(model, tuple) else model
    source = inspect.getsource(inspect.getmodule(model))  # type: ignore[arg-type]
    read = set(re.findall(r"config\.(\w+)|config, \"(\w+)\"", source))
    names = {name for pair in read for name in pair if name} | {"tie_word_embeddings"}
    found = {name: [True, False] for name in sorted(names)
             if isinstance(given.get(name), bool) and not ASIDE.search(name)}  # fmt: skip
    found |= {name: [given[name], "gelu" if given[name] == "relu" else "relu"]
              for name in ACTIVATIONS if isinstance(given.get(name), str)}  # fmt: skip
    for said in conditions(table_for(kind)):
        for key, value in re.findall(r"(\w+)!?=([\w|]+)", said):
            if key not in found and isinstance(given.get(key), (str, bool)) and not ASIDE.search(key):
                found.setdefault(key, [given[key]])
                if value not in map(str, found[key]):
                    found[key].append(value)
    heads = given.get("num_attention_heads")
    if isinstance(heads, int) and isinstance(given.get("num_key_value_heads"), int):
        found["num_key_value_heads"] = [heads, heads // 2 if heads % 2 == 0 else heads, 1]
    if "should be used as a decoder model" in source:  # only with `is_decoder`, see the cases called `cross`
        found.pop("add_cross_attention", None)
    return {**found, **MORE.get(kind, {})}


def conditions(table: Table) -> Iterator[str]:
    """All that the lines and notes of a table, and its spaces, ask of a configuration."""
    whens = [line.when for line in table.lines]
    whens += [note.when for line in table.lines for note in line.clauses]
    whens += [when for declared in table.spaces.values() for when, _ in declared.other]
    whens += [when for *_, when in table.same]
    yield from (condition.text for when in whens for condition in when)


def tried(options: dict[str, list[Any]], run: Callable[[Config], str]) -> list[tuple[Config, str]]:
    """Choices and what became of them, until every pair of values of two switches was in one that ran (greedy, the best
    of a few draws), or in several that did not."""
    draw = Random(0)
    if len(options) < 2:
        choices = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
        return [(chosen, run(chosen)) for chosen in choices]
    left = {(a, i, b, j): ATTEMPTS for a, b in combinations(options, 2)
            for i, j in product(range(len(options[a])), range(len(options[b])))}  # fmt: skip
    found: list[tuple[Config, str]] = []
    done: list[dict[str, int]] = []
    while left:
        best: dict[str, int] = {}
        gained: list[Any] = []
        for _ in range(DRAWS):
            a, i, b, j = draw.choice(list(left))
            places = {name: draw.randrange(len(values)) for name, values in options.items()} | {a: i, b: j}
            new = [pair for pair in left if places[pair[0]] == pair[1] and places[pair[2]] == pair[3]]
            if places not in done and len(new) > len(gained):
                best, gained = places, new
        if not best:  # all has been tried with this pair, or nearly
            del left[a, i, b, j]
            continue
        done.append(best)
        chosen = {name: options[name][place] for name, place in best.items()}
        found.append((chosen, run(chosen)))
        for pair in gained:
            left[pair] -= 1 if found[-1][1].startswith("not run") else ATTEMPTS
            if left[pair] <= 0:
                del left[pair]
    return found


def headed(config: PretrainedConfig) -> str:
    """The name of the class with a head that shows most, or of the base class."""
    towers = any(tower in config.sub_configs for tower in TOWERS)
    heads = ("IMAGE_TEXT_TO_TEXT",) if towers else HEADS
    mappings = [getattr(transformers, f"MODEL_FOR_{head}_MAPPING") for head in heads]
    found = next((head[type(config)] for head in mappings if type(config) in head), None)
    found = found or transformers.MODEL_MAPPING[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    return str(cls.__name__)


def outcome(kind: str, chosen: Config, place: Path) -> str:
    """What becomes of a combination: `holds`, or why it is not run, refused or wrong."""
    try:
        model = smallest(CONFIG_MAPPING[kind](**chosen))
    except Exception as error:  # each class refuses in its own way what does not go together
        return f"not run: {type(error).__name__} {error}"
    twin = Folder(zoo.save(model, place))
    try:
        assert twin.signature
    except ValueError as error:
        return f"refused: {error}"
    worst = _changed(twin, Canonical(twin, torch.float64), "invertible")
    return "holds" if worst < TOLERANCE else f"wrong: outputs change by {worst:.2g}"


def smallest(config: PretrainedConfig) -> PreTrainedModel:
    for scale in (Scale(4), Scale(8), Scale(16)):
        try:
            return build(config, headed(config), scale=scale, probes=probes)[0]
        except ModelError as error:
            last = error
    raise last


@pytest.mark.parametrize("kind", TODAY)
def test_tables_hold_for_every_pair_of_switches(kind: str, tmp_path: Path) -> None:
    found = tried(switches(kind), lambda chosen: outcome(kind, chosen, Path(mkdtemp(dir=tmp_path))))
    assert not [(result, chosen) for chosen, result in found if result.startswith(("wrong", "refused"))]
    assert any(result == "holds" for _, result in found)


def test_every_pair_of_values_is_tried() -> None:
    options = {"a": [0, 1], "b": [0, 1, 2], "c": [True, False], "d": [0, 1]}
    found = [chosen for chosen, _ in tried(options, lambda chosen: "holds")]
    pairs = {(a, x, b, y) for a, b in combinations(options, 2) for x in options[a] for y in options[b]}
    assert pairs == {(a, chosen[a], b, chosen[b]) for chosen in found for a, b in combinations(options, 2)}
    assert len(found) < 24


def test_pairs_are_tried_again_beside_others_where_a_class_does_not_run() -> None:
    """Falcon's new architecture does not run without parallel attention; its other pairs do."""

    def run(chosen: Config) -> str:
        return "not run" if chosen["new"] and not chosen["parallel"] else "holds"

    found = tried({"new": [True, False], "parallel": [True, False], "bias": [True, False]}, run)
    ran = [chosen for chosen, result in found if result == "holds"]
    assert {(chosen["new"], chosen["bias"]) for chosen in ran} == set(product([True, False], repeat=2))
