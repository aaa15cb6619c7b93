# SPDX-License-Identifier: Apache-2.0
"""No command takes a number that makes no sense, whichever of its options it is given to."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import typer
from pairs import folder
from typer.models import ArgumentInfo

from onebasin.cli import LATE, app, callback_of

WORDS = {
    "match": "A B -o OUT",
    "merge": "A B -o OUT",
    "refine": "A --teachers B -o OUT --data DATA",
    "statistics": "A -o OUT --data DATA",
    "barrier": "A B -o OUT --task causal-lm --data DATA",
    "evaluate": "A --task causal-lm --data DATA",
    "verify": "A B",
    "check": "A B",
    "audit": "gpt2",
    "demo": "-o OUT",
    "study levels": "A B -o OUT --task causal-lm --data DATA",
    "study simplex": "A B A -o OUT --task causal-lm --data DATA",
}
BAD: dict[type, tuple[str, ...]] = {int: ("-1", "9" * 30), float: ("nan", "inf", "-inf", "-1", "1e300")}


def numbers(app: typer.Typer = app, before: str = "") -> list[tuple[str, str, str]]:
    """Every command, every option of it that is a number, every bad value."""
    found = []
    for group in app.registered_groups:
        found += numbers(group.typer_instance, f"{before}{group.name or group.typer_instance.info.name} ")
    for command in app.registered_commands:
        callback = callback_of(command.name) if command.name in LATE else command.callback
        for option in signature(callback, eval_str=True).parameters.values():
            kind, info = get_args(option.annotation)[:2] if get_origin(option.annotation) is Annotated else (None, None)
            number = next((one for one in (int, float) if one in (kind, *get_args(kind))), None)
            if number is None or isinstance(info, ArgumentInfo) or info.count:
                continue
            name = next((word for word in info.param_decls or () if word.startswith("--")), None)
            name = name or "--" + option.name.replace("_", "-")
            words = before + (command.name or command.callback.__name__).replace("_", "-")
            found += [(words, name, value) for value in BAD[number]]
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    where = tmp_path_factory.mktemp("numbers")
    rows = [{"input_ids": [3, 7, 5, 11]}, {"input_ids": [2, 9, 4]}]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = {name: str(folder(where / name, "GPT2LMHeadModel", seed)) for seed, name in enumerate("AB")}
    return {**models, "DATA": str(where / "rows.jsonl")}


@pytest.mark.parametrize(("command", "option", "value"), numbers())
def test_every_number_has_bounds(
    command: str, option: str, value: str, places: dict[str, str], refused: Any, tmp_path: Path
) -> None:
    given = {**places, "OUT": str(tmp_path / "out")}
    words = [given.get(word, word) for word in WORDS[command].split()]
    line = refused(*command.split(), *words, option, value)
    assert option.strip("-").split("-")[0] in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--starts", "0"), "starts 0: it must be greater than or equal to 1"),
        (("--tensor-weight", "x=nan"), "tensor-weights x nan"),
        (("--tensor-weight", "x=-2"), "tensor-weights x -2.0: it must be greater than or equal to 0"),
        (("--tensor-weight", "=2"), "write NAME=NUMBER"),
        (("--weights", "inf,1"), "weights 0 inf"),
        (("--weights", "0,0"), "the weights are all 0"),
        (("--soft", "0"), "soft 0.0: it must be greater than 0"),
        (("--method", "ot", "--entropy", "1e300"), "entropy 1e+300"),
        (("--mask-share", "0"), "mask-share 0.0"),
        (("--context", "1"), "context 1"),
        (("--maskable", "1,1000000"), "maskable"),
        (("--out-shard-size", "9" * 400 + "GB"), "is not a shard size"),
    ],
)
def test_what_a_merge_refuses(
    options: tuple[str, str], words: str, places: dict[str, str], refused: Any, tmp_path: Path
) -> None:
    assert words in refused("merge", places["A"], places["B"], "-o", tmp_path / "out", *options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameters: {weight: .nan}", "parameters.weight"),
        ("parameters: {weight: -.inf}", "parameters.weight"),
        ("parameters: {weight: nan}", "parameter 'weight' 'nan'"),
        ("parameters: {weight: 1.0e+300}", "parameter 'weight' 1e+300"),
        ("parameters: {weight: [1, 1.0e+300]}", "parameter 'weight' 1e+300"),
        ("parameters: {weight: [{value: .inf, filter: mlp}, {value: 1}]}", "parameters.weight"),
        ("parameters: {weight: 1}\nalign: {starts: 0}", "align: starts 0: it must be greater than or equal to 1"),
        ("parameters: {weight: 1}\nalign: {steps: -5}", "align: steps -5"),
        ("parameters: {weight: 1}\nalign: {samples: 0}", "align: samples 0"),
        ("parameters: {weight: 1}\nalign: {layers: [-1]}", "align: layers 0 -1"),
    ],
)
def test_what_a_merge_file_refuses(text: str, words: str, places: dict[str, str], refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(f"merge_method: linear\nmodels: [{{model: {places['A']}}}, {{model: {places['B']}}}]\n{text}\n")
    assert words in refused("merge", "--config", file, "-o", tmp_path / "out")
