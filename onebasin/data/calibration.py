# SPDX-License-Identifier: Apache-2.0
"""Calibration data: inputs on which activations are measured. Nothing that a model is evaluated on, and no labels but
for learning on the task's own loss."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebasin.settings import Strength, checked

from .batches import IGNORED, Source, pixel_values
from .digits import digits
from .files import kind, read_rows
from .models import configured
from .tasks import Task, load_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Tensor]
WRITTEN_AT_ONCE = 256  # sequences
SHOWN = ("input_ids", "pixel_values", "input_features")  # to a model
NOISY_COPIES = 8  # of every example


@torch.no_grad()
def self_generated(
    models: Sequence[PreTrainedModel], count: int = 256, length: int | None = None, seed: int = 0, batch: int = 32
) -> list[Batch]:
    """`count` sequences that causal language models write themselves, in batches {"input_ids": (batch, length)}.

    The first token is drawn uniformly from the vocabulary, all others from the model's own prediction at temperature
    1. The models take turns, so each writes its share of every batch; which sequences come out depends on the seed
    and on `count`, `length` and `batch` alone. length: default what the models take, at most 512.

    Raises ValueError where a model is no causal language model, or the models' vocabularies differ.
    """
    longest = min(min(getattr(model.config, "max_position_embeddings", None) or 512, 512) for model in models)
    length = longest if length is None else length
    if count < 1 or batch < 1 or not 2 <= length <= longest:
        raise ValueError(f"self-generated data need count and batch of 1 or more, and a length from 2 to {longest}")
    for model in models:
        _causal(model)
    vocabulary = models[0].config.vocab_size
    if any(model.config.vocab_size != vocabulary for model in models):
        raise ValueError("the models have different vocabularies, so they cannot read what the other writes")
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(vocabulary, (count, 1), generator=generator)
    whole = torch.empty(count, length, dtype=torch.long)
    for turn, model in enumerate(models):
        rows = torch.arange(turn, count, len(models))
        for some in torch.split(rows, WRITTEN_AT_ONCE):
            whole[some] = _continued(model, first[some], length, generator)
    return [{"input_ids": ids} for ids in torch.split(whole, batch)]


def _continued(model: PreTrainedModel, ids: Tensor, length: int, generator: torch.Generator) -> Tensor:
    cache: Any = None
    while ids.shape[1] < length:
        output = model(input_ids=ids[:, -1:].to(model.device), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        chances = output.logits[:, -1].float().softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


def _causal(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model predicts each token from those before it, and from nothing else."""
    kind = f"{type(model).__name__} writes no text of its own; give unlabelled data for it (a file, or a builtin set)"
    if model.main_input_name != "input_ids" or not model.can_generate():
        raise ValueError(kind)
    size = model.config.vocab_size
    pair = torch.tensor([[0, 0], [0, size - 1]], device=model.device)
    logits = getattr(model(input_ids=pair, use_cache=False), "logits", None)
    if logits is None or logits.shape != (2, 2, size) or not torch.allclose(logits[0, 0], logits[1, 0], atol=1e-4):
        raise ValueError(kind)


def noisy(batches: Sequence[Mapping[str, Tensor]], deviation: float, seed: int = 0) -> list[Batch]:
    """`NOISY_COPIES` rounds of the batches, with Gaussian noise of this standard deviation on their pixels or sounds.

    Examples stay in their batches. Raises ValueError for a deviation out of bounds, and for tokens.
    """
    deviation = checked(Strength, "noise", deviation)
    if any(not value.is_floating_point() for batch in batches for name, value in batch.items() if name in SHOWN):
        raise ValueError("noise can be added to pixels and sounds, not to tokens; leave it out")
    generator = torch.Generator().manual_seed(seed)

    def copied(name: str, value: Tensor) -> Tensor:
        return value + deviation * torch.randn(value.shape, generator=generator) if name in SHOWN else value

    return [
        {name: copied(name, value) for name, value in batch.items()} for _ in range(NOISY_COPIES) for batch in batches
    ]


def recut(batches: Sequence[Mapping[str, Tensor]], size: int) -> list[Batch]:
    """The same examples in the same order, `size` in a batch (the last may have fewer)."""
    rows = [row for batch in batches for row in _examples(batch)]
    return [_stacked(rows[start : start + size]) for start in range(0, len(rows), size)]


