# SPDX-License-Identifier: Apache-2.0
"""Inferring the table of a model type from its own class, and proving it on the tiny twin that it was inferred from."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onebasin.engine import Cache
from onebasin.models import ModelError
from onebasin.models.folder import one_line
from onebasin.symmetry import Signature, Table, TableError, acting_groups, read_table, resolve
from onebasin.symmetry.gauge.canonical import canonical
from onebasin.symmetry.inference.atoms import PERMUTE, Atom, Axis, data, flat, hold, joined, new, unify
from onebasin.symmetry.inference.rules import RULES, SILENT, moved
from onebasin.symmetry.inference.trace import KEY, Call, Label, Trace, tensors
from onebasin.symmetry.inference.writing import STYLES, Found, Style, Writer
from onebasin.symmetry.tables.signature import MOVES

from . import twins
from .shrinking import Scale
from .trial import scrambling

TOLERANCE = 1e-9
# Where a configuration may say how large a space is: what its keys are called.
NAMED = {
    "head": r"head", "group": r"group", "expert": r"expert|local", "ffn": r"inter|ffn|inner|mlp", "rope": r"rope|rot",
    "vo": r"v_head|head_dim|head_size|d_kv", "qk": r"head_dim|head_size|d_kv|qk",
}  # fmt: skip
LOSS = 0.9  # of the matrices that are free: what may stay, so that layers that differ a little are one block
WIDTHS = r"hidden_size|d_model|n_embd|embed_dim|dim$|head_dim|head_size|d_kv"
WIDE = 32  # numbers of a head, where some size is one in the smallest twin and more in another
DEEPEST = 8  # layers of a twin, at most, until every kind of layer is there
RUNS = 6  # of a twin, at most, until every parameter was seen
PATIENCE = (
    10.0  # seconds of computing, after which no other way to write a table is tried, but to say less of constants
)
UNSEEN = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")  # by what a model computes


@dataclass(frozen=True)
class Inferred:
    """A table with its proof. departure: the largest relative difference that random elements made to the outputs of
    the twins, in float64. free: the share of matrices that something acts on. unknown: operations without a rule.
    lowered: spaces that stay since an element changed the outputs, though the rules allow it."""

    text: str
    departure: float
    free: float
    unknown: dict[str, int]
    style: Style
    lowered: list[str]

    @cached_property
    def table(self) -> Table:
        return read_table(self.text, "inferred")

    @property
    def facts(self) -> dict[str, Any]:
        """What there is to say of it, besides the table."""
        return {"departure": self.departure, "free": self.free, "unknown": self.unknown, "lowered": self.lowered,
                "style": STYLES.index(self.style)}  # fmt: skip

    @classmethod
    def of(cls, text: str, facts: Mapping[str, Any]) -> Inferred:
        """Return what has this table and these facts."""
        return cls(text, **{**facts, "style": STYLES[facts["style"]]})


@dataclass
class Traced:
    """A twin after its one run: labels on its tensors."""

    model: PreTrainedModel
    inputs: Mapping[str, Any]
    trace: Trace
    axes: dict[str, list[Axis | None]]
    tied: dict[str, str]


def traced(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Traced:
    """Run a twin once on tensors that carry axes."""
    tied = _untie(model)
    held = _held(model)
    trace = Trace(rules=RULES, silent=SILENT)
    for name, tensor in held.items():
        setattr(tensor, KEY, Label([new(n) if n > 1 else None for n in tensor.shape], name=name, made=False))
        trace.met(getattr(tensor, KEY))
    try:
        with _kept(held):
            for run in range(RUNS):  # several, since routing may reach other experts in another
                before = len(trace.seen)
                _run(model, inputs, trace)
                if len(trace.seen) == before or not _patterns(trace.seen) & _patterns(held.keys() - trace.seen.keys()):
                    break
                _shuffle(held.values(), run)
        axes = {name: trace.axes(tensor, "parameter") for name, tensor in held.items()}
        for name in held.keys() - trace.seen.keys():
            copies = [copy for copy, home in tied.items() if home == name and (copy,) in trace.rows]
            for copy in (
                copies[1:] or copies
            ):  # only these are looked up, but a file holds their numbers under this name
                for one, other in zip(axes[name], axes[copy], strict=True):
                    if one is not None and other is not None:
                        unify(one, other, "tied")
            if not copies:
                hold(axes[name], "unused")
    finally:
        for tensor in held.values():
            if hasattr(tensor, KEY):
                delattr(tensor, KEY)
    return Traced(model, inputs, trace, axes, tied)


def _run(model: PreTrainedModel, inputs: Mapping[str, Any], trace: Trace) -> None:
    """Run a model whose tensors carry axes; what it puts out stays."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _forward_alone():
        torch.manual_seed(0)
        with trace, twins.in_float64():  # in this order, so that what rules compute is not widened in vain
            out = model(**inputs)
    trace.normed.append("")
    for value in tensors(twins.outward(out)):
        hold(trace.axes(value), "output")


