# SPDX-License-Identifier: Apache-2.0
"""Every job on a device of its own: no tensor stays on the CPU by oversight, and the result is that of the CPU.

test_devices.py runs this file in a process of its own: autograd counts devices once, at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from pairs import folders, weights

import onebasin

Job = Callable[..., Any]
SELF = {"data": "self", "samples": 16, "context": 8}
MATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("LlamaForCausalLM", {}),
    "full": ("GPT2LMHeadModel", {}),
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


def test_measuring(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "LlamaForCausalLM")
    text = tmp_path / "text.jsonl"
    text.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 4)
    task: dict[str, Any] = {"task": "causal-lm", "data": text, "context": 8, "device": elsewhere.NAME}
    assert onebasin.evaluate(a, **task).loss > 0
    assert len(onebasin.barrier(a, b, points=3, **task).losses) == 3
    assert onebasin.verify(a, a, device=elsewhere.NAME).same


def test_the_device_refuses_tensors_of_the_cpu() -> None:
    there = torch.ones(3, device=elsewhere.NAME)
    assert there.device.type == elsewhere.NAME and (there + 1).cpu().tolist() == [2, 2, 2]
    for mixed in (lambda: there + torch.ones(3), lambda: torch.ones(3) @ there, lambda: torch.ones(3)[there.long()],
                  there.numpy, lambda: torch.randn(3, generator=torch.Generator(), device=elsewhere.NAME)):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError), match="CPU"):
            mixed()
