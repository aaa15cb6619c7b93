# SPDX-License-Identifier: Apache-2.0
"""The schema of a merge file: mergekit's keys, checked strictly, and the block `align`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from onebasin.config_files import read_yaml, sentence_of
from onebasin.data.calibration import Calibration
from onebasin.matching.learned import Learning
from onebasin.matching.weights import Weights
from onebasin.models.writer import bytes_of
from onebasin.settings import Count, Seed, refuse_unknown

from ..options import Matching, Options

Number = Annotated[float, Field(allow_inf_nan=False)]
Scalar = bool | int | Number | str
Dtype = Literal["float32", "float16", "bfloat16", "float64"]


class Strict(BaseModel):
    """A block of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Conditional(Strict):
    """A value for the tensors whose name contains `filter`; where that is absent or `*`, for all others."""

    value: Scalar | list[Scalar]
    filter: str | None = None


Setting = Scalar | list[Scalar] | Conditional | list[Conditional]
Settings = Annotated[dict[str, Setting], BeforeValidator(lambda given: {} if given is None else given)]


def _parted(given: Any, mark: str, first: str, second: str) -> Any:
    """Return the fields in a text such as `path@revision`, the second of which may be missing."""
    if not isinstance(given, str):
        return given
    head, *tail = given.split(mark)
    if not head or len(tail) > 1:
        raise ValueError(f"'{given}' does not name a model; write {first} or {first}{mark}{second}")
    return {first: head, second: tail[0] if tail else None}


class Place(Strict):
    """A folder or a hub id, and its revision: `path@revision`."""

    path: str
    revision: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return _parted(given, "@", "path", "revision")

    def __str__(self) -> str:
        return f"{self.path}@{self.revision}" if self.revision else self.path


class Reference(Strict):
    """A model, and the LoRA adapter to be merged into it first: `path@revision+lora@revision`."""

    model: Place
    lora: Place | None = None
    override_architecture: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return _parted(given, "+", "model", "lora")

    def __str__(self) -> str:
        return f"{self.model}+{self.lora}" if self.lora else str(self.model)


class Source(Strict):
    """One model of a merge. layer_range: first layer and the one after the last, inside a slice."""

    model: Reference
    parameters: Settings = {}
    layer_range: tuple[int, int] | None = None


class Slice(Strict):
    """Consecutive layers of the output, and where they come from."""

    sources: list[Source]
    base_model: Reference | None = None
    residual_weight: Number | None = None
    parameters: Settings = {}


class Module(Strict):
    """A part of a model with several (a text and a vision tower)."""

    slices: list[Slice] | None = None
    models: list[Source] | None = None
    parameters: Settings = {}


class Tokenizer(Strict):
    """The long form of `tokenizer_source`; only mergekit's own methods take it."""

    source: Literal["union", "base"] | Reference = "union"
    tokens: dict[str, Any] | None = None
    pad_to_multiple_of: Count | None = None


