# SPDX-License-Identifier: Apache-2.0
"""Three BERTs for chemical reactions that come from one base, as model folders with a tokenizer, and rows for them.

    python examples/reaction_encoders.py -o reactions REACTIONS.jsonl[.gz] ...

The models are those of rxnfp 0.1.0 (MIT licence, 75 MB), which pip fetches from the package index: 12 layers, hidden
size 256, a vocabulary of 591 pieces of SMILES. `pretrained` is the masked language model that the other two were
fine-tuned from, `fingerprint` and `classes`. Its package has the tokenizer as code; here it is written as data.

Every file of REACTIONS (columns `text`, a reaction SMILES, and `label`, a class such as 1.7.9) is written to the same
folder with the first number as its label, one of ten kinds of reaction, for `examples/fine_tune.py`.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

from agave_chem import TOKEN
from packages import wheel
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from onebasin.data.files import read_rows

INSIDE = "rxnfp/models/transformers"
CLASSES = {"id2label": {str(i): f"LABEL_{i}" for i in range(50)}, "label2id": {f"LABEL_{i}": i for i in range(50)}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> folder in the package, and what its config.json leaves out
    "pretrained": ("bert_pretrained", {"model_type": "bert", "architectures": ["BertForPreTraining"]}),
    "fingerprint": ("bert_ft", {"model_type": "bert", "architectures": ["BertModel"]}),
    "classes": ("bert_ft_10k_25s", CLASSES),
}


def model_folder(package: Path, name: str, folder: Path) -> None:
    """One model of the wheel as an ordinary folder; its weights are pickled, and are read as data."""
    inside, added = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(package) as archive:
        (folder / "pytorch_model.bin").write_bytes(archive.read(f"{INSIDE}/{inside}/pytorch_model.bin"))
        config = {**json.loads(archive.read(f"{INSIDE}/{inside}/config.json")), **added}
        words = archive.read(f"{INSIDE}/{inside}/vocab.txt").decode().split("\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    tokenizer(words).save_pretrained(folder)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token for every atom, bond, bracket and arrow; `words` by id."""
    ids = {word: i for i, word in enumerate(words) if word}
    made = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = Split(Regex(TOKEN.pattern), "isolated")
    ends = [(word, ids[word]) for word in ("[CLS]", "[SEP]")]
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "PAD", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reactions", nargs="*")
    parser.add_argument("-o", "--output", required=True)
    args = parser.parse_args()
    work = Path(args.output)
    work.mkdir(parents=True, exist_ok=True)
    package = wheel("rxnfp", "0.1.0", work)
    for name in MODELS:
        model_folder(package, name, work / name)
    for file in args.reactions:
        rows = read_rows(file, ("text", "label"))
        lines = [json.dumps({"text": row["text"], "label": row["label"].split(".")[0]}) + "\n" for row in rows]
        (work / Path(file).name.removesuffix(".gz")).write_text("".join(lines), "utf-8")
    print(f"{work}: {', '.join(MODELS)}")


if __name__ == "__main__":
    main()