@contextmanager
def _forward_alone() -> Iterator[None]:
    """Run the forward pass of functions that bring their own gradient as any other code: torch hands them copies of
    tensors, which carry no axes."""
    own, plain = vars(Function)["apply"], Function.setup_context

    def forward(cls: type[Function], *given: Any) -> Any:
        return cls.forward(FunctionCtx(), *given) if cls.setup_context is plain else cls.forward(*given)

    setattr(Function, "apply", classmethod(forward))  # noqa: B010
    try:
        yield
    finally:
        setattr(Function, "apply", own)  # noqa: B010


@contextmanager
def _kept(held: Mapping[str, Tensor]) -> Iterator[None]:
    """Give tensors back the numbers that they had."""
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(before[name])


@torch.no_grad()
def _shuffle(held: Iterable[Tensor], seed: int) -> None:
    """Put the numbers of every matrix in another order."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in held:
        if tensor.dim() > 1:
            order = torch.randperm(tensor.numel(), generator=generator)
            tensor.copy_(tensor.flatten()[order].view(tensor.shape))


def _pattern(name: str) -> str:
    """Return a name without its numbers."""
    return re.sub(r"\d+", "{}", name)


def _patterns(names: Iterable[str]) -> set[str]:
    return {_pattern(name) for name in names}


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return what a file of the model holds that is computed with: parameters, and buffers (running statistics)."""
    state = model.state_dict()
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # tables that the class makes anew: constants
    held: dict[str, Tensor] = dict(model.named_parameters())
    held |= {name: one for name, one in model.named_buffers() if one.is_floating_point() and name in state}
    return {name: one for name, one in held.items() if name not in unsaved and one.numel()}


def _untie(model: nn.Module) -> dict[str, str]:
    """Give every name a parameter of its own: name -> the name that it was tied to, under which a file holds it."""
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


