# SPDX-License-Identifier: Apache-2.0
"""A twin after its one run on tensors that carry axes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onebasin.models.folder import finite
from onebasin.running import twins
from onebasin.running.classes import seeded
from onebasin.running.float64 import OnlyFloat64
from onebasin.symmetry.inference.atoms import Atom, Axis, fix, hold, new
from onebasin.symmetry.inference.rules import RULES, SILENT
from onebasin.symmetry.inference.trace import KEY, Label, Trace, tensors
from onebasin.symmetry.inference.unification import unify

TRAINING = re.compile(r"mask(ed)?_(token|spec)|\bcriterion\b|denoising")  # parameters that only training uses
RUNS = 6  # most runs of a twin until every parameter has been used


@dataclass
class Traced:
    """A twin, and after its one run the axes of its tensors. tied: name -> the name under which it is stored."""

    model: PreTrainedModel
    inputs: Mapping[str, Any]
    trace: Trace
    axes: dict[str, list[Axis | None]]
    tied: dict[str, str]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The outputs of the twin with its own parameters."""
        return twins.outputs(self.model, self.inputs)

    @cached_property
    def own(self) -> dict[str, Tensor]:
        """The tensors with which it computes, by their names in the model."""
        state = self.model.state_dict()
        return {name: state[name] for name in self.axes}

    @cached_property
    def entries(self) -> Tensor:
        """Their entries, one after another."""
        return torch.cat([tensor.detach().flatten() for tensor in self.own.values()])

    def apart(self, entries: Tensor) -> dict[str, Tensor]:
        """Return such a row as tensors by their names in the model."""
        parts = torch.split(entries, [tensor.numel() for tensor in self.own.values()])
        return {name: part.view(tensor.shape) for (name, tensor), part in zip(self.own.items(), parts, strict=True)}

    @cached_property
    def numbered(self) -> dict[str, Tensor]:
        """Its tensors, with the places of their entries in that row."""
        return self.apart(torch.arange(len(self.entries), dtype=torch.float64))

    @cached_property
    def file(self) -> dict[str, Tensor]:
        """The tensors in its file, with the places of their entries in that row."""
        return {name: tensor.long() for name, tensor in as_stored(self.model, self.numbered).items()}

    @cached_property
    def places(self) -> dict[str, slice | Tensor]:
        """The same in one dimension, as a slice if the places follow each other: that is much faster to copy."""
        return {name: _as_slice(places.flatten()) for name, places in self.file.items()}

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The tensors in its file with which it does not compute."""
        state = self.model.state_dict()
        return as_stored(self.model, {name: tensor for name, tensor in state.items() if name not in self.axes})

    @cached_property
    def ran(self) -> Traced:
        """The same twin after its run."""
        return _ran(self)


def _as_slice(places: Tensor) -> slice | Tensor:
    """Return places as a slice if they follow each other."""
    first, count = int(places[0]) if len(places) else 0, len(places)
    return slice(first, first + count) if torch.equal(places, torch.arange(first, first + count)) else places


def traced(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Traced:
    """Run a twin once on tensors that carry axes."""
    return untraced(model, inputs).ran


def untraced(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Traced:
    """Return a twin before its run, whose tensors have no axes. Every name gets a parameter of its own."""
    tied = untied(model)
    return Traced(model, inputs, Trace(rules=RULES, silent=SILENT), {name: [] for name in held_by(model)}, tied)


def _ran(twin: Traced) -> Traced:
    """Return a twin after its run."""
    model, inputs, tied = twin.model, twin.inputs, twin.tied
    held = held_by(model)
    trace = Trace(rules=RULES, silent=SILENT)
    for name, tensor in held.items():
        setattr(tensor, KEY, Label([new(n) if n > 1 else None for n in tensor.shape], name=name, made=False))
        trace.met(getattr(tensor, KEY))
    try:
        with restored(held):
            for run in range(RUNS):  # several, since routing may reach different experts
                before = len(trace.seen)
                _run(model, inputs, trace)
                left = kinds(trace.seen) & kinds(held.keys() - trace.seen.keys())
                if len(trace.seen) == before or not left or not (trace.chosen or trace.decided):
                    break
                shuffle(held.values(), run)
        axes = {name: trace.axes(tensor, "parameter") for name, tensor in held.items()}
        shared = {copy: home for copy, home in tied.items() if kind_of(copy) == kind_of(home)}
        equal = tied if tied and _looks_at_ties(model, inputs) else shared
        for copy, home in equal.items():  # of layers that share one, a block has one line, which says nothing of a tie
            _unify(axes.get(copy, ()), axes.get(home, ()))
        used, idle = {shared.get(name, name) for name in trace.seen}, list[str]()
        stored = {tied.get(name, name) for name in trace.seen}
        for name in (name for name in held.keys() - trace.seen.keys() if shared.get(name, name) not in used):
            copies = [copy for copy, home in tied.items() if home == name and (copy,) in trace.rows]
            for copy in copies[1:] or copies:  # only these are looked up, but stored under this name
                _unify(axes[name], axes[copy])
            if not copies:
                hold(axes[name], "unused")
                if tied.get(name, name) not in stored:
                    idle.append(name)
        _hold_around(idle, axes, set() if trace.decided else kinds(trace.seen))
        _hold_unread([*axes.values(), *([norm.target, ~norm.source] for norm in trace.norms)])
        for leaf in (leaf for each in axes.values() for axis in each if axis is not None for leaf in axis.leaves):
            if leaf.home != leaf.top:  # there are parameters in both orders
                fix(leaf, "in another order")
    finally:
        for tensor in held.values():
            if hasattr(tensor, KEY):
                delattr(tensor, KEY)
    return Traced(model, inputs, trace, axes, tied)


def _hold_around(idle: Sequence[str], axes: Mapping[str, Sequence[Axis | None]], seen: Collection[str]) -> None:
    """Fix the spaces that unused parameters may share. Other inputs than those of the run may reach such parameters.

    An unused parameter may read or write any vector of the modules that contain it, if one of its axes has the vector's
    size (or, in a matrix, a multiple of it). The vectors of a space of several layers may come from outside its module.
    A parameter says nothing new if another of its kind was used, and masks, criteria and queries to denoise are for
    training.

    idle: names of unused parameters. seen: kinds of names that were used, unless the model decides by its numbers which
    layers run.
    """
    sizes = {tuple(name.split(".")): [axis.size for axis in axes[name] if axis is not None] for name in idle
             if kind_of(name) not in seen and not TRAINING.search(name)}  # fmt: skip
    spaces: dict[int, tuple[Axis, set[int], set[tuple[str, ...]]]] = {}  # a leaf, sizes of axes, names of modules
    for name in axes.keys() - set(idle) if sizes else ():
        for axis in filter(None, axes[name]):
            for leaf in axis.leaves:
                _, known, modules = spaces.setdefault(id(leaf.top.atom), (leaf, set(), set()))
                known |= {leaf.size, axis.size} - {1}
                modules.add(tuple(name.split(".")[:-1]))
    for leaf, known, modules in spaces.values():
        around = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*modules, strict=False))]
        if len({layer_of(each) for each in modules}) > 1:
            around = []
        inside = (own for name, own in sizes.items() if list(name[: len(around)]) == around)
        if leaf.moves and any(
            n == one or (n % one == 0 and len(own) > 1) for own in inside for n in own for one in known
        ):
            fix(leaf, "beside what is unused")


def _hold_unread(axes: Iterable[Sequence[Axis | None]]) -> None:
    """Fix the parts of an axis, beside others, that tensors and norms write and none reads, or the reverse, such as
    positions past the end of the inputs: longer inputs may reach these.

    If only vectors x of one orientation occur, f(x) = f(s x) for every s > 0, so that f(x) = f(0): nothing depends on
    them. Permutations alone (of experts, say) do not show it, so these stay as they are.
    """
    met: dict[int, tuple[Axis, set[bool], set[bool]]] = {}
    for axis in (axis for each in axes for axis in each if axis is not None):
        for leaf, beside in _parts(axis):
            _, orientations, places = met.setdefault(id(leaf.home.atom), (leaf, set(), set()))
            orientations.add(leaf.home.dual)
            places.add(beside)
    for leaf, orientations, places in met.values():
        if len(orientations) == 1 and True in places and "scale" in leaf.moves:
            fix(leaf, "nothing reads it")


def _parts(axis: Axis, beside: bool = False) -> Iterator[tuple[Axis, bool]]:
    """Yield the parts without structure of an axis, and whether others stand beside them."""
    if not axis.parts:
        yield axis, beside
    for part in axis.parts:
        yield from _parts(part, beside or axis.cat)


def layer_of(module: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a module's name up to the last number."""
    return module[: max((place + 1 for place, word in enumerate(module) if word.isdigit()), default=0)]


