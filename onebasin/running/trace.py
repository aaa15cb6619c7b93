# SPDX-License-Identifier: Apache-2.0
"""Traces of a forward pass: which modules are linear layers, in which order they run, and where their outputs go.

Nothing is assumed about a model's code: all of this is observed on a small example, with hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.models.errors import ModelError
from onebasin.symmetry.tables.axes import Axis, space_leaves

from .classes import seeded, without_cache
from .float64 import throughout
from .loaded import LoadedModel
from .probes import unpadded

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a linear layer, y = x W + b.

    module: its name. weight, bias: roles. columns: the weight is stored (out, in) as nn.Linear does, else (in, out).
    norm: the module of the norm whose input is this output plus terms that do not depend on it (the residual stream);
    "" if there is none.
    """

    module: str
    weight: str
    bias: str | None
    columns: bool
    norm: str = ""

    def axes(self, stock: LoadedModel) -> tuple[Axis, Axis]:
        """Return the axes of input and output."""
        first, second = stock.signature.tensors[self.weight].axes
        return (second, first) if self.columns else (first, second)


def examples_in(batch: Batch) -> int:
    """Return the number of examples in a batch: the length of its shortest tensor. Others may hold several rows of each
    example, one example after the other, as the patches of images do whose class takes them in one sequence."""
    return min(map(len, batch.values()))


def examples(batch: Batch, start: int, stop: int) -> Batch:
    """Return some of the examples of a batch."""
    count = examples_in(batch)
    return {name: rows_of(value, count, start, stop) for name, value in batch.items()}


