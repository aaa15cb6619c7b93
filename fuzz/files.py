# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files besides models: merge files, adapters, saved alignments, and tables."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from . import damage
from .cases import REFUSED, Case, Finding, Outcome, Place
from .commands import judge, listing, run, shown
from .damage import BROKEN, CANARY, HUGE, NASTY, equal, wrong_refusal
from .folders import copied

MERGE = """merge_method: linear
models:
- model: {where}/a
  parameters: {{weight: 0.5}}
- model: {where}/b
  parameters: {{weight: 0.5}}
dtype: float32
"""
LAYERS = """merge_method: passthrough
slices:
- sources:
  - {{model: {where}/a, layer_range: [0, 1]}}
- sources:
  - {{model: {where}/b, layer_range: [1, 2]}}
"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{letter}: &{letter} [{', '.join(['*' + before] * 9)}]\n" for before, letter in zip("abcdefgh", "bcdefghi",
    strict=True)
)  # fmt: skip


def merge_file(where: Path, rng: random.Random) -> tuple[list[str], str | None]:
    """A merge file with a value replaced, or of another kind altogether."""
    text = rng.choice([MERGE, LAYERS]).format(where=where)
    file, canary = where / "file.yml", where / CANARY
    values = [
        "null", "true", "-1", "1e999", ".nan", "[]", "{}", "[[]]", "x", "''", str(rng.choice(HUGE)),
        json.dumps(rng.choice(NASTY)),
        "[0, 1000000000]", "[1, 0]", "[0]", f'!!python/object/apply:os.system ["touch {canary}"]', "!!binary x",
        "*nothing",
        "&a [*a]", "2001-01-01", "0x10", "task_arithmetic", "ties", "dare_linear", "slerp", "../..", "/dev/zero",
        str(where),
    ]  # fmt: skip
    if rng.random() < 0.7:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].rpartition(": ")
        lines[at] = f"{key}{colon}{rng.choice(values)}" if colon else rng.choice(values)
        text = "\n".join(lines)
    else:
        text = rng.choice([
            "", "[]", "x", "\0", "{", "- " * 5000 + "x", "[" * 20_000, BOMB + text, text + text, text + "x: 1\n",
            "\t" + text,
            f'!!python/object/apply:os.system ["touch {canary}"]', f"!!python/name:os.system\n{text}", "é" * 1000,
            text.replace("linear", "nearswap"), text.replace("model:", "models:"), "---\n" + text + "---\n" + text,
        ])  # fmt: skip
    file.write_text(text, "utf-8", "surrogatepass")
    return ["merge", "--config", str(file), "-o", str(where.parent / "out")], None


def adapter(where: Path, rng: random.Random) -> tuple[list[str], str | None]:
    """A damaged adapter of the model that is rewritten."""
    folder, expected = where / "adapter", None
    if rng.random() < 0.6:
        file = folder / "adapter_model.safetensors"
        harm = rng.choice(ANYWHERE)
        file.rename(folder / "model.safetensors")
        harm(folder, rng)
        (folder / "model.safetensors").rename(file)
    else:
        path = folder / "adapter_config.json"
        said: dict[str, Any] = json.loads(path.read_text())
        more = {"use_dora": True, "rank_pattern": {"x": 1}, "alpha_pattern": {"[": 2}, "modules_to_save": ["x"],
            "bias": "all",
                "auto_map": {"x": "y"}, "use_rslora": True, "fan_in_fan_out": True,
                "layers_to_transform": 7}  # fmt: skip
        key = rng.choice(sorted({**said, **more}))
        said[key] = rng.choice(
            [more.get(key), None, 0, -1, "x", [], {}, True, rng.choice(HUGE), 0.5, [[]], rng.choice(NASTY)]
        )
        path.write_bytes(json.dumps(said).encode())
    out = ["-o", str(where.parent / "out"), "--workers", "1"]
    return ["match", str(where / "a"), str(where / "b"), *out, "--adapter", str(folder)], expected


def alignment(where: Path, rng: random.Random) -> tuple[list[str], str | None]:
    """A damaged file of maps."""
    folder = where / "maps"
    folder.mkdir()
    shutil.copy(where / "maps.safetensors", folder / "model.safetensors")
    harm = rng.choice(ANYWHERE)
    expected = harm(folder, rng)
    (where / "maps.safetensors").unlink()
    (folder / "model.safetensors").rename(where / "maps.safetensors")
    folder.rmdir()
    maps = ["--alignment", str(where / "maps.safetensors")]
    return ["verify", str(where / "a"), str(where / "near"), "--tensors", *maps], BROKEN if expected == BROKEN else None


def table(where: Path, rng: random.Random) -> tuple[list[str], str | None]:
    """A table with lines or words lost, doubled or exchanged."""
    lines = files("onebasin.families").joinpath("bert.txt").read_text("utf-8").splitlines()
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(lines))
        words = lines[at].split()
        way = rng.randrange(6)
        if way == 0:
            del lines[at]
        elif way == 1:
            lines.insert(at, rng.choice(lines))
        elif way == 2 and words:
            lines[at] = lines[at].replace(
                rng.choice(words), rng.choice([*NASTY[:-1], "stream", "(", ")", "[", "|", "'", "; if", "1"]), 1
            )
        elif way == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif way == 4:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] += rng.choice(
                [" ; if __import__('os')", " ; from 10**9", "(" * 5000, " x" * 5000, " ; tied x", "'"]
            )
    file = where / "table.txt"
    file.write_text("\n".join(lines), "utf-8")
    command = rng.choice(["inspect", "canonical", "match", "merge"])
    out = [] if command == "inspect" else ["-o", str(where.parent / "out")]
    models = [str(where / "a"), str(where / "b")][: 1 if command in ("inspect", "canonical") else 2]
    return [command, *models, *out, "--table", str(file)], None


ANYWHERE = [
    damage.truncated, damage.trailing, damage.wrong_length, damage.offsets, damage.overlapping, damage.hole,
    damage.dtype,
    damage.shape, damage.renamed, damage.not_json, damage.flipped, damage.values, damage.metadata, damage.mixed_dtypes,
]  # fmt: skip
WAYS: list[Callable[[Path, random.Random], tuple[list[str], str | None]]] = [
    merge_file,
    merge_file,
    adapter,
    alignment,
    table,
]


def try_files(case: Case, place: Place) -> Outcome:
    """Damage a file, give it to the command that reads it, and look at what that says, writes and leaves behind."""
    rng = case.draw()
    where = place.room / "in"
    for letter in "ab":
        copied(place.shared, f"bert-{letter}", where / letter)
    copied(place.shared, "adapter", where / "adapter")
    way = rng.choice(WAYS)
    if way is alignment:
        made = run(["match", where / "a", where / "b", "-o", where / "near", "--alignment", where / "maps.safetensors"])
        assert made.code == 0, made.stderr
    told, expected = way(where, rng)
    tried = f"{way.__name__}: {shown(told, place.room)}"
    before = listing(place.room)
    try:
        said = run(told)
        if (where / CANARY).exists():
            raise Finding("code ran")
        codes = (0, 1, 2) if told[0] == "verify" else (0, 2)
        outcome = judge(said, before, place.room, new=["out", "out-adapter", "out-anchor"], codes=codes)
        if said.code == 0 and expected == BROKEN:
            raise Finding("accepted what is broken")
        if outcome.word == REFUSED and way is not table:
            wrong_refusal(outcome.said)
        if outcome.word != REFUSED and told[0] in ("match", "canonical"):
            equal(where / "a", place.room / "out", told)
    except Finding as finding:
        raise Finding(f"{finding}\n{tried}") from None
    return Outcome(outcome.word, outcome.said, tried)
