# SPDX-License-Identifier: Apache-2.0
"""Write what the code already knows into the documentation: `python docs/generate.py`.

docs/commands.md comes from the command line's own definitions and the text below, onebasin/cli/help.json from those of
the commands that take long to import, docs/families.md from the tables, from the audits that `python docs/audits.py`
has recorded, from what `make families` has found, docs/images/results.svg from the table of docs/results.md. A test
fails when one of them is not current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from onebasin.cli import HELP, LATE, app, described, loaded
from onebasin.families import tables

ROOT = Path(__file__).parents[1]

INTRODUCTION = """\
# Commands

A model is a Hugging Face model folder or a hub id (`owner/name`, `owner/name@revision`). `onebasin COMMAND --help`
prints the same descriptions.

- **Exit code** 0: success. 1: `verify` found different functions, `check` found that the models cannot be matched,
  `audit` found a difference, or a merge fell short of `--require`. 2: bad input; one line on stderr says what is wrong,
  where, and what to do, and nothing is written. 130: interrupted.
- **`--json`** prints one JSON object on stdout. Progress, notes and errors always go to stderr.
- **Output** is written beside its final place and moved there when it is complete: a run that fails or is killed leaves
  no partial model. An existing output is replaced only with `--overwrite`.
- **Weights** are read from safetensors, in one file or several, or from `pytorch_model.bin` by a loader that runs no
  code.

This page is generated: `python docs/generate.py`.
"""

MORE = {
    "inspect": """\
```sh
onebasin inspect A
onebasin inspect A --match paper --tensors
```

JSON: `model`, `family`, `tensors` (their number), `symmetry`, `dimension`, `spaces` and `axes` (tensor -> its axes).
Each space has `space`, `also` (names that share its map), `size`, `copies`, `kind`, `group`, `dimension` and `tensors`.
""",
    "check": """\
```sh
onebasin check A B
onebasin check A B --match full --peek
```

Only configs, tensor headers, vocabularies and model cards are read. JSON: `can_match` and `reason` (why not);
`symmetry`, `moves` (space -> group) and `fixed` (spaces on which nothing acts); what differs: `rows` (positions) and
`widened` (space -> sizes), `heads` (of different tasks, not matched), `only_a`, `only_b`, and `untied`; `vocabulary`
(`size_a`, `size_b`, `agreeing`, and `first`: the first ids that stand for different tokens; null if a folder has no
vocabulary); `ancestors` (named by each config and model card) and `common_ancestors`; and estimates: `memory` (level ->
bytes for matching, beside those of the program itself) and `seconds` (level -> time on this machine), both for models
that are close and for others; and `verify_memory` (bytes for `--verify outputs`).

Models with vocabularies of the same size but with different tokens can be matched, but not usefully merged: look at
`vocabulary`. With `--peek`, `peek` has the name of a `tensor` and its `cosine` between the two models: near 1, they
have a common base; near 0, they were trained apart, or one of them was rewritten.
""",
    "match": """\
```sh
onebasin match A B -o matched
onebasin match A B -o matched-ffn --parts ffn --layers 0-1
```

JSON: `output`, `anchor`, `distance_before`, `distance_after`, `max_output_difference`, `seconds`; also `symmetry`,
`rescale`, `objective` (before, then after every sweep), `notes`, and `alignment` and `anchor_output` where they were
written. Distances are Euclidean, over the parameters that both models have.

The levels are explained in [concepts.md](concepts.md). `orthogonal`, `full` and `invertible` rewrite both models in
canonical form; the anchor's is written to OUTPUT-anchor, and that is what the output is close to.

`--adapter DIR` also rewrites a LoRA adapter of A (a folder written by `peft`): the output with the rewritten adapter
computes what A computes with the adapter. JSON then has `adapter_output` too. At levels that rotate the residual
stream, this needs a model with RMSNorms: an adapter cannot hold the biases that these levels move.
""",
    "merge": """\
```sh
onebasin merge A B -o merged
onebasin merge A B C -o merged-three --anchor 0 --weights 0.5,0.25,0.25
onebasin merge A B -o plain --match none
```