def from_file(
    data: str | Path,
    model: str | Path,
    task: str,
    count: int = 256,
    *,
    batch: int = 32,
    split: str | None = None,
    evaluation: Task | None = None,
    labels: bool = False,
    **options: Any,
) -> list[Batch]:
    """At most `count` examples of a file or builtin set in batches of a model's inputs.

    task, options: as in `load_task` (context, vocabulary, mask_id, ...); labels need not be there, classifiers read
    the columns `text` or `image`. split: default `train`, where the data have splits. evaluation: what the models
    will be measured on; examples with the same inputs are left out here. labels: whether to keep them, too.
    Raises ValueError as `load_task` does, and where nothing is left.
    """
    text = str(data)
    split = split or ("train" if text.startswith("builtin:") or kind(text) in ("txt", "datasets", "hub") else None)
    banned = set() if evaluation is None else {_key(row) for b in evaluation.batches for row in _examples(b)}
    kept: list[Batch] = []
    options = {"limit": None if banned else count, **options}
    batches = load_task(task, text, model, split=split, **options).batches if labels else None
    for inputs in batches or _inputs(text, model, task, split, options):
        kept += [row for row in _examples(inputs) if _key(row) not in banned]
        if len(kept) >= count:
            break
    if not kept:
        raise ValueError(f"'{data}' leaves no calibration example that is not evaluated as well")
    if not labels:
        kept = [{name: tensor for name, tensor in row.items() if name != "labels"} for row in kept]
    kept = kept[:count]
    batch = 1 if kept[0].keys() & {"input_features", "input_values"} else batch  # sounds have thousands of positions
    return [_stacked(kept[start : start + batch]) for start in range(0, len(kept), batch)]


def _inputs(data: str, model: str | Path, task: str, split: str | None, options: dict[str, Any]) -> Sequence[Batch]:
    if data == "builtin:digits":
        return [{"pixel_values": digits(split or "train")[0]}]
    if task == "token-classification" and (kind(data) == "txt" or "tokens" in read_rows(data, (), limit=1)[0]):
        split = None if kind(data) == "txt" else split  # CoNLL columns: words are told from their tags
    elif task in ("text-classification", "text-regression", "token-classification"):
        task = "causal-lm"  # the inputs of a classifier are those of any text; what differs are the labels
    if task == "image-classification":
        folder, config = configured(model)
        rows = read_rows(data, ("image",), split=split, limit=options["limit"], renamed=options.get("columns"))
        return [{"pixel_values": pixel_values(Source(data, folder, config), rows)}]
    return load_task(task, data, model, split=split, **options).batches


def _examples(batch: Mapping[str, Tensor]) -> list[Batch]:
    """The rows of a batch, without padding."""
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(len(next(iter(batch.values()))))]
    for row in rows:
        for mask in {"attention_mask", "decoder_attention_mask"} & row.keys():
            length = int(row[mask].sum())
            row.update({name: value[:length] for name, value in row.items() if value.dim() == 1})
    return rows


def _key(row: Batch) -> bytes:
    """Return the content of an example: its tokens, pixels or sounds."""
    shown = next(row[name] for name in SHOWN if name in row)
    return hashlib.sha256(shown.contiguous().numpy().tobytes()).digest()


def _stacked(rows: list[Batch]) -> Batch:
    """One batch, padded at the right, with an attention mask where the lengths differ."""
    if "input_ids" not in rows[0]:  # pixels and sounds have one size; what is said of them is cut to the shortest
        length = min((len(row["decoder_input_ids"]) for row in rows if "decoder_input_ids" in row), default=0)
        rows = [{name: x[:length] if length and x.dim() == 1 else x for name, x in row.items()} for row in rows]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    length = max(len(row["input_ids"]) for row in rows)
    if any(len(row["input_ids"]) < length for row in rows):
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    out = {}
    for name, value in rows[0].items():
        filler = IGNORED if name == "labels" else 0
        own = [row[name] for row in rows]
        out[name] = torch.stack([pad(x, (0, length - len(x)), value=filler) if value.dim() else x for x in own])
    return out