def infer(config: PretrainedConfig | str, cls: str | None = None) -> Inferred:
    """Infer the table of a model type, and prove it on tiny twins of two sizes.

    Where random elements change what a twin puts out, less is said of constants, and then the spaces to blame stay.

    Args:
        config: A configuration, or a model type, whose default configuration is meant.
        cls: The name of the class (default: what the configuration names, else that with most of the model).

    Raises:
        ModelError: No twin could be built, or no table was found that leaves its outputs as they are.
    """
    cls = type(twins.build(config, cls)[0]).__name__
    reason, attempts, start = "", list[tuple[str, Traced, float, Style]](), time.process_time()
    scale, depth = None, 2  # the smallest at which it runs
    larger = _larger(config, cls)
    styles = list(STYLES)
    found, level = None, ""
    while styles and (not attempts or level == "invertible" or time.process_time() - start < PATIENCE):
        kept = scale.kept if scale else frozenset[str]()
        try:
            if found is None:
                found = traced(*twins.build(config, cls, 0, scale))
                other = cache(partial(_larger, config, cls, kept, True, depth + 1))
            free = _free(found)
            few = larger is not None and bool(
                _patterns(larger.axes) - _patterns(found.axes)
            )  # has more kinds of layers
            if not kept and few and depth < DEEPEST:
                depth += 2
                scale, larger, found = Scale(layers=depth), _larger(config, cls, layers=depth + 1), None
                continue
            with _as_before(found):
                text = _text(found, styles[0], other, bool(kept))
                left = _free(found)
            if not kept and (few or left < LOSS * free):  # what differs stands by name: all layers must be there
                with nullcontext() if few else suppress(ModelError):  # where that is too much, it stays
                    whole = Scale(kept=frozenset({"layers"}))
                    found = traced(*twins.build(config, cls, 0, whole))
                    scale, larger = whole, _larger(config, cls, whole.kept)
                    other = cache(partial(_larger, config, cls, whole.kept, True))
                    continue
        except (ValueError, RuntimeError, LookupError, AssertionError) as error:  # axes that contain themselves, say
            reason = reason or one_line(error)
            styles.pop(0)
            continue
        attempts.append((text, found, left, styles.pop(0)))
        try:
            departure, level = proved(text, found, larger)
            if level == "invertible" and (still := _unmoved(text, found, larger)):
                text = _with_note(text, still, "stays")
                attempts[-1] = (text, *attempts[-1][1:])
                departure, level = proved(text, found, larger)
        except (ValueError, RuntimeError, LookupError, AssertionError) as error:
            reason = reason or one_line(error)
            if not kept and (scale is None or scale.head < WIDE) and _single(found, larger):
                scale, found = replace(scale or Scale(), head=WIDE), None
                styles, attempts = list(STYLES), []
            elif not kept and isinstance(error, TableError):  # layers by name, of which the other twin has more
                scale, found = Scale(kept=frozenset({"layers"})), None
                larger = _larger(config, cls, scale.kept)
                styles, attempts = list(STYLES), []
            continue
        if departure < TOLERANCE:
            return Inferred(text, departure, left, found.trace.unknown, attempts[-1][-1], [])
        reason = reason or f"random elements change the outputs by {departure:.2g}"
    for text, found, left, style in attempts:
        try:
            lowered = _blame(text, found, larger)
            text = _lowered(text, lowered)
            departure, _ = proved(text, found, larger)
        except (ValueError, RuntimeError, LookupError, AssertionError):
            continue
        if departure < TOLERANCE:
            return Inferred(text, departure, left, found.trace.unknown, style, sorted(lowered))
        if time.process_time() - start > 2 * PATIENCE:
            break
    raise ModelError(f"no exact table could be inferred for {cls}: {reason}")


def _single(found: Traced, larger: Traced | None) -> bool:
    """Whether some dimension of one entry has more in the other twin."""
    mine, other = (twin.model.state_dict() if twin else {} for twin in (found, larger))
    return any(n == 1 < more for name in mine.keys() & other.keys()
               for n, more in zip(mine[name].shape, other[name].shape, strict=False))  # fmt: skip


@contextmanager
def _as_before(found: Traced) -> Iterator[None]:
    """Let axes be after this what they were before, since writing a table lowers what may act on them."""
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
            waiting += [axis.atom for axis in (*atom.parts, atom.link) if axis is not None]
    try:
        yield
    finally:
        vars(trace).update(kept)
        for atom, values in before.values():
            vars(atom).update(values)


def _larger(
    config: PretrainedConfig | str,
    cls: str,
    kept: frozenset[str] = frozenset(),
    run: bool = False,
    layers: int = 3,
) -> Traced | None:
    """Return another twin, of other sizes, numbers of heads and one layer more, where one can be built: what agrees by
    chance in the first does not in both.

    Args:
        config: A configuration, or a model type.
        cls: The name of the class.
        kept: Kinds of numbers that stay as they are.
        run: Whether it is run, so that its tensors have axes.
        layers: How many layers it has, where no list says which.
    """
    for heads in (3, 2):  # some classes want powers of two
        try:
            model, inputs = twins.build(config, cls, 1, Scale(14, layers, heads, kept))
            break
        except ModelError:
            continue
    else:
        return None
    if run:
        return traced(model, inputs)
    tied = _untie(model)
    names = _held(model)
    return Traced(model, inputs, Trace(rules=RULES), {name: [] for name in names}, tied)


def _lowered(text: str, names: Mapping[str, float]) -> str:
    """Return a table in which nothing acts on these spaces; the size of a factor is told, as for any other."""
    for name in names:
        if re.search(rf"(?m)^    {name} factor(?= |$)", text):
            text = re.sub(r"(?m)^(types .*)$", rf"\1\nsize {name} = 1", text, count=1)
        text = re.sub(rf"(?m)^(    {name}) (?:pair signs|next signs|\w+)(?= |$)", r"\1 fixed", text)
    return text