Without a method, a level or another setting of matching, the command [chooses them itself](merge.md). The methods are
explained in [methods.md](methods.md).

JSON: as `match`, but `anchor` is a number, and `distance_before`, `distance_after` and `max_output_difference` are
lists over the other models; also `method`, its `settings`, `match` and `weights`. Progressive merging adds `ridges`
(layer -> its ridge in every bag) and `held_out_losses` (of the plain average and the fitted model), RegMean `jitter`
(layer -> what was added to the diagonal, relative to its mean). If the command chose: `kinship` (`cosine`, `kind`)
and, if it tried several ways, `search`: `budget` in seconds, `chosen`, `candidates` (each with its `loss` on held-out
data, in nats, and its `seconds`), `data` and `held_out` (examples). `verdict` has `works`, `agreement`,
`sources_agree`, `divergence`, `sources_diverge`, `judged_on` and `predictions`. With `--require`, `required` says
whether that share was reached; if not, the exit code is 1.

mergekit's methods, such as `--method ties`, do not need a file: use `--base MODEL`, `--set density=0.5` and
`--weights 1,0.5`.

`--layers auto` merges once for every candidate, and once more to write the best. JSON: `layers` (those that were
matched) and `tried` (layers -> score on the validation data).

Task heads with different numbers of classes or names of labels are not averaged. They are copied from the anchor, or
from the model that `--heads-from` names, and a note says so.