def rows_of(value: Tensor, count: int, start: int, stop: int) -> Tensor:
    """Return the rows of some of a batch's examples in an input or output of a model.

    count: the examples in the batch, each of which has equally many rows.
    """
    each = max(1, len(value) // count)
    return value[start * each : stop * each]


def run(stock: LoadedModel, batch: Batch, **options: Any) -> Any:
    """Return the model's output for a batch, without passing on `labels` and without caching. What its class draws at
    random (ViTMAE, what it masks) is the same every time."""
    device = stock.model.device
    given = {key: value.to(device) for key, value in batch.items() if key != "labels"}
    with torch.no_grad(), throughout(stock.model.dtype), seeded(0, device):
        return stock.model(**given, **without_cache(stock.model), **options, return_dict=True)


def returns_maps(stock: LoadedModel, example: Batch) -> bool:
    """Return whether a model returns its attention maps. Some classes fail where they are asked (the Swin of
    MaskFormer)."""
    if getattr(stock.model.config, "_attn_implementation", "eager") != "eager":
        return False
    try:
        return bool(run(stock, example, output_attentions=True).get("attentions"))
    except Exception:  # each class fails in its own way
        return False


def samples(value: Tensor, mask: Tensor | None) -> Tensor:
    """(batch, tokens, n) -> (samples, n), without padding; (batch, n) is returned as it is.

    mask: (batch, tokens), 0 at padding.
    """
    kept = unpadded(value, mask) if mask is not None and value.dim() > mask.dim() else value
    return kept.reshape(-1, value.shape[-1])


@contextmanager
def hooks(
    stock: LoadedModel,
    after: Mapping[str, Callable[[Tensor, Tensor], None]],
    before: Mapping[str, Callable[[Tensor], None]] | None = None,
) -> Iterator[None]:
    """Hook modules for the duration of the block. Inputs and outputs may be changed in place.

    after: module -> function that is called with (input, output) after it. before: module -> function that is called
    with its input before it.
    """
    handles = [stock.model.get_submodule(name).register_forward_hook(_after(look)) for name, look in after.items()] + [
        stock.model.get_submodule(name).register_forward_pre_hook(_before(look), with_kwargs=True)
        for name, look in (before or {}).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after(look: Callable[[Tensor, Tensor], None]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            look(args[0], output)

    return hook


def _before(look: Callable[[Tensor], None]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if given:
            look(given[0])

    return hook


@dataclass
class _Event:
    module: str
    call: Call | None  # None for a norm
    shape: torch.Size  # of the output of a linear layer, or the input of a norm
    seen: Tensor  # the input of a norm; the standard deviation of a layer's output
    roots: frozenset[str] = field(default_factory=frozenset)


def linear_calls(stock: LoadedModel, example: Batch) -> list[Call]:
    """Return the calls of all linear layers with a tensor of the signature, in the order in which their outputs (or the
    inputs of norms to which they contribute) are complete.

    example: a small batch.

    A norm counts if undoing a change of the layer's output at its input leaves the outputs of the model as they are.
    Where some do not, because the class keeps copies of its residual stream, those alone that see the same change are
    tried, and then none.

    Raises:
        ModelError: There is no linear layer.
    """
    events: list[_Event] = []
    first = _observed(stock, example, events)
    calls = _with_norms(events)
    if not calls:
        raise ModelError(f"no linear layer of {type(stock.model).__name__} could be followed")
    for _ in range(2):
        added, second = _perturbed(stock, example, events, calls)
        calls = [(i, call, norm if i in added else -1) for i, call, norm in calls]
        if all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
               for a, b in zip(first, second, strict=True)):  # fmt: skip
            break
    else:
        calls = [(i, call, -1) for i, call, _ in calls]
    placed = [(i, call) if norm < 0 else (norm, replace(call, norm=events[norm].module)) for i, call, norm in calls]
    return [call for _, call in sorted(placed, key=itemgetter(0))]


def routed(stocks: Sequence[LoadedModel], example: Batch, modules: Collection[str]) -> set[str]:
    """Return the modules that get different numbers of samples in different models, and those of the same name in other
    layers. These are experts that are called one by one, to which each model sends its own choice of tokens, and
    modules behind the point where a model chooses the length of its output (FastSpeech 2)."""
    seen: list[dict[str, list[torch.Size]]] = []
    for stock in stocks:
        shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}

        def look(name: str, shapes: dict[str, list[torch.Size]] = shapes) -> Callable[[Tensor], None]:
            return lambda x: shapes[name].append(x.shape)

        with hooks(stock, {}, {name: look(name) for name in modules}):
            run(stock, example)
        seen.append(shapes)
    kinds = {_without_numbers(name) for name in modules if any(shapes[name] != seen[0][name] for shapes in seen)}
    return {name for name in modules if _without_numbers(name) in kinds}


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "{}", name)


def linear_layers(stock: LoadedModel, example: Batch) -> list[Call]:
    """Return the linear layers with a tensor of the signature that run on a small batch, each once, without norms."""
    events: list[_Event] = []
    _observed(stock, example, events)
    return list({event.module: event.call for event in events if event.call is not None}.values())


def _observed(stock: LoadedModel, example: Batch, events: list[_Event]) -> list[Tensor]:
    """Run once, append every call of a linear layer and of a norm to `events`, and return the outputs."""
    signature = stock.signature
    after: dict[str, Callable[[Tensor, Tensor], None]] = {}
    before: dict[str, Callable[[Tensor], None]] = {}
    by_owner: dict[str, list[str]] = {}
    for role, name in stock.owner.items():
        by_owner.setdefault(name, []).append(role)
    for name, roles in by_owner.items():
        norms = [role for role in roles if signature.tensors[role].norm]
        matrices = [role for role in roles if len(signature.tensors[role].axes) == 2]
        biases = [role for role in roles if len(signature.tensors[role].axes) == 1]
        if norms:
            norm = signature.tensors[norms[0]].norm
            assert norm is not None
            root = frozenset({signature.root[norm.source]})

            def note(n: Tensor, name: str = name, root: frozenset[str] = root) -> None:
                events.append(_Event(name, None, n.shape, n.clone(), root))

            before[name] = note
        elif len(matrices) == 1 and len(biases) <= 1:
            bias = biases[0] if biases else None

            def look(
                x: Tensor, y: Tensor, name: str = name, weight: str = matrices[0], bias: str | None = bias
            ) -> None:
                call = _linear(stock, name, weight, bias, x, y)
                if call is not None:
                    output = call.axes(stock)[1]
                    roots = frozenset(signature.root[leaf.space] for leaf in space_leaves(output))
                    events.append(_Event(name, call, y.shape, y.std(), roots))

            after[name] = look
    with hooks(stock, after, before):
        return _tensors(run(stock, example))


def _tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output."""
    return [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]


def _linear(stock: LoadedModel, name: str, weight: str, bias: str | None, x: Tensor, y: Tensor) -> Call | None:
    """Return the call if y = x W + b holds for some rows: a module for sounds, say, gets none of a text."""
    if not x.is_floating_point() or not x.numel():
        return None
    matrix = stock.parameter[weight]
    for columns in (True, False):
        w = matrix.mT if columns else matrix
        if x.shape[-1] != w.shape[0] or y.shape != (*x.shape[:-1], w.shape[1]):
            continue
        expected = x @ w if bias is None else x @ w + stock.parameter[bias]
        if torch.allclose(y, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            return Call(name, weight, bias, columns)
    return None


def _with_norms(events: list[_Event]) -> list[tuple[int, Call, int]]:
    """Return (place, call, place of the norm that reads its output next, or -1) for every linear call."""
    found = []
    for i, event in enumerate(events):
        if event.call is None:
            continue
        norm = -1
        for j in range(i + 1, len(events)):
            if not events[j].roots & event.roots:
                continue
            if events[j].call is None and events[j].shape == event.shape:
                norm = j
            break  # another layer writes the same space first: only the last one before the norm is paired with it
        found.append((i, event.call, norm))
    return found


def _perturbed(
    stock: LoadedModel, example: Batch, events: list[_Event], calls: Sequence[tuple[int, Call, int]]
) -> tuple[set[int], list[Tensor]]:
    """Run again. Perturb the output of every layer that seems to go into a norm, check that the norm's input changes by
    the same amount, and undo the change there. Return the places of the calls for which it does, and the outputs of the
    model."""
    goes = {i: norm for i, _, norm in calls if norm >= 0}
    comes = {norm: i for i, norm in goes.items()}
    place = 0
    moved: dict[int, Tensor] = {}
    added: set[int] = set()
    generator = torch.Generator().manual_seed(0)

    def after(x: Tensor, y: Tensor) -> None:
        nonlocal place
        if place in goes:
            noise = torch.randn(y.shape, generator=generator).to(y) * events[place].seen
            moved[place] = noise
            y.add_(noise)
        place += 1

    def before(n: Tensor) -> None:
        nonlocal place
        if place in comes:
            i = comes[place]
            scale = float(events[place].seen.abs().max() + moved[i].abs().max())
            if torch.allclose(n, events[place].seen + moved[i], rtol=1e-3, atol=1e-4 * scale):
                added.add(i)
            n.copy_(events[place].seen)
        place += 1

    linear = {event.module for event in events if event.call is not None}
    norms = {event.module for event in events if event.call is None}
    with hooks(stock, dict.fromkeys(linear, after), dict.fromkeys(norms, before)):
        return added, _tensors(run(stock, example))
