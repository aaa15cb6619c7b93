# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile model folders: weights, shards, configs, pickles, links and tokenizers.

Each kind is a list of damages: `damage(folder, rng) -> expected`. HARMLESS says that the folder holds the same model as
before, so that a refusal is wrong; BROKEN that no reading of it is right, so that it must be refused; None leaves it
to the program, whose output is compared with the source as plain transformers reads it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import runpy
import shutil
import socket
import struct
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .cases import OK, REFUSED, Case, Finding, Outcome, Place
from .commands import judge, listing, run, shown
from .equality import compare, refuse_difference
from .folders import BASES, copied

HARMLESS, BROKEN = "harmless", "broken"
Damage = Callable[[Path, random.Random], str | None]
SECRET = "the secret of another folder"
CANARY = "canary"
HUGE = [10**9, 2**31, 2**63, 2**64 - 1, 10**30]
NASTY = ["", " ", "\n", "a\nb", "\0", "../..", "[/red]", "[link=x]", "<script>", "\x1b[31m", "é" * 300, "```", "%s",
    "{0}",
         "\ud800"]  # fmt: skip

# --- the header and the body of a safetensors file --------------------------------------------------------------------


def parts(folder: Path) -> tuple[Path, dict[str, Any], bytes]:
    """The weight file, its header and its numbers."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return file, json.loads(data[8 : 8 + size]), data[8 + size :]


def put(file: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def names(header: dict[str, Any], rng: random.Random, count: int = 1) -> list[str]:
    return rng.sample([name for name in header if name != "__metadata__"], count)


def truncated(folder: Path, rng: random.Random) -> str:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice([0, rng.randrange(9), rng.randrange(2000), rng.randrange(len(data))])])
    return BROKEN


def trailing(folder: Path, rng: random.Random) -> str | None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.choice([1, 8, 4096])))
    return BROKEN


def wrong_length(folder: Path, rng: random.Random) -> str:
    file, header, body = parts(folder)
    size = len(json.dumps(header))
    put(file, header, body, rng.choice([0, 1, 7, size - 1, size + 1, 100_000_001, 2**31, 2**63, 2**64 - 1]))
    return BROKEN


def offsets(folder: Path, rng: random.Random) -> str:
    file, header, body = parts(folder)
    one, other = names(header, rng, 2)
    begin, end = header[one]["data_offsets"]
    shift = rng.choice([1, 4, -4, 8, 2**20])
    header[one]["data_offsets"] = rng.choice([
        [begin + shift, end + shift], [end, begin], header[other]["data_offsets"], [begin, end - 4], [begin, end + 4],
        [-4, end], [begin, rng.choice(HUGE)], [rng.choice(HUGE), rng.choice(HUGE)], [begin], [], None, "0", [begin,
        None],
        [str(begin), str(end)], [begin, end, end], [float(begin) + 0.5, float(end)], [0, 2**64], [True, False],
    ])  # fmt: skip
    put(file, header, body)
    return HARMLESS if str(header[one]["data_offsets"]) == str([begin, end]) else BROKEN


def overlapping(folder: Path, rng: random.Random) -> str:
    """Two tensors of one shape that share their bytes."""
    file, header, body = parts(folder)
    found = [name for name in header if name != "__metadata__"]
    rng.shuffle(found)
    for one in found:
        for other in found:
            if one != other and header[one]["shape"] == header[other]["shape"]:
                header[one]["data_offsets"] = header[other]["data_offsets"]
                put(file, header, body)
                return BROKEN
    raise AssertionError("no two tensors of one shape")


def hole(folder: Path, rng: random.Random) -> str:
    """Bytes that belong to no tensor."""
    file, header, body = parts(folder)
    gap, at = rng.choice([4, 8, 4096]), header[names(header, rng)[0]]["data_offsets"][0]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= at:
            entry["data_offsets"] = [offset + gap for offset in entry["data_offsets"]]
    put(file, header, body[:at] + bytes(gap) + body[at:])
    return BROKEN


def dtype(folder: Path, rng: random.Random) -> str:
    file, header, body = parts(folder)
    (one,) = names(header, rng)
    old = header[one]["dtype"]
    header[one]["dtype"] = rng.choice([
        "I32", "U32", "F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "Q4", "f32", "", None, 32, [],
        {},
        "C64", "F4", "F6_E2M3",
    ])  # fmt: skip
    put(file, header, body)
    return HARMLESS if header[one]["dtype"] == old else BROKEN


def shape(folder: Path, rng: random.Random) -> str | None:
    file, header, body = parts(folder)
    (one,) = names(header, rng)
    old = header[one]["shape"]
    count = 1
    for size in old:
        count *= size
    header[one]["shape"] = rng.choice([
        old[::-1], [count], [1, *old], [*old, 1], [count, 1], [2**40, 2**40], [2**32, 2**32, count], [-1, -count], [],
        [0],
        None, "12", [str(size) for size in old], [[size] for size in old], [float(size) for size in old],
        [*old, 0, 2**63], [1] * 2000 + old, [old[0] + 1, *old[1:]],
    ])  # fmt: skip
    put(file, header, body)
    return HARMLESS if str(header[one]["shape"]) == str(old) else BROKEN


def duplicate(folder: Path, rng: random.Random) -> str | None:
    """One name twice in the JSON, of which readers may take the first or the last."""
    file, header, body = parts(folder)
    one, other = names(header, rng, 2)
    text = json.dumps(header)[:-1] + f", {json.dumps(one)}: {json.dumps(header[rng.choice([one, other])])}}}"
    put(file, text.encode(), body)
    return None


def renamed(folder: Path, rng: random.Random) -> str:
    file, header, body = parts(folder)
    (one,) = names(header, rng)
    new = rng.choice([*NASTY, "x" * 100_000, one + " ", one.upper(), "." + one, one.replace(".", "/")])
    header = {new if name == one else name: entry for name, entry in header.items()}
    put(file, header, body)
    return BROKEN


def not_json(folder: Path, rng: random.Random) -> str:
    file, header, body = parts(folder)
    text = json.dumps(header).encode()
    put(file, rng.choice([
        b"", b"[]", b"null", b"1", text[:-1], text[:-1] + b",}", b"\xff\xfe" + text, text.replace(b'"', b"'"),
        b'{"a":' * 50_000 + b"}" * 50_000, text.replace(b"0", b"NaN", 1), text + b"\0" * 8, b"\xef\xbb\xbf" + text,
        json.dumps({name: [entry] for name, entry in header.items()}).encode(), rng.randbytes(len(text)),
    ]), body)  # fmt: skip
    return BROKEN


def harmless_header(folder: Path, rng: random.Random) -> str:
    """The same tensors written in another way that the format allows."""
    file, header, body = parts(folder)
    way = rng.randrange(4)
    if way == 0:
        put(file, json.dumps(header).encode() + b" " * rng.choice([1, 8, 100]), body)
    elif way == 1:
        keys = list(header)
        rng.shuffle(keys)
        put(file, {key: header[key] for key in keys}, body)
    elif way == 2:
        put(file, {**header, "__metadata__": {"format": "pt", "note": rng.choice(NASTY[:-1])}}, body)
    else:  # the numbers in another order
        tensors = load_file(file)
        order = list(tensors)
        rng.shuffle(order)
        save_file({name: tensors[name] for name in order}, file, {"format": "pt"})
    return HARMLESS


def metadata(folder: Path, rng: random.Random) -> str | None:
    file, header, body = parts(folder)
    header["__metadata__"] = rng.choice([None, {}, [], "pt", {"format": "tf"}, {"format": 1}, {"format": "np"}, 7,
                                         {"format": ["pt"]}, {"format": "pt" * 10**6}])  # fmt: skip
    put(file, header, body)
    return None


def flipped(folder: Path, rng: random.Random) -> str | None:
    """Bits of the numbers, which may become huge, infinite or NaN."""
    file, header, body = parts(folder)
    data = bytearray(body)
    for _ in range(rng.choice([1, 3, 100])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    put(file, header, bytes(data))
    return None


def values(folder: Path, rng: random.Random) -> str | None:
    """Whole tensors, rows or all weights of unusual size."""
    tensors = load_file(folder / "model.safetensors")
    value = rng.choice([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 1e-30, 1e-20, 1e20, 1e30, 3e38])
    way = rng.choice(["one", "row", "scale", "all"])
    if way == "all":
        tensors = {name: tensor * value for name, tensor in tensors.items()}
    else:
        name = rng.choice(sorted(tensors))
        if not tensors[name].is_floating_point():  # an index vector has no room for such a value
            tensors[name] = tensors[name].double()
        if way == "one":
            tensors[name].reshape(-1)[rng.randrange(tensors[name].numel())] = value
        elif way == "row":
            tensors[name][rng.randrange(len(tensors[name]))] = value
        else:
            tensors[name] = tensors[name] * value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return BROKEN if any(not tensor.isfinite().all() for tensor in tensors.values()) else None


def tensors_changed(folder: Path, rng: random.Random) -> str | None:
    tensors = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(tensors))
    way = rng.choice(["lost", "more", "renamed", "cut", "integers", "scalar", "empty", "wide"])
    tensor = tensors.pop(name)
    if way == "more":
        tensors |= {name: tensor, rng.choice(["x", name + ".x", "lm_head.weight2"]): torch.ones(2)}
    elif way == "renamed":
        tensors[name.replace("0", "7", 1) if "0" in name else "x" + name] = tensor
    elif way == "cut":
        tensors[name] = tensor[:-1].contiguous()
    elif way == "wide":
        tensors[name] = torch.cat([tensor, tensor[-1:]])
    elif way == "integers":
        tensors[name] = tensor.to(rng.choice([torch.int8, torch.int64, torch.bool]))
    elif way == "scalar":
        tensors[name] = torch.tensor(1.0)
    elif way == "empty":
        tensors[name] = tensor[:0]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return BROKEN


def mixed_dtypes(folder: Path, rng: random.Random) -> str:
    """Every tensor in a dtype of its own: allowed."""
    tensors = load_file(folder / "model.safetensors")
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    save_file({name: tensor.to(rng.choice(kinds)) for name, tensor in tensors.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return HARMLESS


HEADER: list[Damage] = [
    truncated, trailing, wrong_length, offsets, offsets, overlapping, hole, dtype, shape, shape, duplicate, renamed,
    not_json, harmless_header, metadata, flipped, flipped, values, values, values, tensors_changed, tensors_changed,
    mixed_dtypes,
]  # fmt: skip

# --- shards and their index -------------------------------------------------------------------------------------------


def sharded(folder: Path, rng: random.Random, suffix: str = ".safetensors") -> tuple[Path, dict[str, Any]]:
    """Spread the weights over a few files. Returns the index's path and what it says."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    count = rng.randrange(2, 5)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    files = [f"{stem}-{number + 1:05}-of-{count:05}{suffix}" for number in range(count)]
    where = {name: files[number * count // len(tensors)] for number, name in enumerate(sorted(tensors))}
    for file in files:
        held = {name: tensors[name] for name in tensors if where[name] == file}
        if suffix == ".safetensors":
            save_file(held, folder / file, {"format": "pt"})
        else:
            torch.save(held, folder / file)
    said = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": where}
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps(said))
    return index, said


def whole_shards(folder: Path, rng: random.Random) -> str:
    index, said = sharded(folder, rng, rng.choice([".safetensors", ".bin"]))
    said["metadata"] = rng.choice([said["metadata"], {"total_size": 1}, {"total_size": "many"}, {}, {"x": [1]}])
    index.write_text(json.dumps(said))
    return HARMLESS


def index_text(folder: Path, rng: random.Random) -> str:
    index, said = sharded(folder, rng)
    text = json.dumps(said)
    index.write_bytes(rng.choice([
        b"", b"[]", b"null", text[:-2].encode(), b"\xff" + text.encode(), b"{}", b'{"weight_map": {}}',
        b'{"weight_map": []}', b'{"weight_map": "x"}', b'{"a":' * 20_000 + b"1" + b"}" * 20_000, text.encode("utf-16"),
    ]))  # fmt: skip
    return BROKEN


def index_entry(folder: Path, rng: random.Random) -> str | None:
    index, said = sharded(folder, rng)
    where = said["weight_map"]
    name = rng.choice(sorted(where))
    files = sorted(set(where.values()))
    way = rng.choice(["value", "value", "swap", "drop", "drop file", "all"])
    if way == "value":
        where[name] = rng.choice([
            *NASTY, None, 1, [], {}, True, "missing.safetensors", "../x/" + files[0], str(folder / files[0]),
            "./" + files[0], "config.json", "model-00001-of-00002.bin", "x/" + files[0], "..", ".", "/dev/zero",
        ])  # fmt: skip
    elif way == "swap":
        where[name] = next(file for file in files if file != where[name])
    elif way == "drop":
        del where[name]  # transformers loads it all the same
    elif way == "drop file":
        said["weight_map"] = {key: file for key, file in where.items() if file != files[0]}
    else:
        said["weight_map"] = dict.fromkeys(where, files[0])
    index.write_bytes(json.dumps(said).encode())
    return None if way == "drop" else BROKEN


def shard_harmed(folder: Path, rng: random.Random) -> str:
    _, said = sharded(folder, rng)
    one, other = rng.sample(sorted(set(said["weight_map"].values())), 2)
    way = rng.randrange(5)
    if way == 0:
        (folder / one).unlink()
    elif way == 1:
        (folder / one).write_bytes((folder / one).read_bytes()[: rng.randrange(500)])
    elif way == 2:
        (folder / one).write_bytes((folder / other).read_bytes())
    elif way == 3:
        tensors = load_file(folder / one)
        tensors.update(load_file(folder / other))  # again in two files
        save_file(tensors, folder / one, {"format": "pt"})
    else:
        (folder / one).unlink()
        (folder / one).mkdir()
    return BROKEN


def two_kinds(folder: Path, rng: random.Random) -> str | None:
    """Weights twice: as one file and in shards of other numbers. transformers takes the single file."""
    data = (folder / "model.safetensors").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    index, said = sharded(folder, rng)
    for file in set(said["weight_map"].values()):
        held = load_file(folder / file)
        save_file({name: tensor + 1 for name, tensor in held.items()}, folder / file, {"format": "pt"})
    if rng.random() < 0.5:
        (folder / "model.safetensors").write_bytes(data)
    else:
        index.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    return HARMLESS


SHARDS: list[Damage] = [whole_shards, index_text, index_entry, index_entry, shard_harmed, two_kinds]

# --- config.json ------------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def wrong_value(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = rng.choice(sorted(config))
    config[key] = rng.choice([
        None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, "x", "", "12", [], [1], {}, {"a": 1}, [[]], rng.choice(HUGE),
        rng.choice(NASTY), -rng.choice(HUGE), [config[key]], str(config[key]), {key: config[key]},
    ])  # fmt: skip
    path.write_bytes(json.dumps(config).encode())
    return None


def wrong_size(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = rng.choice([key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)])
    size = config[key]
    config[key] = rng.choice([size + 1, size - 1, 2 * size, *HUGE, float(size), -size])
    path.write_text(json.dumps(config))
    return None


def dropped(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in rng.sample(sorted(config), rng.choice([1, 1, 3])):
        del config[key]
    path.write_text(json.dumps(config))
    return None


def other_type(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    types = ["bert", "roberta", "gpt2", "llama", "t5", "clip", "vit", "mixtral", "deepseek_v3", "whisper", "llava",
        "birt",
             "encoder-decoder", "timm_wrapper", "mamba", "auto", "__class__", *NASTY, None, 1, [], {}]  # fmt: skip
    config["model_type"] = rng.choice([kind for kind in types if kind != config["model_type"]])
    path.write_bytes(json.dumps(config).encode())
    return None


def architectures(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = rng.choice([
        True, 1, 0, [], [None], [1], ["Nope"], ["os.system"], ["__builtins__"], "BertModel", {"a": 1}, [[]],
        ["AutoModel"],
        ["PreTrainedModel"], ["BertConfig"], ["BertTokenizer"], ["pipeline"], ["logging"], [rng.choice(NASTY)],
        ["T5ForConditionalGeneration"], ["LlamaForCausalLM"], ["CLIPModel"], ["BertModel", "Nope"],
        ["TrainingArguments"],
        ["EncoderDecoderModel"], ["GPT2DoubleHeadsModel"], [10**30],
    ])  # fmt: skip
    path.write_bytes(json.dumps(config).encode())
    return None


def code_beside(folder: Path, rng: random.Random) -> str | None:
    """Python files that the config points to, as for trust_remote_code."""
    (folder / "modeling_x.py").write_text(f"open({str(folder.parent / CANARY)!r}, 'w').close()\n")
    (folder / "__init__.py").write_text(f"open({str(folder.parent / CANARY)!r}, 'w').close()\n")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if rng.random() < 0.5:
        config["model_type"] = rng.choice([config["model_type"], "x", "modeling_x"])
    config["auto_map"] = {name: "modeling_x.X" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    config["trust_remote_code"] = True
    config["custom_pipelines"] = {"x": {"impl": "modeling_x.X", "pt": ["AutoModel"]}}
    path.write_text(json.dumps(config))
    return None


def special_keys(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key, value = rng.choice([
        ("quantization_config", {"quant_method": "bitsandbytes"}), ("quantization_config", None),
        ("transformers_weights", "x.safetensors"), ("_name_or_path", rng.choice(NASTY)), ("dtype", "float99"),
        ("torch_dtype", "os.system"), ("torch_dtype", ["float32"]), ("dtype", {"": "float32"}), ("text_config", {}),
        ("text_config", None), ("vision_config", {"model_type": "vit"}), ("attribute_map", {"hidden_size": "x"}),
        ("rope_scaling", {"type": "x"}), ("rope_scaling", {"rope_type": "yarn"}), ("rope_parameters",
        {"rope_type": "evil"}),
        ("rope_parameters", 3), ("id2label", {"x": 1}), ("id2label", ["a"]), ("label2id", 5), ("num_labels", 7),
        ("pruned_heads", {"0": [1]}), ("layer_types", ["x"]), ("layer_types", [None] * 3), ("pad_token_id", 10**9),
        ("pad_token_id", -1), ("_attn_implementation", "flash_attention_2"), ("attn_implementation", "x"),
        ("is_encoder_decoder", True), ("is_decoder", True), ("add_cross_attention", True), ("tie_word_embeddings",
        "no"),
        ("output_hidden_states", True), ("output_attentions", True), ("return_dict", False), ("torchscript", True),
        ("use_cache", None), ("_commit_hash", 5), ("__class__", "x"), ("self", 1), ("kwargs", {}), ("to_dict", 1),
        ("from_dict", None), ("get_text_config", 0), ("name_or_path", None), ("base_model_tp_plan", {"x": 1}),
        ("hidden_act", "os.system"), ("hidden_act", ["gelu"]), ("chunk_size_feed_forward", 7), ("sub_configs",
        {"x": 1}),
    ])  # fmt: skip
    config[key] = value
    path.write_bytes(json.dumps(config).encode())
    return None


def config_text(folder: Path, rng: random.Random) -> str | None:
    path = folder / "config.json"
    text = path.read_text()
    way = rng.randrange(14)
    path.write_bytes([
        b"", b"[]", b"null", b'"x"', text[:-3].encode(), text.encode("utf-16"), b"\xff\xfe\xfd", rng.randbytes(100),
        nested(20_000).encode(), (text[:-2] + ', "x": ' + nested(20_000) + "}").encode(),
        (text[:-2] + ', "x": ' + "{\"a\":" * 900 + "1" + "}" * 900 + "}").encode(), text.replace("12", "NaN",
        1).encode(),
        text.replace("12", "1e999", 1).encode(), (text[:-2] + ', "x": ' + "9" * 5000 + "}").encode(),
    ][way])  # fmt: skip
    return BROKEN if way < 9 else None


def harmless_config(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    more = {"note": rng.choice(NASTY[:-1]), "my_list": list(range(1000)), "nothing": None, "transformers_version": "99"}
    if rng.random() < 0.3:
        config.pop("transformers_version", None)
    path.write_text(json.dumps({**config, **more}, indent=rng.choice([None, 7])))
    return HARMLESS


CONFIG: list[Damage] = [
    wrong_value, wrong_value, wrong_value, wrong_value, wrong_size, wrong_size, dropped, dropped, other_type,
    other_type,
    architectures, architectures, code_beside, special_keys, special_keys, special_keys, config_text, harmless_config,
]  # fmt: skip

# --- pickles ----------------------------------------------------------------------------------------------------------


class Calls:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


def touches(folder: Path, rng: random.Random) -> Calls:
    """Something that would write the canary's file."""
    file = str(folder.parent / CANARY)
    return rng.choice([
        Calls(Path.touch, Path(file)), Calls(os.system, f"touch {file}"), Calls(eval, f"open({file!r}, 'w')"),
        Calls(exec, f"open({file!r}, 'w')"), Calls(open, file, "w"), Calls(os.mkdir, file), Calls(io.open, file, "w"),
        Calls(torch.save, {}, file), Calls(subprocess.call, ["touch", file]), Calls(os.popen, f"touch {file}"),
        Calls(shutil.copy, str(folder / "config.json"), file),
        Calls(runpy.run_path, str(folder / "modeling_x.py")),
    ])  # fmt: skip


def to_bin(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


def hostile(folder: Path, rng: random.Random) -> str:
    (folder / "modeling_x.py").write_text(f"open({str(folder.parent / CANARY)!r}, 'w').close()\n")
    tensors: dict[Any, Any] = to_bin(folder)
    evil = touches(folder, rng)
    held = rng.choice([{**tensors, "x": evil}, {**tensors, next(iter(tensors)): evil}, evil, [tensors, evil]])
    file = folder / "pytorch_model.bin"
    way = rng.randrange(4)
    if way == 0:
        torch.save(held, file, _use_new_zipfile_serialization=False)
    elif way == 1:
        file.write_bytes(pickle.dumps(evil, protocol=rng.randrange(6)))
    else:
        torch.save(held, file, pickle_protocol=rng.choice([2, 3, 4]))
    return BROKEN


def hostile_zip(folder: Path, rng: random.Random) -> str:
    """A torch file whose zip holds a pickle of another making."""
    tensors = to_bin(folder)
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as old:
        held = {name: old.read(name) for name in old.namelist()}
    evil = touches(folder, rng)
    for name in held:
        if name.endswith("data.pkl"):
            held[name] = rng.choice([
                pickle.dumps(evil), held[name] + pickle.dumps(evil),
                b"cos\nsystem\n(S'touch " + os.fsencode(folder.parent)
                + b"/canary'\ntR.", held[name][: rng.randrange(len(held[name]))], b"", b"\x80\x02.",
                b"\x80\x02" + b"(" * 100_000, held[name].replace(b"collections", b"builtins"),
                held[name].replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor"),
            ])  # fmt: skip
    with zipfile.ZipFile(file, "w") as new:
        for name, data in held.items():
            new.writestr(rng.choice(["../" + name, name, name]), data)
    return BROKEN


def odd_pickle(folder: Path, rng: random.Random) -> str | None:
    """Things that torch saves and that are no plain dictionary of whole tensors."""
    tensors: dict[Any, Any] = to_bin(folder)
    name = rng.choice(sorted(tensors))
    old = tensors[name]
    way = rng.randrange(16)
    ways: list[Callable[[], Any]] = [
        lambda: {"state_dict": tensors}, lambda: list(tensors.values()), lambda: {1: old}, lambda: {**tensors,
        name: None},
        lambda: {**tensors, name: old.to("meta")}, lambda: {**tensors, name: old.to_sparse()},
        lambda: {**tensors, name: torch.quantize_per_tensor(old, 0.1, 0, torch.qint8)},
        lambda: {**tensors, name: torch.zeros(1).expand(2**20, 2**20)}, lambda: {**tensors,
        name: old.to(torch.complex64)},
        lambda: {**tensors, name: torch.zeros(0)}, lambda: {**tensors, name: old.numpy()}, lambda: {},
        lambda: {**tensors, name: torch.zeros(1).expand(old.shape)}, lambda: old, lambda: {**tensors,
        name: old.to(torch.int8)},
        lambda: {**tensors, name: old.to(torch.float8_e4m3fn)},
    ]  # fmt: skip
    torch.save(ways[way](), folder / "pytorch_model.bin")
    return None if way == 12 else BROKEN


def harmless_pickle(folder: Path, rng: random.Random) -> str:
    tensors: dict[str, Any] = to_bin(folder)
    file = folder / "pytorch_model.bin"
    way = rng.randrange(5)
    if way == 0:
        torch.save(tensors, file, _use_new_zipfile_serialization=False)
    elif way == 1:
        torch.save(OrderedDict(tensors), file)
    elif way == 2:
        torch.save({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, file)
    elif way == 3:  # views of one storage
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        torch.save({name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}, file)
    else:
        torch.save({name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
                    for name, tensor in tensors.items()}, file)  # fmt: skip
    return HARMLESS


def cut_pickle(folder: Path, rng: random.Random) -> str:
    tensors = to_bin(folder)
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=rng.random() < 0.7)
    data = bytearray(file.read_bytes())
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
        return BROKEN
    file.write_bytes(rng.choice([b"", b"x", b"PK\x03\x04", rng.randbytes(1000), b"\x80\x05.", bytes(data[::-1])]))
    return BROKEN


def pickles_beside(folder: Path, rng: random.Random) -> str:
    """Hostile files that no one has to read."""
    evil = touches(folder, rng)
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "pytorch_model.bin",
        "tokenizer.pkl",
    ):
        (folder / name).write_bytes(pickle.dumps(evil))
    return HARMLESS


PICKLE: list[Damage] = [hostile, hostile, hostile, hostile_zip, hostile_zip, odd_pickle, odd_pickle, harmless_pickle,
                        cut_pickle, pickles_beside]  # fmt: skip

# --- links and special files ------------------------------------------------------------------------------------------

FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "LICENSE",
         "generation_config.json"]  # fmt: skip
NEEDED = {"config.json", "model.safetensors"}


def link_outside(folder: Path, rng: random.Random) -> str | None:
    """A file of the model that is a link to a secret outside of it."""
    name = rng.choice(FILES)
    secret = folder.parent / "elsewhere" / rng.choice(["secret", "secret.json", name])
    secret.parent.mkdir()
    old = folder / name
    if name in NEEDED and rng.random() < 0.5:
        secret.write_bytes(old.read_bytes())
    else:
        secret.write_text(json.dumps({"secret": SECRET}))
    old.unlink(missing_ok=True)
    target = secret if rng.random() < 0.5 else Path("..", "elsewhere", secret.name)
    old.symlink_to(target)
    return None


def link_chain(folder: Path, rng: random.Random) -> str | None:
    """The same through links within the folder."""
    outcome = link_outside(folder, rng)
    link = next(path for path in folder.iterdir() if path.is_symlink())
    link.rename(folder / "hop")
    link.symlink_to("hop")
    return outcome


def link_folder(folder: Path, rng: random.Random) -> str | None:
    """A folder of templates that is a link to a folder outside."""
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    (outside / "x.jinja").write_text(SECRET)
    (folder / "additional_chat_templates").symlink_to(outside)
    return None


def link_inside(folder: Path, rng: random.Random) -> str:
    """Links within the folder: it is the same model."""
    for name in rng.sample(["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"], rng.choice([1, 2, 4])):
        (folder / "blobs").mkdir(exist_ok=True)
        (folder / name).rename(folder / "blobs" / f"{name}.x")
        (folder / name).symlink_to(Path("blobs") / f"{name}.x")
    return HARMLESS


def link_model(folder: Path, rng: random.Random) -> str:
    """The folder itself is a link."""
    real = folder.rename(folder.with_name("real"))
    folder.symlink_to(real if rng.random() < 0.5 else real.name)
    return HARMLESS


def dangling(folder: Path, rng: random.Random) -> str | None:
    name = rng.choice(FILES)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(rng.choice(["nowhere", "/nowhere/x", name, "."]))
    return BROKEN if name in NEEDED else None


def special(folder: Path, rng: random.Random) -> str | None:
    """A pipe, a socket, a device or a folder where a file is expected: reading one would never end."""
    name = rng.choice(FILES)
    path = folder / name
    path.unlink(missing_ok=True)
    way = rng.choice(["pipe", "socket", "zero", "folder", "null", "unreadable"])
    if way == "pipe":
        os.mkfifo(path)
    elif way == "socket":
        here = os.getcwd()
        os.chdir(folder)  # an address is at most 108 bytes long
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(here)
    elif way == "folder":
        path.mkdir()
    elif way == "unreadable":
        path.symlink_to("/proc/self/mem")
    else:
        path.symlink_to(f"/dev/{way}")
    return BROKEN if name in NEEDED else None


LINKS: list[Damage] = [link_outside, link_outside, link_outside, link_chain, link_folder, link_inside, link_inside,
                       link_model, dangling, special, special]  # fmt: skip

# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer_text(folder: Path, rng: random.Random) -> str | None:
    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt",
                       "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"])  # fmt: skip
    (folder / name).write_bytes(rng.choice([
        b"", b"{", b"[]", b"null", b"1", rng.randbytes(200), b"\xff" * 50, nested(20_000).encode(), b"\0" * 100,
        b"{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}", "é\u2028".encode() * 100,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    ]))  # fmt: skip
    return None


def tokenizer_value(folder: Path, rng: random.Random) -> str | None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    bad = rng.choice([None, 1, "x", [], {}, True, [1], {"a": None}, rng.choice(HUGE), [None], [[]], {"a": []}, -1])
    way = rng.randrange(6)
    if way == 0:
        said["model"] = bad
    elif way == 1:
        said["model"]["vocab"] = bad
    elif way == 2:
        said["model"]["vocab"]["w3"] = bad
    elif way == 3:
        said["added_tokens"] = bad
    elif way == 4:
        said["added_tokens"] = [rng.choice([bad, {"id": bad, "content": "x"}, {"id": 3, "content": bad}, {}])]
    else:
        said["model"]["vocab"] = [["a", 1.0], bad]
    path.write_text(json.dumps(said))
    return None


def tokenizer_code(folder: Path, rng: random.Random) -> str | None:
    (folder / "tokenization_x.py").write_text(f"open({str(folder.parent / CANARY)!r}, 'w').close()\n")
    said = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}, "tokenizer_class": "X",
            "trust_remote_code": True}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return None


TOKENIZER: list[Damage] = [tokenizer_text, tokenizer_text, tokenizer_value, tokenizer_value, tokenizer_code]

KINDS: dict[str, list[Damage]] = {
    "header": HEADER, "shards": SHARDS, "config": CONFIG, "pickle": PICKLE, "links": LINKS, "tokenizer": TOKENIZER,
}  # fmt: skip

# --- the command that meets it ----------------------------------------------------------------------------------------

LEVELS = ["paper", "permutation", "orthogonal", "full", "invertible"]


def words(case: Case, base: str, where: Path) -> tuple[list[str], list[str], str]:
    """The command that meets the damaged folder `x`, what it may write, and the folder whose function its output has
    ("" where it has none of one model)."""
    rng = case.draw("command")
    x, a, out = str(where / "x"), str(where / "a"), str(where.parent / "out")
    level = rng.choice(LEVELS)
    verify = ["--verify", rng.choice(["outputs", "outputs", "tensors"])]
    common = ["-o", out, "--workers", "1", *verify]
    if base != "bert" and rng.random() < 0.3:
        common += ["--dtype", rng.choice(["float16", "bfloat16", "float64"])]
    name = rng.choice(["match", "match", "match-to", "merge", "merge-first", "distance", "inspect", "check", "peek",
                       "verify", "canonical", "tokenizers"])  # fmt: skip
    if name == "match":
        return ["match", x, a, *common, "--symmetry", level], ["out", "out-anchor"], "x"
    if name == "match-to":
        return ["match", a, x, *common, "--symmetry", level], ["out", "out-anchor"], "a"
    if name == "canonical":
        return ["canonical", x, "-o", out, *verify], ["out"], "x"
    if name.startswith("merge"):
        pair = [x, a] if name == "merge-first" else [a, x]
        return ["merge", *pair, *common, "--match", rng.choice(["none", level])], ["out"], ""
    if name == "tokenizers":
        source = ["--tokenizer-source", rng.choice(["union", "base", x])]
        return ["merge", x, a, *common, "--match", level, *source], ["out"], ""
    plain = {"distance": [x, a], "inspect": [x], "check": [x, a], "peek": [x, a, "--peek"], "verify": [a, x]}
    return ["check" if name == "peek" else name, *plain[name]], [], ""


def try_damage(case: Case, place: Place) -> Outcome:
    """Damage a folder, give it to a command, and look at what it says, writes and leaves behind."""
    rng = case.draw()
    base = rng.choice(sorted(BASES))
    where = place.room / "in"
    x, _ = copied(place.shared, f"{base}-b", where / "x"), copied(place.shared, f"{base}-a", where / "a")
    damage = KINDS[case.kind][rng.randrange(len(KINDS[case.kind]))]
    expected = damage(x, rng)
    told, new, same = words(case, base, where)
    tried = f"{damage.__name__} ({base}): {shown(told, place.room)}"
    before = listing(place.room)
    try:
        said = run(told)
        if (where / CANARY).exists():
            raise Finding("code ran")
        codes = {"verify": (0, 1, 2), "check": (0, 1, 2)}.get(told[0], (0, 2))
        outcome = judge(said, before, place.room, new=new, codes=codes)
        looks = told[0] in ("match", "merge", "canonical", "verify")
        if said.code == 0 and expected == BROKEN and looks:
            raise Finding(f"accepted what is broken, exit code {said.code}")
        if outcome.word == REFUSED:
            wrong_refusal(outcome.said, expected == HARMLESS)
        if outcome.word == OK and same:
            equal(where / same, place.room / "out", told)
        no_secret(place.room / "out")
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    return Outcome(outcome.word, outcome.said, tried)


def wrong_refusal(said: str, harmless: bool = False) -> None:
    """Raise Finding where a model was refused without need: it is harmless, or what was made of it was wrong."""
    if harmless or any(word in said for word in ("differs from the original", "are off by", "its maps are wrong")):
        raise Finding(f"wrong refusal: {said}")


def equal(source: Path, out: Path, told: list[str]) -> None:
    """Raise Finding where an output is another function than its source; nothing where the source does not load."""
    try:
        refuse_difference(source, out, told)
    except Finding:
        raise
    except Exception as error:
        try:
            compare(source, source)
        except Exception:
            return
        text = " ".join(str(error).split())[:300]
        raise Finding(f"the output does not load: {type(error).__name__} {text}") from None


def no_secret(out: Path) -> None:
    for path in out.rglob("*") if out.is_dir() else ():
        if path.is_file() and SECRET.encode() in path.read_bytes():
            raise Finding(f"the content of a file outside the model is in the output: {path.name}")