def _with_note(text: str, roles: Collection[str], note: str) -> str:
    """Return a table in which the tensors of some names, their numbers aside, have one note more."""
    lines, heading = [], ""
    for line in text.split("\n"):
        if line.startswith("layer "):
            heading = line.removeprefix("layer ") + "."
        elif line == "tensors":
            heading = ""
        elif line.startswith("    ") and _pattern(heading + line.split()[0].rstrip("?")) in roles:
            line += f" ; {note}"
        lines.append(line)
    return "\n".join(lines)


def of_config(config: Mapping[str, Any]) -> Inferred:
    """Infer the table of a configuration as it stands in config.json; each is inferred once, and kept with its proof in
    the user's cache for later commands.

    Raises:
        ModelError: transformers does not know the type, or no exact table was found; the first reason is named.
    """
    stated = config.get("architectures")
    named = next(filter(_is_class, stated if isinstance(stated, list) else ()), "")
    seen = {key: value for key, value in config.items() if key not in UNSEEN}
    return _of_config(json.dumps([named, seen], sort_keys=True))


def _is_class(name: object) -> bool:
    """Whether transformers has a model class of this name."""
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return isinstance(found, type) and issubclass(found, PreTrainedModel)


@cache
def _of_config(unit: str) -> Inferred:
    named, config = json.loads(unit)
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__} does not know the model type '{kind}'")
    store = Cache(_code())
    if known := store.find(unit):
        return Inferred.of(**known)
    found = infer(CONFIG_MAPPING[kind].from_dict(config), named or None)
    store.put(unit, {"text": found.text, "facts": found.facts})
    return found


@cache
def _code() -> str:
    """What a table and its proof depend on besides the configuration: the code that infers, and what it runs."""
    package = Path(__file__).parents[1]
    ours = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        ours.update(path.read_bytes())
    return json.dumps([ours.hexdigest(), str(torch.__version__), transformers.__version__])


def table_of(config: Mapping[str, Any]) -> Table:
    """Return the table inferred for a configuration as it stands in config.json.

    Raises:
        TableError: transformers does not know the type, or no exact table was found; the first reason is named.
    """
    try:
        return of_config(config).table
    except ModelError as error:
        raise TableError(str(error)) from None


