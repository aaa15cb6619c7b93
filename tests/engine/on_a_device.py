# SPDX-License-Identifier: Apache-2.0
"""Every job on a device of its own: no tensor stays on the CPU by oversight, and the result is that of the CPU.

test_devices.py runs this file in a process of its own: autograd counts devices once, at its first use.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from pairs import folders, weights
from safetensors.torch import load_file

import onebasin

Job = Callable[..., Any]
SELF = {"data": "self", "samples": 16, "context": 8}
MATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("LlamaForCausalLM", {}),
    "permutation": ("GPT2LMHeadModel", {}),
    "orthogonal": ("BertForSequenceClassification", {}),
    "full": ("GPT2LMHeadModel", {}),
    "full of grouped heads": ("LlamaForCausalLM", {"rescale": "joint"}),
    "full by activations": ("LlamaForCausalLM", {"match_with": "activations", **SELF}),
    "invertible by activations, learned": (
        "LlamaForCausalLM", {"match_with": "learned", "start": "activations", "steps": 3, **SELF},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _device(three_sweeps: None) -> Iterator[None]:
    elsewhere.register()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Parameters stay themselves, as when they move to a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(swaps)


def alike(job: Job, out: Path) -> None:
    """Run a job that writes a model on both devices."""
    for device in ("cpu", elsewhere.NAME):
        job(out / device, device=device, precision="float64")
    there = weights(out / elsewhere.NAME)
    for name, tensor in weights(out / "cpu").items():
        torch.testing.assert_close(there[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", MATCHED)
def test_matching(how: str, tmp_path: Path) -> None:
    case, settings = MATCHED[how]
    a, b = folders(tmp_path, case)
    alike(partial(onebasin.match, b, a, match=how.split()[0], **settings), tmp_path)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        *((name, {}) for name in onebasin.METHODS),
        ("progressive", {"spread": True}),
        ("progressive", {"select": True, "match": "full"}),
    ],
)
def test_merging(method: str, how: dict[str, Any], tmp_path: Path) -> None:
    models = folders(tmp_path, "LlamaForCausalLM")
    judged = method == "average"  # the others would be judged alike
    alike(partial(onebasin.merge, models, method=method, verdict=judged, **{"match": "none", **how, **SELF}), tmp_path)


def test_merging_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebasin.jobs.search.candidates.ROUNDS", 1)
    monkeypatch.setattr("onebasin.jobs.search.Setup.has_time", lambda *_: False)  # for more than one closed form
    models = folders(tmp_path, "LlamaForCausalLM", apart=1.0)
    alike(partial(onebasin.merge, models, samples=16, context=8), tmp_path)


def test_distilling(tmp_path: Path) -> None:
    models = folders(tmp_path, "LlamaForCausalLM")
    job = partial(onebasin.refine, models[0], models, steps=2, data="self", samples=64, context=8)
    alike(lambda out, device, precision: job(out, device=device), tmp_path)  # in float32, as models train


def test_a_merge_file(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "LlamaForCausalLM")
    config = tmp_path / "merge.yml"
    models = ", ".join(f"{{model: {one}, parameters: {{weight: {weight}}}}}" for weight, one in enumerate((a, b), 1))
    config.write_text(f"{{merge_method: linear, align: {{match: full}}, models: [{models}]}}")
    alike(partial(onebasin.merge_config, config), tmp_path)


def test_choosing_layers(tmp_path: Path) -> None:
    models = folders(tmp_path, "LlamaForCausalLM")
    task: dict[str, Any] = {"task": "causal-lm", "validation": _text(tmp_path), "context": 8}
    alike(partial(onebasin.merge_best_layers, models, match="paper", **task), tmp_path)


@pytest.mark.parametrize("kind", ["fisher", "gram"])
def test_statistics(kind: str, tmp_path: Path) -> None:
    (model,) = folders(tmp_path, "LlamaForCausalLM", 1)
    files = {device: tmp_path / f"{device}.safetensors" for device in ("cpu", elsewhere.NAME)}
    for device, file in files.items():
        onebasin.statistics(model, file, kind, canonical=True, device=device, precision="float64", **SELF)
    here, there = (load_file(file) for file in files.values())
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, atol=1e-5, rtol=1e-4)


def test_measuring(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "LlamaForCausalLM")
    task: dict[str, Any] = {"task": "causal-lm", "data": _text(tmp_path), "context": 8}
    there = {**task, "device": elsewhere.NAME}
    assert onebasin.evaluate(a, **there).loss == pytest.approx(onebasin.evaluate(a, **task).loss, rel=1e-4)
    losses = [onebasin.barrier(a, b, points=3, match="full", **each).losses for each in (there, task)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_verifying(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "LlamaForCausalLM")
    onebasin.match(b, a, tmp_path / "matched", match="paper", alignment=tmp_path / "maps")
    assert onebasin.verify(a, a, device=elsewhere.NAME).same
    moved = {"tensors": True, "alignment": tmp_path / "maps", "tolerance": 1e-4}
    assert onebasin.verify(b, tmp_path / "matched", **moved, device=elsewhere.NAME).same


def test_every_job_that_takes_a_device_is_here() -> None:
    jobs = {name: job for name in onebasin.__all__ if inspect.isfunction(job := getattr(onebasin, name))}
    run = re.findall(r"onebasin\.(\w+)[(,]", Path(__file__).read_text("utf-8"))
    assert {name for name, job in jobs.items() if _takes_a_device(job)} == jobs.keys() & set(run)


def _takes_a_device(job: Job) -> bool:
    """Whether a job knows the word: it refuses all others before it does anything."""
    given = {name: "" for name, each in inspect.signature(job).parameters.items() if each.default is each.empty
             and each.kind is not each.VAR_KEYWORD}  # fmt: skip
    try:
        job(**given, device="nowhere")
    except Exception as refused:
        return "'device'" not in str(refused)
    raise AssertionError(f"{job.__name__} runs on a device that is not there")


def _text(where: Path) -> Path:
    text = where / "text.jsonl"
    text.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 4)
    return text


def test_the_device_refuses_tensors_of_the_cpu() -> None:
    there = torch.ones(3, device=elsewhere.NAME)
    assert there.device.type == elsewhere.NAME and (there + 1).cpu().tolist() == [2, 2, 2]
    for mixed in (lambda: there + torch.ones(3), lambda: torch.ones(3) @ there, lambda: torch.ones(3)[there.long()],
                  there.numpy, lambda: torch.randn(3, generator=torch.Generator(), device=elsewhere.NAME)):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError), match="CPU"):
            mixed()
