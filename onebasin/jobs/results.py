# SPDX-License-Identifier: Apache-2.0
"""The results of jobs: dictionaries of facts, as JSON takes them, with the main facts as attributes, and a model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.models import ModelError
from onebasin.models.companions import companions
from onebasin.models.fetching import upload
from onebasin.running import pretrained

from .apply import ModelAlignment
from .verdict import Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Result(dict[str, Any]):
    """The result of a job: the facts that a command prints with --json, as items and as attributes.

    Attributes:
        notes: Remarks for the reader of the result.
        seconds: How long it took.
    """

    notes: list[str]
    seconds: float
    _loaded: PreTrainedModel | None = None
    _beside: Sequence[tuple[Path, bytes]] = ()  # the files that belong beside the weights of a model in memory

    if not TYPE_CHECKING:  # which knows the facts that the classes name

        def __getattr__(self, name: str) -> Any:
            if name not in self:
                raise AttributeError(f"this result has no '{name}'")
            return self[name]

    @property
    def output(self) -> Path | None:
        """The folder that was written, if any."""
        return None if self["output"] is None else Path(self["output"])

    @property
    def model(self) -> PreTrainedModel:
        """The model that was made. One that was written to a folder is loaded on first use."""
        if "model" in self:
            made: PreTrainedModel = self["model"]
            return made
        if self._loaded is None:
            self._loaded = pretrained(self["output"])
        return self._loaded

    def hold(self, folder: Path) -> None:
        """Keep the model of a folder in memory, with the files beside its weights: the folder will be removed."""
        self["model"] = pretrained(folder)
        self._beside = [(path.relative_to(folder), path.read_bytes()) for path in companions(folder)]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to another folder, with its tokenizer and all else that belongs to it.

        Args:
            folder: a folder that does not exist, or is empty.

        Raises:
            ModelError: the folder is not empty.
        """
        place = Path(folder)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ModelError(f"'{folder}' exists already; name another folder")
        if self.output is None:
            self.model.save_pretrained(place)
            for path, content in self._beside:
                (place / path.parent).mkdir(exist_ok=True)
                (place / path).write_bytes(content)
        else:
            shutil.copytree(self.output, place, dirs_exist_ok=True)

    def push_to_hub(self, repository: str) -> str:
        """Upload the model to owner/name on the hub, and return its address."""
        if self.output is not None:
            return upload(self.output, repository)
        with tempfile.TemporaryDirectory() as temporary:
            self.save_pretrained(temporary)
            return upload(temporary, repository)


class MatchResult(Result):
    """The result of `match`.

    Attributes:
        alignment: How the source was moved. Its `apply_to` moves whatever belongs to the source in the same way.
        distance_before: The distance between source and anchor.
        distance_after: The distance between the rewritten source and the anchor.
        max_output_difference: The largest difference of an output from that of the source; None if the models were not
            run.
    """

    distance_before: float
    distance_after: float
    max_output_difference: float | None

    def __init__(self, facts: Mapping[str, Any], alignment: ModelAlignment) -> None:
        super().__init__(facts)
        self.alignment = alignment


class MergeResult(Result):
    """The result of `merge`.

    Attributes:
        alignments: How the models were moved, one for each model but the anchor, in their order.
        anchor: The model that stayed as it is.
        distance_before: The distance of every other model to the anchor.
        distance_after: The distance of every other model to the anchor after matching.
        max_output_difference: For every moved model, the largest difference of an output from that of its source.
    """

    anchor: int
    distance_before: list[float]
    distance_after: list[float]
    max_output_difference: list[float | None]

    def __init__(self, facts: Mapping[str, Any], alignments: Sequence[ModelAlignment] = ()) -> None:
        super().__init__(facts)
        self.alignments = list(alignments)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the merged model still predicts what its sources predict; None if it was not judged."""
        return Verdict(**self["verdict"]) if "verdict" in self else None
