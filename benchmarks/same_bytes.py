# SPDX-License-Identifier: Apache-2.0
"""Do two versions of onebasin write the same bytes? What match, merge and canonical write at every level, as hashes.

    python -m benchmarks.same_bytes before.json        # on one commit
    python -m benchmarks.same_bytes after.json         # on another, on the same machine
    diff before.json after.json

Tiny random models of ten families, and the demo's models where `--demo FOLDER` names them. Only the public functions
are called, so that the script runs on old commits, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import onebasin

LEVELS = ("paper", "permutation", "orthogonal", "full", "invertible")
_TEXT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 3}),
    "gemma": ("GemmaForCausalLM", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_TEXT, "rotary_pct": 0.5}),
    "bert": ("BertForMaskedLM", _TEXT),
    "opt": ("OPTForCausalLM", {"vocab_size": 40, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 20,
                               "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}),
    "vit": ("ViTForImageClassification", {**_TEXT, "image_size": 8, "patch_size": 4, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2,
                                          "num_heads": 4, "decoder_start_token_id": 0}),
}  # fmt: skip


def tiny(kind: str, config: dict[str, object], seed: int) -> PreTrainedModel:
    """A random model, all of its parameters away from where they begin."""
    torch.manual_seed(seed)
    cls = getattr(transformers, kind)
    model: PreTrainedModel = cls(cls.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def written(folder: Path) -> str:
    """The hash of a folder's weights and config, without the notes about the run."""
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.safetensors*")), folder / "config.json"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def hashes(a: Path, b: Path, out: Path) -> Iterator[tuple[str, str]]:
    """What every job writes for the pair: its name and the hash, or the reason why it was refused."""
    jobs = {f"match {level}": lambda to, level=level: onebasin.match(a, b, to, symmetry=level) for level in LEVELS}
    jobs |= {f"merge {level}": lambda to, level=level: onebasin.merge([a, b], to, match=level, verdict=False)
             for level in ("none", *LEVELS)}  # fmt: skip
    jobs["canonical"] = lambda to: onebasin.canonical(a, to)
    for number, (name, run) in enumerate(jobs.items()):
        to = out / str(number)
        try:
            run(to)
            yield name, written(to)
        except ValueError as error:
            yield name, f"refused: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the hashes are written, as JSON")
    parser.add_argument("--demo", type=Path, help="the folder that `onebasin demo` wrote")
    given = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for family, (kind, config) in FAMILIES.items():
            places = [Path(scratch) / f"{family}-{seed}" for seed in (0, 1)]
            for seed, place in enumerate(places):
                tiny(kind, config, seed).save_pretrained(place)
            found |= {f"{family}: {name}": one for name, one in hashes(*places, Path(scratch) / f"{family}-out")}
        if given.demo:
            pair = (given.demo / "model-0", given.demo / "model-1")
            found |= {f"demo: {name}": one for name, one in hashes(*pair, Path(scratch) / "demo-out")}
    given.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
