# SPDX-License-Identifier: Apache-2.0
"""What docs/families.json calls exact is, also for models of another size, and for texts of other lengths, padded or
generated: other types every day, all of them within a month, but for those of which it says that they take long."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from onebasin.models import ModelError
from onebasin.running import inference, twins
from onebasin.running.inference import proof, search, tracing
from onebasin.running.probes import unpadded
from onebasin.running.shrinking import Scale
from onebasin.symmetry import OtherTensors, TableError

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "families.json").read_text("utf-8"))
LONG = 4  # seconds on record; most types take one or two, a few whose twins keep all layers half a minute
EXACT = sorted(kind for kind, found in RECORD["types"].items() if found["exact"] and found.get("seconds", LONG) < LONG)
A_DAY, SECONDS = 100, 10
LARGER = Scale(head=16, heads=8)  # another size than those for which inference proves its tables
DAYS = -(-len(EXACT) // A_DAY)
ROUND, TODAY = divmod(date.today().toordinal(), DAYS)


def turn(kind: str) -> float:
    """Another order in every round of so many days, one slice of which is a day's."""
    return random.Random(f"{ROUND} {kind}").random()


@contextmanager
def patience() -> Iterator[None]:
    """Skip the test if the block takes too many seconds of computing, so that a busy machine skips no more."""

    def give_up(*_: object) -> None:
        pytest.skip(f"not proven within {SECONDS} s of computing, as `make families` does")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="nothing interrupts a proof that takes too long")
@pytest.mark.skipif(transformers.__version__ != RECORD["transformers"], reason="another release has other types")
@pytest.mark.parametrize("kind", sorted(EXACT, key=turn)[TODAY::DAYS])
def test_a_type_is_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with patience():
        found = inference.infer(kind)
        assert found.departure < 1e-9
        twin = described_twin(found.text, kind)
        with suppress(ModelError, OtherTensors):  # no such twin runs, or the table lists its layers by name
            larger = tracing.untraced(*twins.build(kind, type(twin.model), scale=LARGER))
            assert proof.proved(found.text, larger)[0] < 1e-9
        for use, inputs, forward in other_uses(twin.model, twin.inputs, monkeypatch):
            with monkeypatch.context() as patch:
                patch.setattr(twin.model, "forward", forward)
                other = replace(twin, inputs=inputs)
                with suppress(Exception):  # the class accepts no such inputs
                    assert other.outputs
                if "outputs" in vars(other):
                    assert proof.proved(found.text, other)[0] < 1e-9, use


def described_twin(text: str, kind: str) -> tracing.Traced:
    """Return a twin that a table describes: with all of its layers if it lists them by name."""
    twin = tracing.untraced(*twins.build(kind))
    try:
        proof._Proof.of(text, twin)
    except TableError:
        twin = tracing.untraced(*twins.build(kind, scale=Scale(kept=search.EVERY_LAYER)))
    return twin


def other_uses(
    model: PreTrainedModel, given: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Mapping[str, Any], Callable[..., Any]]]:
    """Yield inputs of other lengths, with padding, and as a start of what the model generates, which caches them; and
    the forward pass that returns what is to stay the same."""
    own, ids = model.forward, given.get("input_ids")
    if ids is None or ids.dim() != 2:
        return
    if given.keys() <= {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}:
        texts = [name for name in given if name.endswith("input_ids")]
        for length in (1, 5, 31):
            yield f"{length} tokens", {name: ids.repeat(1, 3)[:, :length] for name in texts}, own
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def padded(**inputs: Any) -> list[torch.Tensor]:
        return [unpadded(value, mask) for value in twins.floats_of(own(**inputs))]

    yield "padded", {**given, "attention_mask": mask}, padded

    def generated(**inputs: Any) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", own)
            found = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0,
                                   bos_token_id=1, decoder_start_token_id=1, output_logits=True,
                                   return_dict_in_generate=True)  # fmt: skip
        return list(found.logits)

    if model.can_generate():  # type: ignore[no-untyped-call]
        yield "generated", {name: value for name, value in given.items() if "decoder" not in name}, generated
