# SPDX-License-Identifier: Apache-2.0
"""User settings: numeric types with bounds, and dataclasses of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Field, TypeAdapter, ValidationError

Seed = Annotated[int, Field(ge=0, lt=2**32)]  # numpy's bounds
Index = Annotated[int, Field(ge=0, lt=10**6)]  # of layers and tokens, counted from 0
Indices = Annotated[list[Index], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=10**9)]  # of examples, steps
Few = Annotated[int, Field(ge=1, le=1000)]  # of expensive things: starts of a search, threads, drawn labels
Context = Annotated[int, Field(ge=2, le=10**6)]  # tokens; one leaves nothing to predict
Points = Annotated[int, Field(ge=2, le=1000)]  # on a line or an edge, both ends included
Share = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1)]  # of a whole
Factor = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Rate = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10)]  # of learning
Strength = Annotated[float, Field(allow_inf_nan=False, ge=0, le=10**6)]  # of noise, of entropy, of a tensor in a sum
Interval = Annotated[list[Factor], Field(min_length=2, max_length=2)]  # lower and upper end
Temperature = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10**6)]
Concentration = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10**6)]  # of a Dirichlet distribution, per model
Seconds = Annotated[float, Field(allow_inf_nan=False, gt=0, le=10**7)]
Weight = Annotated[float, Field(allow_inf_nan=False, ge=-(10**6), le=10**6)]  # of a model in a sum


def checked(kind: Any, name: str, value: Any) -> Any:
    """Convert a value to the type of its setting, such as "2" to 2.

    Args:
        kind: The type with its bounds, such as `Count`, `Count | None` or `list[Count]`.
        name: The name of the setting, for the message.
        value: The value to convert.

    Raises:
        ValueError: The value is not of that type or out of bounds (NaN always is).
    """
    return _valid(TypeAdapter(kind), name, value)


def check_fields(settings: object) -> None:
    """Convert and check the fields of a dataclass whose types have bounds or are literals, in its `__post_init__`.

    Raises:
        ValueError: As `checked` does.
    """
    kind = type(settings)
    if kind not in _ADAPTERS:
        hints = get_type_hints(kind, include_extras=True)
        _ADAPTERS[kind] = {name: TypeAdapter(hint) for name, hint in hints.items() if _has_bounds(hint)}
    for name, adapter in _ADAPTERS[kind].items():
        object.__setattr__(settings, name, _valid(adapter, name, getattr(settings, name)))


_ADAPTERS: dict[type, dict[str, TypeAdapter[Any]]] = {}


def _has_bounds(hint: Any) -> bool:
    bounded = bool(getattr(hint, "__metadata__", ())) or get_origin(hint) is Literal
    return bounded or any(map(_has_bounds, () if get_origin(hint) is Literal else get_args(hint)))


def _valid(adapter: TypeAdapter[Any], name: str, value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join([name.replace("_", "-"), *(str(piece) for piece in first["loc"])])
        what = first["msg"].replace("Input should", "it must")
        if first["type"] == "literal_error":
            known = re.findall("'([^']*)'", first["ctx"]["expected"])
            what = choose_from(first["input"], known)
        raise ValueError(f"{where} {first['input']!r}: {what}") from None


def setting(
    default: Any = None,
    help: str = "",
    *,
    flag: str | None = None,
    factory: Callable[[], Any] | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Return a dataclass field that users can set on the command line, in Python and in files.

    Args:
        default: The default value.
        help: One sentence that describes the setting; the command line appends the default.
        flag: Name of the command-line option, without dashes (default: the field's name).
        factory: Creates the default if that is mutable.
        choices: The words that it takes, for the command line to show; those of a literal type are known.
    """
    facts = {"help": help, "flag": flag, "choices": choices}
    return field(default_factory=factory, metadata=facts) if factory else field(default=default, metadata=facts)


S = TypeVar("S", bound="Settings")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Settings:
    """A group of settings: a frozen dataclass whose fields have typed bounds, defaults and help texts.

    The command line, keyword arguments and files are all read through these fields; nothing repeats them.

    Attributes:
        section: Heading in a command's help under which the class's own fields are listed.

    Raises:
        ValueError: A value is out of bounds.
    """

    section: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.names():  # a path is given as well as its name
            object.__setattr__(self, name, plain(getattr(self, name)))

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any]) -> S:
        """Create the settings from a dictionary.

        Raises:
            ValueError: A value is out of bounds, or a name is unknown; the message suggests the closest known name.
        """
        left = dict(given)
        found = take(cls, left)
        refuse_left(left, cls)
        return found

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields that users can set."""
        return tuple(one.name for one in fields(cls) if "help" in one.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are not None, as values for JSON."""
        found = {name: getattr(self, name) for name in self.names()}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Seeded(Settings):
    """Settings of a job that draws random numbers."""

    section: ClassVar[str] = "Machine"

    seed: Seed = setting(0, "Random seed: for starts after the first, labels, masks and random merges.")


