# SPDX-License-Identifier: Apache-2.0
"""The results of jobs: dictionaries of facts, as JSON takes them, with the main facts as attributes, and a model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebasin.models import ModelError
from onebasin.models.hub import upload
from onebasin.running import load_model

from .apply import ModelAlignment
from .verdict import Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Result(dict[str, Any]):
    """The result of a job. `result["distance_after"]` and `result.distance_after` are the same. The facts are those
    that a command prints with --json."""

    _loaded: PreTrainedModel | None = None

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
            self._loaded = load_model(self["output"])
        return self._loaded

    @property
    def notes(self) -> list[str]:
        """Remarks for the reader of the result."""
        return list(self["notes"])

    @property
    def seconds(self) -> float:
        """How long it took."""
        return float(self["seconds"])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to another folder: a copy of the output, or only the model if there is no output.

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

    alignment: how the source was moved. Its `apply_to` moves whatever belongs to the source in the same way.
    """

    def __init__(self, facts: Mapping[str, Any], alignment: ModelAlignment) -> None:
        super().__init__(facts)
        self.alignment = alignment

    @property
    def distance_before(self) -> float:
        """The distance between source and anchor."""
        return float(self["distance_before"])

    @property
    def distance_after(self) -> float:
        """The distance between the rewritten source and the anchor."""
        return float(self["distance_after"])

    @property
    def max_output_difference(self) -> float | None:
        """The largest difference of an output from that of the source; None if the models were not run."""
        found: float | None = self["max_output_difference"]
        return found


class MergeResult(Result):
    """The result of `merge`.

    alignments: how the models were moved, one for each model but the anchor, in their order.
    """

    def __init__(self, facts: Mapping[str, Any], alignments: Sequence[ModelAlignment] = ()) -> None:
        super().__init__(facts)
        self.alignments = list(alignments)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the merged model still predicts what its sources predict; None if it was not judged."""
        return Verdict(**self["verdict"]) if "verdict" in self else None

    @property
    def anchor(self) -> int:
        """The model that stayed as it is."""
        return int(self["anchor"])

    @property
    def distance_before(self) -> list[float]:
        """The distance of every other model to the anchor."""
        return list(self["distance_before"])

    @property
    def distance_after(self) -> list[float]:
        """The distance of every other model to the anchor after matching."""
        return list(self["distance_after"])

    @property
    def max_output_difference(self) -> list[float | None]:
        """For every moved model, the largest difference of an output from that of its source."""
        return list(self["max_output_difference"])
