# SPDX-License-Identifier: Apache-2.0
"""Axes on tensors, and the trace of a model's operations on them.

A model's class runs once on ordinary small tensors. A tensor that depends on parameters carries an axis for each of its
dimensions (None: batch, time, pixels, and dimensions of size 1); a tensor without axes is the same for all functionally
equal weights. An operation without a rule fixes all axes of its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tables.signature import MOVES
from .atoms import Axis, hold, is_data, lower
from .linear import Linear, settle
from .products import square

KEY, _COMPARED = "_axes", "_compared"  # attributes of tensors: the label; made by comparing numbers


@dataclass
class Label:
    """Facts about a tensor.

    axes: one per dimension. linear: the map that made the dimensions `dims` out of one axis, not yet analysed. within:
    axes of which this is one entry, chosen by routing. indexes: the axis of these indices. name: of the parameter that
    this is. normed: the norm with this output. square: the axis of which these are squares. length: the axis whose
    vectors have this length, and whether their mean was subtracted. plus: the number that was added, for a norm's 1 +
    w. rows: the tables whose rows these are, or are sums of. biases: tables (with their second axis), an entry of which
    is a summand of every number here. vectors: parameters that are summands of every vector here. side: concatenated
    vectors, as (how many, the summands of them all). whole: the table whose first rows these are. by: the matrix, and
    the bias, with this output.
    """

    axes: list[Axis | None]
    linear: Linear | None = None
    dims: tuple[int, ...] = ()
    within: tuple[Axis, ...] = ()
    indexes: Axis | None = None
    name: str = ""
    normed: Normed | None = None
    square: Axis | None = None
    length: tuple[Axis, bool] | None = None
    plus: float = 0.0
    rows: tuple[str, ...] = ()
    biases: tuple[tuple[str, Axis], ...] = ()
    vectors: tuple[str, ...] = ()
    side: tuple[tuple[int, tuple[str, ...]], ...] = ()
    whole: str = ""
    by: tuple[str, ...] = ()
    made: bool = True  # depends on inputs, not only on parameters


@dataclass
class Normed:
    """A normalized vector, and the weight that multiplied it. kind: layernorm or rmsnorm. plus: whether it was
    multiplied by one plus the weight."""

    kind: str
    source: Axis
    target: Axis | None = None
    weight: str = ""
    bias: str = ""
    plus: bool = False


@dataclass
class Gain:
    """A vector, in `target`, that multiplies the output of a matrix and its bias (`of`), in `source`, by channels."""

    source: Axis
    target: Axis
    of: tuple[str, ...]
    times: int = 0


@dataclass
class Trace(TorchFunctionMode):
    """The record of a run.

    silent: functions that do not change numbers, whose uses are not counted. norms: those with weights, in the
    order of execution; normed: their weights at every use, "" between two runs. seen: parameters in that order.
    occurrences: axes that a tensor has together. chosen: whether anything was chosen by the model's own numbers, so
    that another run may use other parameters. decided: whether Python read such numbers, so that other inputs may
    run other layers. apart: (axes, others) such that the first have no maps for each entry of the others. rows: how
    often rows of these tables were looked up and summed. placed: a table of positions -> the vectors to which its
    rows were added, see `Label.side`. softmaxed: parameters of the entries over which a softmax runs. biases: a
    vector -> the matrix to whose product it is added first. together: a norm's weight -> that of an earlier norm of
    the same vectors. gains: vectors that multiply the output of a matrix. uses: how often a parameter, `("",
    name)`, and the output of a matrix and its bias, were used.
    """

    rules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    silent: Collection[str] = ()
    norms: list[Normed] = field(default_factory=list)
    normed: list[str] = field(default_factory=list)
    seen: dict[str, None] = field(default_factory=dict)
    occurrences: list[tuple[Axis, ...]] = field(default_factory=list)
    chosen: bool = False
    decided: bool = False
    apart: list[tuple[tuple[Axis, ...], tuple[Axis, ...]]] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    passes: list[tuple[Axis, str]] = field(default_factory=list)
    rows: Counter[tuple[str, ...]] = field(default_factory=Counter)
    placed: dict[str, tuple[tuple[int, tuple[str, ...]], ...]] = field(default_factory=dict)
    softmaxed: set[str] = field(default_factory=set)
    biases: dict[str, str] = field(default_factory=dict)
    together: dict[str, str] = field(default_factory=dict)
    gains: dict[str, Gain] = field(default_factory=dict)
    uses: Counter[tuple[str, ...]] = field(default_factory=Counter)
    padded: list[Axis] = field(default_factory=list)  # channels next to padding with zeros

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        name = name_of(func)
        compared = any(one.is_floating_point() or hasattr(one, _COMPARED) for one in given)
        self.decided = self.decided or (compared and name in DECIDE)
        out = self._run(func, name, given, args, kwargs)
        if compared and isinstance(out, Tensor) and out.dtype == torch.bool:
            setattr(out, _COMPARED, True)
        return out

    def _run(self, func: Any, name: str, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run a function of torch by its rule."""
        tells = all(tensor.numel() for tensor in given)  # not of tokens of a kind that the inputs lack
        for tensor in given:
            if (label := getattr(tensor, KEY, None)) is not None and label.name and tells:
                self.seen.setdefault(label.name)
            if label is not None and name not in self.silent:
                self.uses[label.by or ("", label.name)] += 1
        out_given = kwargs.get("out")
        if name in BLANK:  # uninitialised entries are not constants
            return func(*args, **kwargs).zero_()
        if name in ZEROS:
            out = func(*args, **kwargs)
            out._nothing = True
            return out
        if not any(hasattr(tensor, KEY) for tensor in given):
            return func(*args, **kwargs)
        self.chosen = self.chosen or name in READS or name in CHOOSE
        rule = self.rules.get(name)
        call = Call(name, func, args, kwargs)
        if rule is None or out_given is not None:
            return self.unruled(call)
        try:
            return rule(self, call)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            StopIteration,
            TypeError,
            ValueError,
        ):
            return self.unruled(call)  # a use of the function that the rule does not know

    def unruled(self, call: Call) -> Any:
        """Run a call, and fix all axes of its inputs."""
        out = call.run()
        if any(isinstance(each, Tensor) for each in flattened(out)) or call.name in READS:
            for tensor in call.tensors:
                if (label := self.label(tensor)) is not None:
                    self.unknown[call.name] = self.unknown.get(call.name, 0) + 1
                    hold((*self.axes(tensor), label.indexes), f"{call.name} has no rule")
        return out

    # For rules.

    def label(self, tensor: Any) -> Label | None:
        return getattr(tensor, KEY, None) if isinstance(tensor, Tensor) else None

    def axes(self, tensor: Any, why: str = "use") -> list[Axis | None]:
        """Return the axes of a tensor, after settling a pending map; a None for each dimension if it has none."""
        label = self.label(tensor)
        if label is None:
            return [None] * (tensor.dim() if isinstance(tensor, Tensor) else 0)
        if label.linear is not None:
            found = settle(label.linear, list(label.dims), tensor, why)
            for dim, axis in zip(label.dims, found, strict=True):
                label.axes[dim] = axis
            label.linear, label.dims = None, ()
            self.met(label)
        if label.square is not None:
            label.axes[-1], label.square = square(label.square, why), None
            self.met(label)
        if label.plus:
            label.plus = 0.0
            lower(label.axes, ONES, why)
        return label.axes

    def within(self, *given: Any) -> tuple[Axis, ...]:
        """Return the routed axes of which any of these is one entry."""
        return tuple(dict.fromkeys(axis for one in given if (label := self.label(one)) for axis in label.within))

    def put(self, tensor: Any, axes: Sequence[Axis | None], *sources: Any, **known: Any) -> Any:
        """Label a tensor with its axes, and with other `known` facts. Dimensions of size 1 and data get no axis."""
        if not isinstance(tensor, Tensor):
            return tensor
        if len(axes) != tensor.dim():
            hold(axes, "an unexpected shape")
            axes = [None] * tensor.dim()
        kept = [
            None if axis is None or size == 1 or is_data(axis) else axis
            for axis, size in zip(axes, tensor.shape, strict=True)
        ]
        known = {key: value for key, value in known.items() if value is not None}
        label = Label(kept, within=self.within(*sources), **known)
        if known.keys() - {"made"} or any(axis is not None for axis in kept):
            setattr(tensor, KEY, label)
            self.met(label)
        elif hasattr(tensor, KEY):
            delattr(tensor, KEY)
        return tensor

    def met(self, label: Label) -> None:
        if label.linear is None:
            beside = (*(axis for axis in label.axes if axis is not None), *label.within)
            if beside:
                self.occurrences.append(beside)

    def mixed(self, kept: Sequence[Axis | None], gone: Sequence[Axis | None]) -> None:
        """Record that entries of `gone` were mixed in a tensor with the axes `kept`."""
        one, other = tuple(a for a in kept if a is not None), tuple(a for a in gone if a is not None)
        if one and other:
            self.apart.append((one, other))