`--config FILE` reads a file in [mergekit's schema](mergekit.md). JSON then also has `models`, and, if the file has a
block `align`, `anchor` and distances.

Models whose vocabularies differ are refused unless `--tokenizer-source` says which to take. `--push-to-hub owner/name`
uploads the finished folder, with the token that `hf auth login` or `HF_TOKEN` gives; JSON then has `hub`, its address.
""",
    "statistics": """\
```sh
onebasin statistics demo/model-0 --kind fisher --data builtin:digits --samples 32 -o model-0.fisher
```

JSON: `output`, `kind`, `samples` (examples measured), `tensors` (their number), `notes`. See [methods.md](methods.md).
""",
    "evaluate": """\
```sh
onebasin evaluate demo/model-0 demo/model-1 --task image-classification --data builtin:digits
```

JSON: `task`, `data` and `results`: for every model `model`, `loss`, `accuracy` (not of regression) and the metrics of
the task: `macro_f1`, `micro_f1`, `matthews` (classification), `entity_f1` (tags such as B-PER), `pearson`, `spearman`
(regression), `perplexity` (language models). F1, Matthews and entities need `pip install 'onebasin[data]'`. A metric
that is undefined for the given examples is omitted.
""",
    "verify": """\
```sh
onebasin verify A A
```

JSON: `same`, `max_difference` (of any output), `relative_difference` (to the largest output).
""",
    "distance": """\
```sh
onebasin distance A B
```

JSON: `distance`, `relative` (to the norm of B), `parts`, `layers`.
""",
    "canonical": """\
```sh
onebasin canonical A -o normal-form
```

JSON: `output`, `max_output_difference`, `notes`, `seconds`.
""",
    "barrier": """\
```sh
onebasin barrier demo/model-0 demo/model-1 -o line --task image-classification --data builtin:digits --match full
```

JSON, also written as barrier.json beside barrier.png: `lambdas`, `losses`, `accuracies`, `barrier`, `end_losses`. It
needs `pip install 'onebasin[plot]'`.
""",
    "env": """\
```sh
onebasin env
```

JSON: the same facts, by name.
""",
    "families": """\
```sh
onebasin families
```

JSON: family -> `types` (the `model_type` of config.json) and `spaces` (those that can move -> kind).
""",
    "demo": """\
```sh
onebasin demo -o demo
```

JSON, also written as results.json: `models`, `pair`, `all`, `curves`, `picture`, `seconds`. It needs no
network, and for the picture `pip install 'onebasin[plot]'`.
""",
}


def commands() -> str:
    """The text of docs/commands.md."""
    group: Any = typer.main.get_command(app)
    pieces = [INTRODUCTION]
    for name, command in _each(group):
        arguments = " ".join(word for param in command.params if _is_argument(param) for word in [_metavar(param)])
        pieces.append(f"## {name}\n\n    onebasin {name} {arguments}".rstrip() + " [OPTIONS]\n")
        pieces.append(" ".join(command.help.split()) + "\n")
        if name in MORE:
            pieces.append(MORE[name])
        pieces.append("\n".join(_rows(command)) + "\n")
    return "\n".join(pieces)


def _each(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The commands of a group and of the groups inside it, with their full names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _each(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", loaded(name) if name in LATE and not prefix else command


def _rows(command: Any) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for param in command.params:
        if param.name in ("help", "install_completion", "show_completion"):
            continue
        text = param.help
        if _is_argument(param):
            yield f"| {_metavar(param)} | {text} |"
            continue
        names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
        default = param.default
        if default is not None and default is not False and default != () and "[default" not in text:
            shown = param.opts[0] if default is True else default
            text += f" [default: {shown}]"
        yield f"| {names} | {text} |"


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


FAMILIES = """\
# Families

These are the tables by hand; for all other types of `transformers` they are [inferred](inference.md), and
[all types](#all-model-types) stand at the end.
A family is one table in `onebasin/families`. What may act on a space is not written there alone: it is what all tensors
and norms that touch the space allow. The largest group of a space of size n, for every head or layer that has its own:

| kind | moves | dimension |
|---|---|---|
| permutation | places | 0 |
| odd | places and signs | 0 |
| relu | places and positive scales | n |
| ones | rotations that keep the all-ones direction, under a LayerNorm | (n - 1) (n - 2) / 2 |
| orthogonal | rotations, under an RMSNorm | n (n - 1) / 2 |
| linear | any invertible map (inside a head; elsewhere rotations and one scale) | n^2 (elsewhere n (n - 1) / 2 + 1) |
| rotary, interleaved | a complex number per pair of dimensions | n |
| pair turns, next turns | a rotation per pair of dimensions | n / 2 |
| pair signs, next signs, signs | signs of pairs, or of dimensions | 0 |
| factor | a number other than zero | n |

The audit counts, for a tiny model in float64 with random parameters, the directions in parameter space that leave all
outputs as they are (free), and those that the table generates: its groups, and what the canonical form removes. Where
both are the same number, and no generated direction changes an output, the table is complete. The third column has the
spaces of that tiny model that move: kind, size, and the dimension over all heads and layers. `python docs/audits.py`
counts again; `onebasin audit TYPE` does so for one type and settings of your own.

"""
VARIANTS = """

## Other configurations

Configurations with symmetries of their own are counted apart. A clip (`clip_qkv`) has to bind for some tokens and not
for others: one that never binds leaves the symmetries of a model without it, and one that nearly always does hides most
weights.

| model type | configuration | settings | parameters | free | generated | audit |
|---|---|---|---|---|---|---|
"""
TYPES = """

## All model types

What `make families` found for every type that transformers registers. Exact: random elements of every group leave the
outputs of tiny models as they are, in float64. Moves: the share of the matrices that an inferred table moves. Fits: it
also describes the tensors of a model of the default configuration; empty where the class refuses that, and `no` also
where it contradicts itself. Seconds: of computing with one thread, to infer the table the first time. Complete: the
audit finds no direction beyond what the inferred table generates; empty where it was not counted.

| model type | by | exact | moves | fits | seconds | complete | why not |
|---|---|---|---|---|---|---|---|
"""
LONGEST = 120  # characters of a reason
ANSWERS = {True: "yes", False: "no"}


def type_rows() -> list[str]:
    """Return a row for every model type of docs/families.json."""
    rows = []
    for kind, found in json.loads((ROOT / "docs" / "families.json").read_text("utf-8"))["types"].items():
        reason = " ".join(found.get("reason", "").split()).replace("|", "/").replace("<", "").replace(">", "")
        cells = [
            "hand" if found["source"] == "table" else "inference",
            "yes" if found["exact"] else "no",
            f"{found['free']:.0%}".replace("%", " %") if "free" in found else "",
            ANSWERS.get(found.get("fits"), ""),
            str(found.get("seconds", "")),
            ANSWERS.get(found.get("complete"), ""),
            reason if len(reason) <= LONGEST else reason[:LONGEST].rsplit(" ", 1)[0] + " ...",
        ]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    return rows


def family_page() -> str:
    """The text of docs/families.md."""
    audits = json.loads((ROOT / "docs" / "audits.json").read_text("utf-8"))
    lines = [f"{FAMILIES}| family | model types | spaces | parameters | free | generated | audit |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, table in tables().items():
        kind = next(kind for kind in audits if kind in table.types)
        found = audits[kind]
        spaces = ", ".join(f"{space}: {what} {size} ({count})" for space, (what, size, count)
                           in found.get("spaces", {}).items())  # fmt: skip
        numbers = _counts(found)
        counted = f"{found['dimension']} of {found['nullity']}" if "nullity" in found else ""
        partly = "; ".join(filter(None, [counted, found.get("reason")]))
        verdict = "complete" if found.get("complete") else partly or "not counted"
        lines.append(f"| {name} | {', '.join(table.types)} | {spaces} | {numbers} | {verdict} ({kind}) |")
    variants = []
    for name, found in audits.items():
        kind, _, what = name.partition(": ")
        settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in found["settings"].items())
        verdict = "complete" if found.get("complete") else "not complete"
        if what:
            variants.append(f"| {kind} | {what} | {settings} | {_counts(found)} | {verdict} |")
    return "\n".join(lines) + VARIANTS + "\n".join(variants) + TYPES + "\n".join(type_rows()) + "\n"


def _counts(found: dict[str, Any]) -> str:
    return " | ".join(str(found.get(key, "")) for key in ("parameters", "nullity", "dimension"))


BARS = (("plain average", "#9aa0a6"), ("matched", "#4477aa"), ("with data", "#228833"))
CHART = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="13">
<rect width="720" height="{height}" fill="white"/>
{body}
</svg>
"""


def results_chart() -> str:
    """Return the headline table of docs/results.md as bars: how much of what the plain average loses is still lost.

    An error of more than 100 % (Whisper repeats itself) is as bad as silence.
    """
    lines = (ROOT / "docs" / "results.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.count("|") == 8]
    drawn, y = [], 34
    for place, (name, colour) in enumerate(BARS):
        drawn.append(f'<rect x="{220 + 130 * place}" y="8" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{238 + 130 * place}" y="19">{name}</text>')
    for pair, ends, *values in (row[:5] for row in rows if "results/" in row[-1]):
        numbers = [[min(100.0, float(one)) for one in re.findall(r"[0-9.]+", cell)] for cell in (ends, *values)]
        end, plain = sum(numbers[0]) / len(numbers[0]), numbers[1][0]
        drawn.append(f'<text x="208" y="{y + 20}" text-anchor="end">{pair}</text>')
        for place, found in enumerate(numbers[1:]):
            if found:
                left = max(0.0, (end - found[0]) / (end - plain))
                top = y + 10 * place
                drawn.append(
                    f'<rect x="220" y="{top}" width="{max(1.0, 440 * left):.1f}" height="9" fill="{BARS[place][1]}"/>'
                )
                drawn.append(f'<text x="{226 + 440 * left:.1f}" y="{top + 8}" font-size="9">{100 * left:.0f} %</text>')
        y += 42
    return CHART.format(height=y, body="\n".join(drawn))


def help_texts() -> str:
    """The text of onebasin/cli/help.json."""
    return json.dumps({name: described(name) for name in LATE}, indent=1) + "\n"


if __name__ == "__main__":
    HELP.write_text(help_texts(), "utf-8")
    (ROOT / "docs" / "images" / "results.svg").write_text(results_chart(), "utf-8")
    (ROOT / "docs" / "commands.md").write_text(commands(), "utf-8")
    (ROOT / "docs" / "families.md").write_text(family_page(), "utf-8")
