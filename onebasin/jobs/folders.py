# SPDX-License-Identifier: Apache-2.0
"""Opening the models of a job, and the place where it writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from onebasin.engine import Placing, kept, placed_by
from onebasin.engine.filesystem import real
from onebasin.engine.placing import hidden, said
from onebasin.models import Canonical, Folder, Model, ModelError, Widened
from onebasin.models.companions import copy_companions
from onebasin.models.fetching import link, locate, refuse_links_out
from onebasin.models.outputs import Output, refuse_outputs
from onebasin.models.vocabulary import Unified, refuse_other_vocabularies, unify
from onebasin.models.weight_files import CannotWrite
from onebasin.running.classes import has_class, quietly
from onebasin.running.lora import CONFIG, WEIGHTS, Adapter, write_adapted
from onebasin.running.trial import TOLERANCE, departure_on_twin
from onebasin.symmetry import Table
from onebasin.symmetry.gauge.widening import widening

from .options import STREAM_LEVELS, ModelSource, Options, StateDict, Tell

JOURNAL = "placed"  # in the folder of units: the outputs that a run has moved into place


def placed(model: ModelSource, folder: Path) -> tuple[str | Path, str]:
    """Return the place and the name of a model. A model that has no folder of its own is written to `folder`."""
    if isinstance(model, nn.Module):
        from transformers import PreTrainedModel  # slow to load, and loaded already by whoever holds such a model

        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"a {type(model).__name__} is not a PreTrainedModel; give one, a folder or a StateDict")
        with quietly():
            model.save_pretrained(folder)
        return folder, model.name_or_path or type(model).__name__
    if isinstance(model, StateDict):
        model.write(folder)
        return folder, model.name
    if not isinstance(model, (str, Path)):
        raise ValueError(f"a {type(model).__name__} is not a model; give a folder, a PreTrainedModel or a StateDict")
    base, plus, lora = str(model).partition("+")
    if plus and not isinstance(model, Path) and not Path(str(model)).exists():
        with closing(Folder(base)) as whole:
            write_adapted(whole, Adapter(locate(lora, CONFIG, WEIGHTS)), folder)
        return folder, str(model)
    path = Path(str(model))
    if path.suffix == ".safetensors" and path.is_file():
        if not path.with_name("config.json").is_file():
            raise ModelError(f"'{path}' has no config.json beside it, which says what model it is")
        refuse_links_out(path.parent)
        folder.mkdir()
        link(folder / "model.safetensors", path)
        shutil.copyfile(path.with_name("config.json"), folder / "config.json")
        copy_companions(path.parent, folder)
        return folder, str(path)
    return path if isinstance(model, Path) else str(model), str(model)


def refuse_one(models: Sequence[ModelSource]) -> None:
    """Raise ValueError for a model in the place of a list of models."""
    if isinstance(models, (str, Path, nn.Module, StateDict, Folder)):
        raise ValueError("the models must be in a list: [A, B]")


@contextmanager
def opened(models: Sequence[ModelSource], family: str | None) -> Iterator[list[Folder]]:
    """Open every model, and close all of them afterwards. Models that are not folders are first saved to a temporary
    one. Raises ValueError where one is no model."""
    refuse_one(models)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoints: list[Folder] = []
        try:
            for number, model in enumerate(models):
                if isinstance(model, Folder):
                    checkpoints.append(model)
                    continue
                place, name = placed(model, Path(temporary) / f"model-{number}")
                table = model.table if isinstance(model, StateDict) else None
                checkpoints.append(Folder(place, table or family))
                checkpoints[-1].name = name
            refuse_damaged(checkpoints)
            if len(checkpoints) > 1:
                with suppress(ValueError):  # a model that is unreadable or has no table is refused where it is needed
                    give_one_table(checkpoints)
            yield checkpoints
        finally:
            for checkpoint in checkpoints:
                checkpoint.close()


def give_one_table(models: Sequence[Folder]) -> None:
    """Read all models by the table of one of them, where that table is proven for all: they then have one structure,
    whatever their types are called. Otherwise each keeps its own table.

    Raises:
        TableError: A model has no table.
    """
    for one in models:
        if all(model.table == one.table or _holds(model, one.table) for model in models):
            for model in models:
                if model.table != one.table:
                    model.read_by(one.table)
                    model.notes.append(f"'{model.name}' is read by the table of '{one.name}', which was proven to hold")
            return


def _holds(model: Folder, table: Table) -> bool:
    """Whether a table fits a model and its maps keep the function of the model's tiny twin, also in canonical form."""
    if not has_class(model):
        return False
    other = Folder(model.folder)
    other.read_by(table)
    with closing(other):
        try:
            return all(departure_on_twin(form) <= TOLERANCE for form in (other, Canonical(other, torch.float64)))
        except ValueError:
            return False