class Align(Strict):
    """Match the models before they are merged. anchor: `base`, `auto`, or one of the models as it is written above.

    All other keys are the settings of matching and of its data, under their own names. seed: of the whole merge.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    symmetry: str = Field("full", validation_alias=AliasChoices("symmetry", "match", "level"))
    anchor: str = "base"
    seed: Seed | None = None

    @model_validator(mode="after")
    def _settings(self) -> Align:
        known = {name: None for kind in (Matching, Weights, Learning, Calibration) for name in kind.names()}
        refuse_unknown(self.model_extra or {}, ["anchor", "match", "level", *known], "key", "in align")
        Options.of(self.options())
        return self

    def options(self) -> dict[str, Any]:
        """Return the fields of `Options` that are given here, except the seed, which belongs to the recipe."""
        return {"symmetry": self.symmetry, **(self.model_extra or {})}


class Recipe(Strict):
    """A merge file. Exactly one of `models`, `slices` and `modules` says what is merged.

    random_seed: of methods that draw random numbers, and of the starts of a search. out_shard_size: the maximum size of
    a weight file, such as 5GB. mergekit takes both as options.
    """

    merge_method: str
    models: list[Source] | None = None
    slices: list[Slice] | None = None
    modules: dict[str, Module] | None = None
    base_model: Reference | None = None
    parameters: Settings = {}
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: Literal["union", "base"] | Reference | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    random_seed: Seed | None = None
    out_shard_size: int | str | None = None
    align: Align | None = None

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        given = [name for name in ("models", "slices", "modules") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("give exactly one of models, slices and modules")
        for source in self.models or []:
            if source.layer_range is not None:
                raise ValueError("layer_range belongs to the sources of slices, not to models")
        for piece in self.pieces:
            ranges = [source.layer_range for source in piece.sources]
            if not ranges or any(pair is None or not 0 <= pair[0] < pair[1] for pair in ranges):
                raise ValueError("every source of a slice needs a layer_range [first, one after the last]")
            if len({pair[1] - pair[0] for pair in ranges if pair}) > 1:
                raise ValueError("the sources of one slice must have equally many layers")
        if self.tokenizer and self.tokenizer_source:
            raise ValueError("tokenizer_source and tokenizer say the same; write one of them")
        if self.out_shard_size is not None:
            bytes_of(self.out_shard_size)
        if len({self.random_seed, self.align and self.align.seed} - {None}) > 1:
            raise ValueError("a merge has one seed, and random_seed and align.seed differ; write one of them")
        return self

    @property
    def seed(self) -> int:
        """Return the seed of the merge, whichever key gives it."""
        return self.random_seed or (self.align and self.align.seed) or 0

    @property
    def pieces(self) -> list[Slice]:
        """Return every slice of the file, including those of its modules."""
        owners: list[Recipe | Module] = [self, *(self.modules or {}).values()]
        return [piece for owner in owners for piece in owner.slices or []]

    @property
    def references(self) -> list[Reference]:
        """Return every model that the file names, once and in order, the base model of the whole merge first."""
        modules, pieces = list((self.modules or {}).values()), self.pieces
        sources = [*(self.models or []), *(source for module in modules for source in module.models or [])]
        sources += [source for piece in pieces for source in piece.sources]
        bases = [self.base_model, *(piece.base_model for piece in pieces)]
        named = [*(base for base in bases if base), *(source.model for source in sources)]
        return list({str(reference): reference for reference in named}.values())


def split_documents(path: str | Path, folder: Path) -> list[Path]:
    """Write every document of a file that holds several, as mergekit-multi does, to a file of its own.

    All but the last have a `name`. Later documents refer by it to the model that they make, the folder of that name in
    `folder`. Returns their files, whose stems are the names; the given file itself if it holds one document. Raises
    ValueError for a name that is missing, used twice or not valid.
    """
    contents, _ = read_yaml(path, several=True)
    if len(contents) < 2:
        return [Path(path)]
    places: dict[str, str] = {}
    files = []
    for number, content in enumerate(contents):
        if not isinstance(content, dict):
            raise ValueError(f"'{path}': document {number + 1} is not a merge file")
        name = content.pop("name", None)
        if number < len(contents) - 1 and (not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name)):
            raise ValueError(f"'{path}': document {number + 1} needs a name of letters, digits, - and _, by which the "
                             "next ones name what it makes")  # fmt: skip
        if name in places:
            raise ValueError(f"'{path}': two documents are called '{name}'")
        file = folder / (f"{name}.yml" if number < len(contents) - 1 else "last document.yml")
        file.write_text(yaml.safe_dump(_placed(content, places), sort_keys=False), "utf-8")
        places[str(name)] = str(folder / str(name))
        files.append(file)
    return files


def _placed(value: Any, places: Mapping[str, str]) -> Any:
    """Return a document with the names of earlier documents replaced by the folders that they made."""
    if isinstance(value, dict):
        return {key: _placed(one, places) for key, one in value.items()}
    if isinstance(value, list):
        return [_placed(one, places) for one in value]
    if not isinstance(value, str):
        return value
    model, plus, lora = value.partition("+")
    return places.get(model, model) + plus + lora


def read_recipe(path: str | Path) -> tuple[Recipe, str]:
    """Return the content of a file, and its text.

    Raises ValueError, in one sentence, for text that is not YAML, an unknown key (naming the nearest known one), and a
    value of the wrong type.
    """
    content, text = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' is not a merge file: it must hold keys such as merge_method and models")
    try:
        return Recipe.model_validate(content), text
    except ValidationError as error:
        raise ValueError(f"'{path}': {sentence_of(error, Recipe)}") from None


def parameter_names(recipe: Recipe) -> Mapping[str, str]:
    """Return every name under `parameters`, anywhere in the file -> the place of its first use."""
    found: dict[str, str] = {}

    def add(settings: Settings, place: str) -> None:
        for name in settings:
            found.setdefault(name, place)

    add(recipe.parameters, "parameters")
    modules = list((recipe.modules or {}).values())
    owners: list[Recipe | Module] = [recipe, *modules]
    for owner in owners:
        for i, source in enumerate(owner.models or []):
            add(source.parameters, f"models[{i}].parameters")
        for i, piece in enumerate(owner.slices or []):
            add(piece.parameters, f"slices[{i}].parameters")
            for j, source in enumerate(piece.sources):
                add(source.parameters, f"slices[{i}].sources[{j}].parameters")
    for module in modules:
        add(module.parameters, "modules")
    return found
