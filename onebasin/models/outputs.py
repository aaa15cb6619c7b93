# SPDX-License-Identifier: Apache-2.0
"""Checks of a command's outputs before any work: against its inputs, each other, and existing files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebasin.engine.filesystem import real
from onebasin.engine.placing import Placing, replaceable, tidy

from .companions import companions
from .errors import ModelError
from .folder import Folder

MODEL = "config.json"


@dataclass(frozen=True)
class Output:
    """A place that a command writes to.

    name: for messages. marker: the file by which a folder that may be replaced is recognised; `""` for a file. grows:
    whether this is a file that is continued if it exists.
    """

    name: str
    place: str | Path
    marker: str = MODEL
    grows: bool = False


def model_folder(placing: Placing, out: Path, overwrite: bool) -> Path:
    """Return a hidden folder, which `placing` moves to `out`; with `overwrite` it may replace a model there."""
    return placing.folder(out, MODEL if overwrite else None)


def refuse_outputs(
    outputs: Sequence[Output],
    inputs: Iterable[Folder | Path] = (),
    overwrite: bool = False,
    own: Collection[Path] = (),
) -> None:
    """Fail before any work if one of the outputs could not be written at the end.

    No output may be an input, contain one, or be one of its files. No two outputs may be the same, or one inside the
    other. None may exist, unless `overwrite` is given and it is of the kind that may be replaced. What killed runs with
    the same outputs have left is removed.

    own: places that an earlier run of the same command has written, which may be written again.

    Raises:
        ModelError: naming the places concerned.
    """
    inputs = list(inputs)
    before: list[tuple[Output, Path]] = []
    for output in outputs:
        if not str(output.place).strip():
            raise ModelError(f"the path of {output.name} is empty")
        out = real(output.place)
        tidy(out)
        for other, place in before:
            if out.is_relative_to(place) or place.is_relative_to(out):
                raise ModelError(f"{output.name} '{output.place}' and {other.name} '{other.place}' are the same, "
                                 "or one is inside the other; choose another place")  # fmt: skip
        before.append((output, out))
        _refuse_inputs(output, out, inputs)
        if os.path.lexists(out):
            _refuse_existing(output, out, overwrite or output.grows or out in own)
        _refuse_unwritable(output, out)


def _refuse_inputs(output: Output, out: Path, inputs: Sequence[Folder | Path]) -> None:
    for given in inputs:
        place = real(given.folder if isinstance(given, Folder) else given)
        if out == place:
            raise ModelError(f"{output.name} '{output.place}' is one of the inputs; choose another place")
        if place.is_relative_to(out) and os.path.lexists(out):
            raise ModelError(f"{output.name} '{output.place}' contains an input of this command; choose another place")
        if isinstance(given, Folder) and not output.marker and out in _parts(given):
            raise ModelError(f"{output.name} '{output.place}' is a file of the model '{given.name}'; "
                                  "choose another place")  # fmt: skip


def _parts(model: Folder) -> set[Path]:
    """Return the files of a model."""
    folder = model.folder
    return {*map(real, model.files.values()), *map(real, companions(folder)), *map(real, folder.glob("*.index.json")),
            real(folder / MODEL)}  # fmt: skip


def _refuse_existing(output: Output, out: Path, overwrite: bool) -> None:
    if not overwrite:
        raise ModelError(f"{output.name} '{output.place}' exists; choose another place or pass --overwrite")
    if not replaceable(out, output.marker):
        kind = {"": "a file", MODEL: "a model folder"}.get(output.marker, "a folder of its kind")
        lacks = f" (it has no {output.marker})" if output.marker else ""
        raise ModelError(f"{output.name} '{output.place}' is not {kind}{lacks}, so it is not overwritten")


def _refuse_unwritable(output: Output, out: Path) -> None:
    parent = next(parent for parent in out.parents if parent.exists())
    if not parent.is_dir():
        raise ModelError(f"cannot write '{output.place}': Not a directory: '{parent}'")
    if not os.access(parent, os.W_OK):
        raise ModelError(f"cannot write '{output.place}': '{parent}' is not writable")