@dataclass(frozen=True)
class Reading(Settings):
    """How data are read."""

    section: ClassVar[str] = "Data"

    columns: Mapping[str, str] | None = setting(
        None, "Names of the columns in your data, such as text=sentence1,text_pair=sentence2."
    )
    context: Context | None = setting(None, "Tokens per sequence [default: the model's limit, at most 512].")
    vocabulary: str | Mapping[str, int] | None = setting(
        None, "JSON file that maps characters to ids (or lists them), for a character-level language model."
    )
    mask_id: Index | None = setting(None, "masked-lm: id of the mask token [default: the tokenizer's].")
    mask_share: Share = setting(0.15, "masked-lm: share of the tokens that are masked.")
    maskable: Indices | None = setting(None, "masked-lm: mask only these token ids, such as 5-80,91.")

    @property
    def reading(self) -> dict[str, Any]:
        """Return the settings that are not None."""
        found = {name: getattr(self, name) for name in Reading.names()}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Examples(Reading, Seeded):
    """The examples that models are measured on, and how they are batched.

    Args:
        by_length: Batch examples of similar length, which saves padding but changes their order.
    """

    section: ClassVar[str] = "Data"

    split: str | None = setting(
        None, "train, validation, test or all [default: digits and datasets test, text validation, rows all]."
    )
    limit: Count | None = setting(None, "Use only the first N images, rows or sequences.")
    batch: Count = setting(64, "Examples per batch; changes the speed, not the result.")
    by_length: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "maskable", None if self.maskable is None else list(self.maskable))
        super().__post_init__()


@dataclass(frozen=True)
class OutputSettings(Settings):
    """The files that are written. The command line explains the other settings.

    Attributes:
        files: Name -> text of further files, written beside the weights.
    """

    section: ClassVar[str] = "Output"

    shard_size: int | str = setting("5GB", "Maximum size of a weight file: 5GB, 500MB, 5B.", flag="out-shard-size")
    copy_tokenizer: bool = setting(True, "Copy the tokenizer's files to the output.")
    write_model_card: bool = setting(True, "Write README.md and, with --config, mergekit_config.yml.")
    files: Mapping[str, str] = field(default_factory=dict)


class ExampleKeywords(TypedDict, total=False):
    """The fields of `Examples`, as keyword arguments."""

    columns: Mapping[str, str] | None
    context: int | None
    vocabulary: str | Path | Mapping[str, int] | None
    mask_id: int | None
    mask_share: float
    maskable: Collection[int] | None
    seed: int
    split: str | None
    limit: int | None
    batch: int
    by_length: bool


def plain(value: Any) -> Any:
    """Return a value with every path in it, also in a list, as a string."""
    if isinstance(value, Path):
        return str(value)
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def take(kind: type[S], given: dict[str, Any]) -> S:
    """Create settings from keyword arguments, and remove those that were used from `given`.

    Raises:
        ValueError: A value is out of bounds.
    """
    return kind(**{one.name: given.pop(one.name) for one in fields(kind) if one.name in given})


def refuses_unknown(
    *kinds: type[Any], more: Callable[[], Iterable[str]] = tuple
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function refuse unknown keyword arguments, with the closest known name in the message.

    Args:
        kinds: Dataclasses whose fields the function accepts besides its own arguments.
        more: Returns further names that it accepts.

    Returns:
        A decorator; the function then raises ValueError for an unknown name.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        arguments = signature(function).parameters.values()
        own = [one.name for one in arguments if one.kind is not one.VAR_KEYWORD]

        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs.keys() - own:
                known = [*own, *(one.name for kind in kinds for one in fields(kind)), *more()]
                refuse_unknown(kwargs, known)
            return function(*args, **kwargs)

        return wrapped

    return decorated


def refuse_left(given: Mapping[str, Any], *kinds: type[Settings]) -> None:
    """Refuse keyword arguments that are no setting of any of these kinds.

    Raises:
        ValueError: Names the first of them and the closest known setting.
    """
    refuse_unknown(given, [name for kind in kinds for name in kind.names()] if given else [])


def refuse_unknown(given: Iterable[str], known: Collection[str], what: str = "setting", of: str = "") -> None:
    """Refuse unknown names.

    Args:
        given: The names to check.
        known: All known names.
        what: What the names denote, for the message.
        of: Where the names were given, for the message.

    Raises:
        ValueError: Names the first unknown name and the closest known one.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
            raise ValueError(f"unknown {what} '{name}'{of and ' '}{of}; {hint}")


def choose_from(given: object, known: Iterable[str]) -> str:
    """Return the end of a message about a wrong word: all known words, and the one that was probably meant."""
    words = list(known)
    near = get_close_matches(str(given).lower(), words, 1, 0.6)
    return "choose from " + ", ".join(words) + (f"; did you mean '{near[0]}'?" if near else "")


def refuse_choice(what: str, given: object, known: Collection[str]) -> None:
    """Raise ValueError for a word that is not known, naming those that are and the nearest of them."""
    if given not in known:
        raise ValueError(f"unknown {what} '{given}'; {choose_from(given, known)}")


def duration(text: str | float) -> float:
    """Convert a duration such as 30s, 5m, 2h or 1.5m to seconds; a bare number is in seconds.

    Raises:
        ValueError: The text is not a duration, or it is zero or longer than 10^7 seconds.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *(s|m|h)?", str(text).strip())
    if found is None or not 0 < (seconds := float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]) <= 10**7:
        raise ValueError(f"'{text}' is not a duration; write it like 30s, 5m or 2h")
    return seconds