ONES = MOVES["ones"]  # moves that commute with adding a number
BLANK = frozenset({"empty", "new_empty", "empty_like"})
ZEROS = frozenset({"zeros", "new_zeros", "zeros_like"})
READS = frozenset(
    {"item", "tolist", "numpy", "bool", "__bool__", "float", "int", "__float__", "__int__", "__index__", "__setitem__"}
)
DECIDE = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__"})
CHOOSE = frozenset(
    {"topk", "sort", "argsort", "argmax", "argmin", "nonzero", "argwhere", "multinomial", "bernoulli"}
    | {"eq", "ne", "gt", "ge", "lt", "le", "__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__"}
)


@dataclass(frozen=True)
class Call:
    """One call of a torch function."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> Iterator[Tensor]:
        return tensors((self.args, self.kwargs))

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def ran(self, out: Any) -> Call:
        """Return this call as one that has already run, with this result."""
        return replace(self, func=lambda *_, **__: out)

    def get(self, place: int, word: str, default: Any = None) -> Any:
        """Return an argument given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(word, default)

    def on(self, replaced: Mapping[int, Any]) -> Any:
        """Run it with some tensors, by id, replaced."""

        def one(value: Any) -> Any:
            if isinstance(value, Tensor):
                return replaced.get(id(value), value)
            if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                return type(value)(map(one, value))
            return value

        return self.func(
            *(one(value) for value in self.args), **{key: one(value) for key, value in self.kwargs.items()}
        )


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return f".{func.__self__.__name__}"
    return str(name)


def flattened(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from flattened(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from flattened(one)
    else:
        yield value


def is_nothing(tensor: Tensor) -> bool:
    """Whether these are zeros that the model itself begins with, whatever it is given, and nothing was stored there."""
    return hasattr(tensor, "_nothing") and not tensor._version


def tensors(value: Any) -> Iterator[Tensor]:
    return (one for one in flattened(value) if isinstance(one, Tensor))
