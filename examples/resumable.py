# SPDX-License-Identifier: Apache-2.0
"""Training that goes on where it was stopped, to the same weights, for the examples that train models from seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onebasin.engine import bfloat16_is_faster
from onebasin.engine.placing import appearing_file

WEIGHT_DECAY = 0.1
Loss = Callable[[PreTrainedModel], Tensor]  # draws a batch and returns the loss on it


def train(
    new_model: Callable[[], PreTrainedModel],
    loss_of: Loss,
    kept: Path,
    how: dict[str, Any],
    rate: float,
    every: int,
    weight_decay: float = WEIGHT_DECAY,
) -> PreTrainedModel:
    """AdamW, one cycle of the learning rate; initial weights and batches from the seed.

    Args:
        new_model: Makes the model.
        loss_of: Draws its batch from torch's default generator.
        kept: File that the whole state is put into every so many steps, from which a stopped run continues.
        how: What the run depends on: `seed`, `steps`, `bfloat16` and more. A run with other settings is not continued.
        rate: The largest learning rate.
        every: So many steps.
        weight_decay: Of all parameters.
    """
    steps, bfloat16 = how["steps"], how["bfloat16"]
    torch.manual_seed(how["seed"])
    model = new_model()
    if bfloat16:
        model.set_attn_implementation("eager")  # a third faster than fused attention in bfloat16 on a CPU
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=weight_decay)
    rising = max(0.05, 2 / steps)  # at least two steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=rising)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        if state["how"] != how:
            raise SystemExit(f"'{kept}' belongs to a run with other settings; delete it or choose another output")
        for name, one in parts.items():
            one.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        done = state["done"]
    for step in range(done + 1, steps + 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0:
            print(f"seed {how['seed']}, step {step} of {steps}: training loss {loss.item():.3f}", flush=True)
            state = {name: one.state_dict() for name, one in parts.items()}
            with appearing_file(kept) as temporary:
                torch.save({**state, "how": how, "random": torch.get_rng_state(), "done": step}, temporary)
    return model.eval()


def warn_of_slow_bfloat16() -> None:
    if not bfloat16_is_faster("cpu"):
        print("bfloat16 is slower than float32 on this machine: leave out --bfloat16", flush=True)
