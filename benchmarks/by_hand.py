# SPDX-License-Identifier: Apache-2.0
"""The tables by hand beside what is inferred of the same models.

    python -m benchmarks.by_hand [TYPE ...] [-o FILE]

Three tiny models of every type with a table, their sizes and switches drawn at random, are opened with both tables.
What is compared: the number of independent directions in which each lets the parameters move (`generated` of an
audit), and the groups that act, space by space. What FILE says already is kept.
FILE: {"transformers": version, "types": {TYPE: [{"table", "inferred", "lost", "won"}, ...]}}; `lost` and `won` are
groups that act by one table alone, `{"Permutation of 8": 2}`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebasin.models import Folder
    from onebasin.symmetry import Signature

DRAWS = 3
TRIES = 4  # of a draw, until a class takes what was drawn
FILE = Path(__file__).parents[1] / "docs" / "by_hand.json"
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2,), "encoder_layers": (2,), "decoder_layers": (2,), "num_decoder_layers": (2,),
    "num_attention_heads": (2, 4), "num_key_value_heads": (2, 1), "intermediate_size": (5, 6, 7),
    "vocab_size": (20, 22), "max_position_embeddings": (4, 5), "tie_word_embeddings": (True, False),
    "attention_bias": (False, True), "mlp_bias": (False, True), "qkv_bias": (True, False), "use_bias": (True, False),
}  # fmt: skip
_LATENT = {"num_attention_heads": (2,), "num_key_value_heads": (2,), "hidden_size": (6, 8), "q_lora_rank": (4, 5),
           "kv_lora_rank": (4, 6), "qk_rope_head_dim": (2, 4), "qk_nope_head_dim": (2, 4), "v_head_dim": (3, 4),
           "first_k_dense_replace": (1,), "n_routed_experts": (4,), "n_group": (1, 2), "topk_group": (1,)}  # fmt: skip
OWN: dict[str, dict[str, tuple[Any, ...]]] = {  # sizes that other types lack, or that this one calls otherwise
    "deepseek_v2": {**_LATENT, "topk_method": ("greedy", "group_limited_greedy")},
    "deepseek_v3": _LATENT,
    "swin": {"depths": ([1, 1],), "num_heads": ([2, 2],), "embed_dim": (4, 6), "image_size": (8,), "window_size": (2,),
             "mlp_ratio": (1.0, 1.5)},
    "xlnet": {"d_model": (8,), "d_inner": (5, 6)},
}  # fmt: skip


def types() -> list[str]:
    """The model types with a table that transformers knows."""
    from transformers import CONFIG_MAPPING

    from onebasin.families import tables

    return [kind for table in tables().values() for kind in table.types if kind in CONFIG_MAPPING]


def settings(kind: str, draw: int) -> Iterator[dict[str, Any]]:
    """Yield settings of a tiny model, drawn at random: sizes, and what the table tells apart and is on or off, but for
    what makes another model."""
    from transformers import CONFIG_MAPPING

    from onebasin.families import table_for
    from onebasin.studies.tiny_models import takes

    random_number = random.Random(f"{kind} {draw}")
    found = sorted(set(re.findall(r"(\w+)!?=(?:True|False)", str(table_for(kind)))))
    switches = [name for name in found if not re.search("decoder|cross|weighted", name)]
    choices = {**CHOICES, **dict.fromkeys(switches, (False, True))}
    taken = {name: values for name, values in choices.items() if takes(CONFIG_MAPPING[kind], name)}
    taken |= OWN.get(kind, {})
    for _ in range(TRIES):
        yield {name: random_number.choice(values) for name, values in taken.items()}


def built(kind: str, draw: int, folder: str) -> Folder:
    """Write a tiny model of a type, and open it with its table: one that an audit can take, if there is one."""
    import torch

    from onebasin.models import Folder
    from onebasin.running import twins
    from onebasin.running.shrinking import Scale
    from onebasin.studies.random_points import random_point
    from onebasin.studies.tiny_models import tiny_model

    for drawn in settings(kind, draw):
        try:
            tiny_model(kind, **drawn).save_pretrained(folder)
            random_point(found := Folder(folder), torch.Generator())
            return found
        except (ValueError, AttributeError, RuntimeError, LookupError, TypeError):  # each class refuses in its own way
            continue
    twins.build(kind, None, draw, Scale(4 + 2 * draw))[0].float().save_pretrained(folder)
    return Folder(folder)


def groups(signature: Signature) -> Counter[str]:
    """Return what acts, `Orthogonal of 8`, and on how many spaces."""
    from onebasin.symmetry import acting_groups

    found: Counter[str] = Counter()
    for root, group in acting_groups(signature, "invertible", rescale="joint").items():
        space = signature.spaces[root]
        found[f"{type(group).__name__} of {space.size}"] += prod(signature.sizes[outer] for outer in space.batch)
    return found


def dimension(model: Folder) -> int:
    """Return the number of independent directions that a model's table generates; of a larger one, what its groups
    have."""
    import torch

    from onebasin.studies.random_points import random_point
    from onebasin.symmetry import acting_groups
    from onebasin.symmetry.audit.null_space import tied_span

    try:
        return tied_span(*random_point(model, torch.Generator().manual_seed(0))).shape[1]
    except ValueError:  # too large
        spaces, sizes = model.signature.spaces, model.signature.sizes
        return sum(
            group.dimension(sizes[root]) * prod(sizes[outer] for outer in spaces[root].batch)
            for root, group in acting_groups(model.signature, "invertible", rescale="joint").items()
        )


def compared(kind: str, draw: int) -> dict[str, Any]:
    """Return what both tables say of one model."""
    from onebasin.models import Folder, ModelError
    from onebasin.running import inference

    with tempfile.TemporaryDirectory() as folder:
        try:
            by_hand = built(kind, draw, folder)
        except ModelError as error:
            return {"table": 0, "inferred": 0, "reason": str(error)}
        before = {"table": dimension(by_hand)}
        inferred = Folder(folder)
        try:
            inferred.read_by(inference.of_config(by_hand.raw_config).table)
        except ModelError as error:
            return {**before, "inferred": 0, "reason": str(error)}
        one, other = groups(by_hand.signature), groups(inferred.signature)
        return {**before, "inferred": dimension(inferred), "lost": dict(one - other), "won": dict(other - one)}


def equal(found: Mapping[str, Any]) -> bool:
    """Whether both tables let a model move alike."""
    return found["table"] == found["inferred"] and not found.get("lost") and not found.get("won")


def causes(kind: str) -> str:
    """Return what the table of a type says of the difference: its comments `# More than inference (TYPE): ...` and
    `# Less than inference (TYPE): ...`."""
    from onebasin import families

    text = (Path(families.__file__).parent / f"{families.table_for(kind).family}.txt").read_text("utf-8")
    found = re.findall(r"(?m)^# (More|Less) than inference(?: \((.*?)\))?: (.*)$", text)
    return "; ".join(("less: " if word == "Less" else "") + cause.rstrip(".") for word, kinds, cause in found
                     if not kinds or kind in kinds.split(", "))  # fmt: skip


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the comparison as a table in Markdown, a line per type."""
    rows = ["| type | table | inferred | what the table knows more, or less |", "|---|---|---|---|"]
    for kind, draws in found.items():
        by_hand, inferred = (", ".join(str(each[word]) for each in draws) for word in ("table", "inferred"))
        rows.append(f"| {kind} | {by_hand} | {inferred} | {causes(kind)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types, compared anew (default: all that FILE lacks)")
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known: dict[str, Any] = json.loads(args.output.read_text("utf-8")) if args.output.exists() else {}
    if known.get("transformers") != transformers.__version__:
        known = {"transformers": transformers.__version__, "types": {}}
    for kind in args.types or types():
        if args.types or kind not in known["types"]:
            known["types"][kind] = draws = [compared(kind, draw) for draw in range(DRAWS)]
            print(kind, *((each["table"], each["inferred"]) for each in draws), flush=True)
            known["types"] = {kind: known["types"][kind] for kind in types() if kind in known["types"]}
            args.output.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