@contextmanager
def configured(model: PreTrainedModel, updates: Mapping[str, Any]) -> Iterator[None]:
    """Change a model's configuration for the duration of the block, as its class would if that were in a file: some
    forward passes look at it."""
    held = vars(model.config)
    before = {name: held[name] for name in updates if name in held}
    made = vars(type(model.config).from_dict({**model.config.to_dict(), **updates})) if before else {}
    held.update({name: made[name] for name in before})
    try:
        yield
    finally:
        held.update(before)


def _looks_at_ties(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Whether the outputs depend on `tie_word_embeddings`, so that a head cannot be untied: Switch Transformers scale
    the input of a tied head."""
    before = twins.outputs(model, inputs)
    with configured(model, {"tie_word_embeddings": False}):
        after = twins.outputs(model, inputs)
    return not twins.alike(before, after)


def _unify(axes: Iterable[Axis | None], others: Iterable[Axis | None]) -> None:
    """Make the axes of two tied tensors one."""
    for one, other in zip(axes, others, strict=False):
        if one is not None and other is not None:
            unify(one, other, "tied")


def _run(model: PreTrainedModel, inputs: Mapping[str, Any], trace: Trace) -> None:
    """Run a model whose tensors carry axes, and fix the axes of its outputs."""
    # The last two in this order, so that what rules compute is not widened in vain.
    with torch.no_grad(), seeded(0), _forward_alone(), trace, OnlyFloat64():
        out = model(**inputs)
    trace.normed.append("")
    for value in tensors(twins.outward(out)):
        hold(trace.axes(value), "output")


@contextmanager
def _forward_alone() -> Iterator[None]:
    """Run the forward pass of custom autograd functions like any other code: torch would pass them copies of tensors,
    which carry no axes."""
    own, plain = vars(Function)["apply"], Function.setup_context

    def forward(cls: type[Function], *given: Any) -> Any:
        return cls.forward(FunctionCtx(), *given) if cls.setup_context is plain else cls.forward(*given)

    setattr(Function, "apply", classmethod(forward))  # noqa: B010
    try:
        yield
    finally:
        setattr(Function, "apply", own)  # noqa: B010


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """Return the stored tensors that the model computes with: parameters and floating-point buffers (statistics), but
    not bounds that are infinite."""
    state = model.state_dict()
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # tables that the class recomputes: constants
    held: dict[str, Tensor] = dict(model.named_parameters())
    held |= {name: one for name, one in model.named_buffers()
             if one.is_floating_point() and name in state and finite(one)}  # fmt: skip
    return {name: one for name, one in held.items() if name not in unsaved and one.numel()}


def untied(model: nn.Module) -> dict[str, str]:
    """Give every name a parameter of its own. Return name -> the name that it was tied to, under which it is stored."""
    uses: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=True):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append((f"{name}.{key}".lstrip("."), module, key))
    left_out = getattr(model, "all_tied_weights_keys", None) or {}
    tied: dict[str, str] = {}
    for users in uses.values():
        home = next((full for full, _, _ in users if full not in left_out), users[0][0])
        for full, module, key in users:
            parameter = module._parameters[key]
            if full != home and parameter is not None:
                tied[full] = home
                module._parameters[key] = nn.Parameter(parameter.detach().clone())
    return tied


@torch.no_grad()
def shuffle(held: Iterable[Tensor], seed: int) -> None:
    """Shuffle the entries of every matrix, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in held:
        if tensor.dim() > 1:
            order = torch.randperm(tensor.numel(), generator=generator)
            tensor.copy_(tensor.flatten()[order].view(tensor.shape))


@contextmanager
def restored(held: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Restore the values of tensors after the block. before: copies of them, if there are any."""
    before = before or {name: tensor.detach().clone() for name, tensor in held.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(before[name])


@contextmanager
def as_before(found: Traced) -> Iterator[None]:
    """Restore the axes of a twin after the block, since writing a table restricts what may act on them."""
    trace = found.trace
    kept = {name: copy(value) for name, value in vars(trace).items() if isinstance(value, list | dict | set)}
    given = [axis for axes in found.axes.values() for axis in axes]
    given += [axis for axes in chain(trace.occurrences, *trace.apart) for axis in axes]
    given += [*(axis for norm in trace.norms for axis in (norm.source, norm.target)), *trace.padded]
    given += [axis for axis, _ in trace.passes]
    waiting = [axis.atom for axis in given if axis is not None]
    before: dict[int, tuple[Atom, dict[str, Any]]] = {}
    while waiting:
        atom = waiting.pop()
        if id(atom) not in before:
            before[id(atom)] = atom, {**vars(atom), "why": list(atom.why)}
            waiting += [axis.atom for axis in (*atom.parts, atom.link, atom.evens) if axis is not None]
    try:
        yield
    finally:
        vars(trace).update(kept)
        for atom, values in before.values():
            vars(atom).update(values)


def as_stored(model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as `save_pretrained` names and splits them: name in a file -> tensor."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
    return found


def free_share(found: Traced) -> float:
    """Return the share of matrices on which some group acts."""
    matrices = [axes for axes in found.axes.values() if len(axes) > 1]
    norms = (norm for norm in found.trace.norms if norm.target is not None and not norm.target.moves)
    still = {id(norm.source.top.atom) for norm in norms}
    free = [axes for axes in matrices if any(leaf.moves and id(leaf.top.atom) not in still
                                             for axis in axes if axis is not None for leaf in axis.leaves)]  # fmt: skip
    return len(free) / max(len(matrices), 1)


def kind_of(name: str) -> str:
    """Return a name without its numbers."""
    return re.sub(r"\d+", "{}", name)


def kinds(names: Iterable[str]) -> set[str]:
    return {kind_of(name) for name in names}
