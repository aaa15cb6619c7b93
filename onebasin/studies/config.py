# SPDX-License-Identifier: Apache-2.0
"""The plan of a study, read from a YAML file: models, data, ways to match and ways to merge."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from onebasin.config_files import read_yaml, sentence_of
from onebasin.fusion import method_of
from onebasin.jobs.options import LEVEL_NAMES, Options, level_named
from onebasin.settings import Count, Points, Seed, choose_from, refuse_unknown

Matching = dict[str, Any] | None  # options of `onebasin.match`; None: the models as they are


class Corpus(BaseModel):
    """One dataset, in files that `onebasin.data.load_task` reads.

    test: for all scores. validation: for the choice of `layers: auto`. calibration: for methods that measure on data,
    such as the training rows.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    test: str
    validation: str | None = None
    calibration: str | None = None


class Config(BaseModel):
    """A study's file.

    models: folders or hub ids, one per corpus, or all of a single corpus; `{seed}` in a name is replaced by each of
    `seeds` in turn. out_of_domain: a corpus on which no model was trained, for the merge of all. matchings: name ->
    options of `onebasin.match` (null: no matching; `layers: auto` chooses the layers whose match scores best on
    validation data; see `onebasin.jobs.layers`). methods: of `onebasin merge --method`; or name -> arguments of
    `onebasin.merge`, whose method is the name unless given. options: further options of `load_task`, such as context.
    """

    model_config = ConfigDict(extra="forbid")

    task: str
    models: list[str] = Field(min_length=2)
    seeds: list[Seed] = Field(default=[0], min_length=1)
    corpora: list[Corpus] = Field(min_length=1)
    out_of_domain: Corpus | None = None
    matchings: dict[str, Matching] = Field(default={}, validate_default=True)
    methods: dict[str, dict[str, Any]] = Field(default={"average": {}}, validate_default=True)
    metric: str = "accuracy"
    limit: Count | None = None
    samples: Count = 256
    points: Points = 11
    options: dict[str, Any] = {}

    @field_validator("methods", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Turn a list of methods into methods without settings."""
        return {name: {} for name in given} if isinstance(given, list) else given

    @field_validator("methods")
    @classmethod
    def _whole(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found = {}
        for name, options in given.items():
            found[name] = {"method": name, **options}
            method = method_of(str(found[name]["method"]))
            refuse_unknown(options, ["method", "weights", *method.names()], of=f"of the method '{name}'")
            method.of({key: value for key, value in options.items() if key in method.names()})
        return found

    @field_validator("matchings")
    @classmethod
    def _known(cls, given: dict[str, Matching]) -> dict[str, Matching]:
        for name, options in given.items():
            refuse_unknown(options or {}, [*LEVEL_NAMES, *Options.names()], of=f"of the matching '{name}'")
            level_named(options or {}, "symmetry")
        return given

    def only(self, methods: Collection[str] | None, metric: str | None) -> Config:
        """Return a copy with only these methods, or with another metric. Raises ValueError for an unknown method."""
        for name in methods or ():
            if name not in self.methods:
                raise ValueError(f"the study has no method '{name}'; {choose_from(name, self.methods)}")
        some = {name: how for name, how in self.methods.items() if methods is None or name in methods}
        return self.model_copy(update={"methods": some, "metric": metric or self.metric})

    def runs(self) -> list[list[str]]:
        """Return the models of every seed."""
        return [[name.replace("{seed}", str(seed)) for name in self.models] for seed in self.seeds]

    def corpus(self, model: int) -> Corpus:
        """Return the corpus on which a model, counted from 0, was trained."""
        return self.corpora[model if len(self.corpora) > 1 else 0]


def read_config(file: str | Path, **defaults: Any) -> Config:
    """Read the study in `file`. defaults: for keys that it does not have.

    Raises ValueError naming the first key that is unknown (and the nearest known one), missing, or of a wrong type.
    """
    if not Path(file).is_file():
        raise ValueError(f"there is no study file '{file}'")
    found, _ = read_yaml(file)
    if not isinstance(found, dict):
        raise ValueError(f"'{file}' is not a study: it needs keys such as task, models and corpora")
    try:
        config = Config(**{**defaults, **found})
    except ValidationError as error:
        raise ValueError(f"'{file}': {sentence_of(error, Config)}") from None
    if len(config.corpora) not in (1, len(config.models)):
        raise ValueError(f"'{file}': {len(config.models)} models need one corpus, or one each")
    return config