def refuse_damaged(models: Sequence[Folder]) -> None:
    """Raise ModelError, before any work, for a model without a usable configuration or weight files."""
    for model in models:
        model.config, model.files  # noqa: B018


@contextmanager
def one_vocabulary(
    models: list[Folder], source: str | None, base: int = 0
) -> Iterator[tuple[list[Folder], Unified | None]]:
    """Yield the models with one vocabulary. source: None refuses models whose vocabularies differ; otherwise union,
    base or the name of a model. `Unified.filled` fills in the rows that a model lacks. Raises ModelError as `unify`
    does."""
    if source is None:
        refuse_other_vocabularies(models)
        yield models, None
        return
    names = [model.name for model in models]
    if source not in ("union", "base", *names):
        raise ValueError(f"the tokenizer's source '{source}' is not union, base or a model: {', '.join(names)}")
    with tempfile.TemporaryDirectory() as scratch:
        chosen = names.index(source) if source in names else source
        unified = unify(models, chosen, base, Path(scratch))
        with opened(unified.folders, models[base]._family) as given:
            for model, name in zip(given, names, strict=True):
                model.name = name
            yield given, unified


@contextmanager
def workplace(output: str | Path | None) -> Iterator[Path]:
    """Yield where to write: the output, or a temporary folder that is removed with the block."""
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "model"


@contextmanager
def unit_folder(output: str | Path | None, opt: Options) -> Iterator[Options]:
    """Yield the options with a hidden folder beside the output, in which finished units are kept until the job is
    done."""
    if output is None:
        yield opt
        return
    try:
        with kept(_units(output), opt.resume) as folder:
            yield replace(opt, units=str(folder))
    except OSError as error:
        if not _units(output).exists():
            raise
        raise CannotWrite(f"{said(error)} (what was matched is kept: continue with --resume)") from error


def refuse_places(
    outputs: Sequence[Output], inputs: Sequence[Folder | Path], overwrite: bool, opt: Options
) -> Callable[[str | Path], bool]:
    """Fail before any work if an output could not be written at the end; see `refuse_outputs`.

    outputs: the first is the job's own; the options say what else is read and written. Returns a function that says
    whether a place may be overwritten: with `resume`, also if the interrupted run had written it.
    """
    own = placed_by(_units(outputs[0].place) / JOURNAL) if opt.resume else set()
    saved = [] if opt.checkpoint is None else [Output("the checkpoint", opt.checkpoint, "", grows=True)]
    refuse_outputs([*outputs, *saved], [*inputs, *opt.files], overwrite, own)
    return lambda place: overwrite or real(place) in own


def together(opt: Options) -> Placing:
    """Move all outputs of a job into place at once, and record them for a resumed run."""
    return Placing(Path(opt.units) / JOURNAL if opt.units else None, CannotWrite)


def _units(output: str | Path) -> Path:
    return hidden(real(output), "units")


def beside(output: str | Path, given: str | Path | None, ending: str) -> str | Path:
    """Return where something that belongs to the output goes: to the place given, or beside the output."""
    return f"{str(output).rstrip('/')}-{ending}" if given is None else given


def gauge(checkpoint: Model, opt: Options, tell: Tell | None) -> Model:
    """Return the model, in canonical form if the level rotates the residual stream."""
    if opt.symmetry not in STREAM_LEVELS:
        return checkpoint
    if tell:
        tell(f"canonical form of {checkpoint.name}")
    return Canonical(checkpoint, opt.dtype, opt.even)


def widened(model: Model, wide: Model) -> Model:
    """Return the model in the shapes of a wider one, where the difference in width can be padded exactly."""
    if not isinstance(model, Canonical) or model.signature.family != wide.signature.family:
        return model
    return Widened(model, wide) if widening(model.signature, wide.signature) else model
