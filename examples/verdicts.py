# SPDX-License-Identifier: Apache-2.0
"""How well the verdict on a merge, which knows no labels, foretells the merged model's accuracy.

    python examples/verdicts.py A B [C ...] --task TASK --data LABELLED -o verdicts.jsonl [--calibrate UNLABELLED]
    python examples/verdicts.py --draw verdicts.png -o verdicts.jsonl

The first form merges the models in many ways, good and bad, evaluates every result on labelled data, and adds a row to
the file for each. The second draws all rows, the accuracy that is left beside the agreement that is left, and counts
how many broken merges the verdict names, and how many good ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import onebasin
from onebasin.data import evaluate, load_model, load_task

LEVELS = ("none", "paper", "permutation", "full")
METHODS = ("progressive", "regmean")
VERDICTS = ((True, "tab:blue", "works"), (False, "tab:red", "BROKEN"), (None, "tab:gray", "not judged"))
BROKEN = 0.8  # a merge that keeps less of its sources' accuracy above chance is broken


def ways(data: str, read: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a merge -> what makes it."""
    given = {"data": data, **read}
    found: dict[str, dict[str, Any]] = {"no options": {}}
    found |= {f"{level}, average": {"match": level} for level in LEVELS}
    found["full by activations, average"] = {"match": "full", "match_with": "activations", **given}
    found |= {f"{level}, {method}": {"match": level, "method": method, **given}
              for level in ("none", "full") for method in METHODS}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--task")
    parser.add_argument("--data", help="labelled, to evaluate on")
    parser.add_argument("--calibrate", default="self", help="unlabelled, for the ways that look at data")
    parser.add_argument("--vocabulary")
    parser.add_argument("--context", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--chance", type=float, default=0.0, help="the accuracy of a guess")
    parser.add_argument("--draw", type=Path)
    given = parser.parse_args()
    if given.draw:
        rows = [json.loads(line) for line in given.output.read_text("utf-8").splitlines()]
        draw(rows, given.draw)
        print(counted(rows))
        return
    read = {name: getattr(given, name) for name in ("vocabulary", "context") if getattr(given, name) is not None}
    task = load_task(given.task, given.data, given.models[0], limit=given.limit, **read)
    ends = [evaluate(load_model(model, given.task), task).accuracy for model in given.models]
    best = sum(ends) / len(ends) - given.chance
    for name, how in ways(given.calibrate, read if given.calibrate != "self" else {}).items():
        with tempfile.TemporaryDirectory() as scratch:
            result = onebasin.merge(given.models, f"{scratch}/merged", verify=False, **how)
            accuracy = evaluate(load_model(f"{scratch}/merged", given.task), task).accuracy
        row = {"models": given.models, "way": name, "accuracy": accuracy, "ends": ends,
               "kept": (accuracy - given.chance) / best, "verdict": result["verdict"]}  # fmt: skip
        with given.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name:<30} keeps {row['kept']:.2f} of the accuracy; {result['notes'][-1]}", flush=True)


def counted(rows: list[dict[str, Any]]) -> str:
    """Return how many broken merges the verdict names, and how many good ones."""
    said = [(row["kept"] < BROKEN, row["verdict"]["works"]) for row in rows]
    broken, good = ([works for is_broken, works in said if is_broken is which] for which in (True, False))
    return (f"of {len(broken)} broken merges, {broken.count(False)} are named and {broken.count(None)} not judged; of "
            f"{len(good)} good ones, {good.count(False)} and {good.count(None)}")  # fmt: skip


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw accuracy kept against agreement kept, with a colour for each verdict."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.5))
    for works, colour, label in VERDICTS:
        some = [row for row in rows if row["verdict"]["works"] is works]
        kept = [sum(row["verdict"]["agreement"]) / len(row["verdict"]["agreement"]) / row["verdict"]["sources_agree"]
                for row in some]  # fmt: skip
        if some:
            axes.scatter(kept, [row["kept"] for row in some], c=colour, label=label, alpha=0.7)
    axes.set_xlabel("agreement with the sources / agreement of the sources")
    axes.set_ylabel("accuracy above chance, as a share of the ends'")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