def _stored(model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as `save_pretrained` names and cuts them: name in a file -> tensor."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
    return found


def _numbered(found: Traced) -> dict[str, Tensor]:
    """Return the model's tensors with a number of its own in every place."""
    state, start, numbered = found.model.state_dict(), 0, {}
    for name in found.axes:
        numbered[name] = torch.arange(start, start + state[name].numel(), dtype=torch.float64).view(state[name].shape)
        start += state[name].numel()
    return numbered


def _on_disk(found: Traced) -> tuple[list[Found], dict[str, Tensor]]:
    """Return what a file holds, tensor by tensor, with axes, and the numbers of its entries in the model."""
    numbered = _numbered(found)
    disk = {name: tensor.long() for name, tensor in _stored(found.model, numbered).items()}
    starts = {name: int(tensor.flatten()[0]) for name, tensor in numbered.items() if tensor.numel()}
    ends = {name: start + numbered[name].numel() for name, start in starts.items()}
    owner: dict[str, list[str]] = {}
    for name, ids in disk.items():
        if not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        owner[name] = [one for one in starts if starts[one] <= high and low < ends[one]]
    # The pieces of one parameter, by number: those of experts.
    families: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in owner:
        whole = len(owner[name]) == 1 and disk[name].numel() == numbered[owner[name][0]].numel()
        for match in () if whole else _numbers_in(name):
            families.setdefault((match[0], match[2], "|".join(owner[name])), {})[match[1]] = name
    entries: list[Found] = []
    done: set[str] = set()
    for (before, after, parameter), names in families.items():
        if len(names) < 2 or set(names) != set(range(len(names))) or "|" in parameter or done & set(names.values()):
            continue
        axes = found.axes[parameter]
        if (
            len({disk[name].shape for name in names.values()}) > 1
            or not axes
            or axes[0] is None
            or axes[0].size != len(names)
        ):
            continue
        ordered = [disk[names[i]] for i in range(len(names))]
        stacked = torch.stack(ordered)
        expert, *inner = _axes_of(found, parameter, stacked - starts[parameter])
        places = [
            d
            for d, axis in enumerate(inner)
            if axis is not None and all(leaf.moves <= PERMUTE | MOVES["factor"] for leaf in axis.leaves)
        ]
        joint = next((d for d in places if any(leaf.moves for leaf in inner[d].leaves)), 0)  # type: ignore[union-attr]
        expert = expert if expert is not None else data(len(names))
        inner[joint] = flat([expert, inner[joint]]) if inner[joint] is not None else expert  # type: ignore[list-item]
        shape = [n * (len(names) if d == joint else 1) for d, n in enumerate(ordered[0].shape)]
        entries.append(Found(f"{before}{{@}}{after}", inner, parameter, tuple(shape), joint=joint))
        done |= set(names.values())
    for name, ids in disk.items():
        if name in done:
            continue
        mine = owner.get(name, [])
        if not mine:  # it holds nothing
            entries.append(Found(name, [data(n) if n != 1 else None for n in ids.shape], name, tuple(ids.shape)))
            continue
        if len(mine) == 1:
            axes = (
                found.axes[mine[0]]
                if torch.equal(ids, numbered[mine[0]].long())
                else _axes_of(found, mine[0], ids - starts[mine[0]])
            )
        else:
            axes = _side_by_side(found, mine, ids, starts, ends)
        entries.append(Found(name, axes, mine[0], tuple(ids.shape), found.tied.get(mine[0], "")))
    for name, home in found.tied.items():
        for a, b in zip(found.axes[name], found.axes.get(home, ()), strict=False):
            if a is not None and b is not None and not a.moves and not b.moves and not a.top.atom.parts:
                unify(a, b, "tied")
    names_of = {one.parameter: one.name for one in entries if not one.tied}
    for one in entries:
        one.tied = names_of.get(one.tied, one.tied)
    return entries, disk


def _numbers_in(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield every number in a name, the last first, with what stands around it."""
    for match in reversed(list(re.finditer(r"(?<=\.)\d+(?=\.)", name))):
        yield name[: match.start()], int(match[0]), name[match.end() :]


def _axes_of(found: Traced, parameter: str, places: Tensor) -> list[Axis | None]:
    """Return the axes of a tensor whose entry i is entry places[i] of a parameter."""
    source = torch.empty(found.model.state_dict()[parameter].shape)
    setattr(source, KEY, Label(list(found.axes[parameter])))
    out = torch.empty(places.shape)
    moved(found.trace, source, out, places, Call("stored", None, (), {}))
    return found.trace.axes(out)


def _side_by_side(
    found: Traced, owners: list[str], ids: Tensor, starts: Mapping[str, int], ends: Mapping[str, int]
) -> list[Axis | None]:
    """Return the axes of a tensor that holds several parameters, one after another along a dimension."""
    for dim in range(ids.dim()):
        lines = ids.movedim(dim, 0).reshape(ids.shape[dim], -1)
        which = [next(one for one in owners if starts[one] <= int(line[0]) < ends[one]) for line in lines]
        if any(
            int(line.min()) < starts[one] or int(line.max()) >= ends[one]
            for line, one in zip(lines, which, strict=True)
        ):
            continue
        cuts = [i for i in range(len(which)) if i == 0 or which[i] != which[i - 1]]
        pieces = []
        for start, end in zip(cuts, [*cuts[1:], len(which)], strict=True):
            part = ids.narrow(dim, start, end - start)
            pieces.append((_axes_of(found, which[start], part - starts[which[start]]), end - start))
        axes: list[Axis | None] = []
        for d in range(ids.dim()):
            here = [got[d] for got, _ in pieces]
            if d == dim:
                axes.append(joined([axis or data(length) for axis, (_, length) in zip(here, pieces, strict=True)]))
            else:
                first = next((axis for axis in here if axis is not None), None)
                for axis in here:
                    if axis is not None and first is not None:
                        unify(first, axis, "stored together")
                axes.append(first)
        return axes
    for one in owners:
        hold(found.axes[one], "stored together")
    return [new(n, frozenset()) if n > 1 else None for n in ids.shape]


def _text(
    found: Traced,
    style: Style,
    larger: Callable[[], Traced | None] = lambda: None,
    by_name: bool = False,
    still: tuple[frozenset[str], ...] = (),
) -> str:
    """Return the table of what was found.

    larger: another twin, traced, for sizes that shapes do not tell. by_name: whether layers that differ stand by name.
    still: spaces that stay, since nothing tells their sizes; each set as they were called without those before.
    """
    writer, ignored = _writer(found, style, by_name, still[-1:])
    model = found.model
    lines = writer.spaces()  # before the other twin is looked at

    @cache
    def sizes() -> tuple[list[Mapping[str, int]], list[Mapping[str, Any]]]:
        twin = larger()
        with _as_before(twin) if twin is not None else nullcontext():
            other = None if twin is None else _writer(twin, style, by_name, still)[0]
            unlike = other is None or [line[1:] for line in other.spaces()] != [line[1:] for line in lines]
        if twin is None or other is None or unlike:
            return [writer.sizes], [model.config.to_dict()]
        return [writer.sizes, other.sizes], [model.config.to_dict(), twin.model.config.to_dict()]

    def key_of(name: str) -> str | None:
        known, configs = sizes()
        return _key(name, tuple(each[name] for each in known), configs)

    text = writer.text(model.config.model_type, [model.config.model_type], key_of, ignored)
    if any(place.moves for place in writer.places if place.name in writer.unsized):
        return _text(found, style, larger, by_name, (*still, writer.unsized))
    return text


def _writer(
    found: Traced, style: Style, by_name: bool = False, still: tuple[frozenset[str], ...] = ()
) -> tuple[Writer, list[str]]:
    """Return what writes the table of a traced model, and patterns of what its files hold beside parameters."""
    model = found.model
    entries, disk = _on_disk(found)
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    outside = [name for name in disk if not name.startswith(prefix)]
    layers = {match[1]: match[2] for name in outside if (match := re.match(r"((.*?)\.\d+)\.", name))}
    blocks = Counter(layers.values())
    if not outside or len(outside) == len(disk) or any(count > 1 for count in blocks.values()):
        prefix = ""
    others = {name: tensor for name, tensor in model.state_dict().items() if name not in found.axes}
    ignored = sorted({re.sub(r"\.\d+\.", ".{}.", name.removeprefix(prefix)) for name in _stored(model, others)})
    writer = Writer(found.trace, entries, prefix, style, by_name)
    for names in still:
        writer.spaces()
        writer.hold(names)
        writer = Writer(found.trace, entries, prefix, style, by_name)
    return writer, ignored


def _key(name: str, sizes: tuple[int, ...], configs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what configurations say of the size of a space that has these sizes under them.

    A key that has the size in all of them, by its name if that tells, else a number that all share, else the simplest
    product or quotient of keys.
    """
    flat = [dict(_numbers_of(config)) for config in configs]
    numbers = {key: tuple(each[key] for each in flat) for key in flat[0] if all(key in each for each in flat)}
    whole: dict[str, tuple[int, ...]] = {
        key: values for key, values in numbers.items() if all(type(value) is int and value > 0 for value in values)
    }
    word = re.sub(r"\d+$", "", name)
    wanted = NAMED.get(word, r".")
    changing = len(set(sizes)) > 1
    ranked = [key for key, values in whole.items() if values == sizes and (changing or re.search(wanted, key))]
    ranked.sort(key=lambda key: (not re.search(wanted, key), "head" in name and bool(re.search("key_value|kv", key)),
                                 "." in key))  # fmt: skip
    shared = list(_shares_of(sizes, numbers, whole)) if word == "rope" else []
    if ranked and (not shared or re.search(wanted, ranked[0])):
        return ranked[0]
    if shared:
        return min(shared, key=len)
    found = []
    for a, n in whole.items():
        for b, m in whole.items():
            if a != b and all(x == y * size for x, y, size in zip(n, m, sizes, strict=True)):
                found.append(f"{a} / {b}")
            if a < b and changing and all(x * y == size for x, y, size in zip(n, m, sizes, strict=True)):
                found.append(f"{a} * {b}")
        ratios = {Fraction(size, x) for x, size in zip(n, sizes, strict=True)}
        if len(ratios) == 1 and changing:
            ratio = ratios.pop()
            if min(ratio.numerator, ratio.denominator) == 1 and max(ratio.numerator, ratio.denominator) < 9:
                found.append(f"{a} * {ratio.numerator}" if ratio > 1 else f"{a} / {ratio.denominator}")
    words = {"head": "head", "group": "head|group", "vo": WIDTHS, "qk": WIDTHS, "rope": WIDTHS}.get(word, ".")
    found.sort(key=lambda text: (not re.search(words, text), not re.search(WIDTHS, text.split(" ")[0]), len(text)))
    if not changing and len(sizes) > 1 and not (found and re.search("head", found[0])):
        return str(sizes[0])
    return found[0] if found else None


def _shares_of(
    sizes: tuple[int, ...], numbers: Mapping[str, tuple[Any, ...]], whole: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield the shares of a head that rotary embeddings turn which have these sizes."""
    for share, parts in numbers.items():
        if not re.search(r"rotary|rope", share) or not all(type(part) is float for part in parts):
            continue
        for a, n in whole.items():
            bodies = [(a, n)]
            bodies += [(f"{a} / {b}", tuple(x // y for x, y in zip(n, m, strict=True))) for b, m in whole.items()
                       if re.search("head", b) and all(x % y == 0 for x, y in zip(n, m, strict=True))]  # fmt: skip
            for body, each in bodies:
                turned = [(int(x * y) + 1) // 2 * 2 for x, y in zip(each, parts, strict=True)]
                if turned == list(sizes) and re.search("head", body):
                    yield f"even {body} * {share}"


def _numbers_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and what they hold, `outer.inner` for a configuration or a list inside."""
    for key, value in config.items():
        if isinstance(value, (Mapping, list, tuple)):
            inner = value if isinstance(value, Mapping) else {str(place): each for place, each in enumerate(value)}
            yield from ((f"{key}.{name}", each) for name, each in _numbers_of(inner))
        else:
            yield key, value


def proved(text: str, *found: Traced | None) -> tuple[float, str]:
    """Return by how much the canonical form, and random elements in every space, change the outputs of twins, and the
    first level at which that is too much, where no more is tried.

    Raises:
        ValueError: The outputs of a twin are the same whatever its parameters are, so that they prove nothing.
    """
    worst = 0.0
    for twin in found:
        for level, names, change in _levels(text, twin) if twin is not None else ():
            worst = max(worst, departure := change(None))
            if worst > TOLERANCE:
                return worst, level
            if names and departure == 0 and twin is not None and _deaf(twin):
                raise ValueError("its outputs do not depend on its parameters")
    return worst, ""


def _deaf(found: Traced) -> bool:
    """Whether a twin puts out the same with its numbers in another order."""
    state = found.model.state_dict()
    held = {name: state[name] for name in found.axes}
    before = twins.outputs(found.model, found.inputs)
    with _kept(held):
        _shuffle(held.values(), 0)
        return all(map(_alike, before, twins.outputs(found.model, found.inputs)))


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, entries that are no numbers too."""
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _blame(text: str, *found: Traced | None) -> dict[str, float]:
    """Return the spaces whose random elements change the outputs of twins, and by how much.

    Raises:
        ValueError: The canonical form changes them, whatever the elements.
    """
    blame: dict[str, float] = {}
    for twin in found:
        for level, names, change in _levels(text, twin) if twin is not None else ():
            if level == "invertible" and change(()) > TOLERANCE:
                raise ValueError("what is said of constants changes the outputs")
            blame |= _blamed(change, sorted(names - blame.keys()))
    return blame


def _unmoved(text: str, *found: Traced | None) -> set[str]:
    """Return the tensors, by name without numbers, that the canonical form takes something from that others cannot
    take: without which it leaves the outputs of twins as they are, or none where others are to blame, too."""
    wrong = set[str]()
    for twin in found:
        if twin is None:
            continue
        signature, values, change = _proof(text, twin)
        names = sorted(_patterns(signature.tensors) - wrong)
        wrong |= _blamed(partial(_canonical_change, signature, values, change), names).keys()
    return wrong


def _canonical_change(
    signature: Signature, values: Mapping[str, Tensor], change: Callable[..., float], names: Collection[str]
) -> float:
    """Return by how much the canonical form changes the outputs where only tensors of these names give something up."""
    tensors = {role: entry if _pattern(role) in names else replace(entry, notes={**entry.notes, "stays": ""})
               for role, entry in signature.tensors.items()}  # fmt: skip
    made = canonical(replace(signature, tensors=tensors), values)
    return change(made.signature, made.tensors, "invertible", ())


def _levels(text: str, found: Traced) -> Iterator[tuple[str, set[str], Callable[[Collection[str] | None], float]]]:
    """Yield every level, the spaces that move there, and what tells by how much random elements in some of them, or
    (None) in all, change the outputs of the twin."""
    signature, values, change = _proof(text, found)
    for level in ("permutation", "paper", "invertible"):
        form, numbers = signature, values
        if level == "invertible":
            made = canonical(signature, values)
            form, numbers = made.signature, made.tensors
        names = {signature.spaces[root].name for root in acting_groups(form, level, rescale="joint")}
        yield level, names, partial(change, form, numbers, level)


def _proof(text: str, found: Traced) -> tuple[Signature, dict[str, Tensor], Callable[..., float]]:
    """Return the signature that a table gives a twin, its tensors by role, and what tells by how much the outputs
    change when random elements act on given tensors.

    Tied tensors are one in its file, as in any that the class writes, and are given back to all who use them."""
    before = twins.outputs(found.model, found.inputs)
    whole = found.model.state_dict()
    state = {name: whole[name] for name in found.axes if name not in found.tied}
    disk = _stored(found.model, state)
    ids = {name: tensor.long() for name, tensor in _stored(found.model, _numbered(found)).items()}
    rest = _stored(found.model, {name: tensor for name, tensor in whole.items() if name not in found.axes})
    config = {**found.model.config.to_dict(), "architectures": [type(found.model).__name__]}
    shapes = {name: tuple(tensor.shape) for name, tensor in (disk | rest).items()}
    signature = resolve(read_table(text, "inferred"), shapes, config)
    values = {
        role: torch.cat([disk[name] for name in entry.names], entry.joint) if entry.pieces else disk[entry.name].clone()
        for role, entry in signature.tensors.items()
    }
    return signature, values, partial(_departure, found, before, ids)


def _blamed(change: Callable[[Collection[str]], float], names: Sequence[str]) -> dict[str, float]:
    """Return the spaces whose random elements change the outputs, and by how much, found by halves: most change
    nothing."""
    if not names or (worst := change(names)) <= TOLERANCE:
        return {}
    if len(names) == 1:
        return {names[0]: worst}
    half = len(names) // 2
    return _blamed(change, names[:half]) | _blamed(change, names[half:])


def _departure(
    found: Traced,
    before: list[Tensor],
    ids: Mapping[str, Tensor],
    signature: Signature,
    values: Mapping[str, Tensor],
    level: str,
    only: Collection[str] | None,
) -> float:
    alignment = scrambling(signature, level, only)
    whole = found.model.state_dict()
    state = {name: whole[name] for name in found.axes}
    every = torch.cat([tensor.flatten() for tensor in state.values()])
    given = torch.zeros(len(every), dtype=torch.bool)
    for role, entry in signature.tensors.items():
        for name, part in entry.split(alignment.apply(signature, role, values[role])):
            every[ids[name].flatten()], given[ids[name].flatten()] = part.flatten(), True
    lengths = [tensor.numel() for tensor in state.values()]
    parts, own = (dict(zip(state, torch.split(one, lengths), strict=True)) for one in (every, given))
    with _kept(state), torch.no_grad():
        for name, tensor in state.items():
            home = name if own[name].any() else found.tied.get(name, name)
            tensor.copy_(parts[home].view(tensor.shape))
        after = twins.outputs(found.model, found.inputs)
    return max(_difference(a, b) for a, b in zip(before, after, strict=True))


def _difference(before: Tensor, after: Tensor) -> float:
    """Return the relative difference of two outputs; what is infinite or no number has to stay that."""
    known = before.isfinite() & after.isfinite()
    if not _alike(before[~known], after[~known]):
        return inf
    return float((before - after)[known].norm() / before[known].norm().clamp_min(1e-30))


def _free(found: Traced) -> float:
    """The share of matrices that something acts on."""
    matrices = [axes for axes in found.axes.values() if len(axes) > 1]
    free = [axes for axes in matrices if any(leaf.moves for axis in axes if axis is not None for leaf in axis.leaves)]
    return len(free) / max(len(matrices), 1)
