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

from onebasin.data.models import quiet
from onebasin.engine import Placing, kept, placed_by
from onebasin.engine.placing import hidden, real, said
from onebasin.models import Canonical, Folder, Model, ModelError, Widened
from onebasin.models.companions import copy_companions
from onebasin.models.fetching import link, locate, refuse_links_out
from onebasin.models.outputs import Output, refuse_outputs
from onebasin.models.vocabulary import Unified, refuse_other_vocabularies, unify
from onebasin.models.weight_files import CannotWrite
from onebasin.running.adapted import write_adapted
from onebasin.running.classes import has_class
from onebasin.running.lora import CONFIG, WEIGHTS, Adapter
from onebasin.running.trial import TOLERANCE, departure_on_twin
from onebasin.symmetry import Table
from onebasin.symmetry.gauge.widening import widening

from .options import STREAM_LEVELS, ModelSource, Options, StateDict, Tell

JOURNAL = "placed"  # in the folder of units: what a run has given its place


def placed(model: ModelSource, folder: Path) -> tuple[str | Path, str]:
    """Where a model lies, and what to call it; one that lies in no folder of its own is written to `folder`."""
    if isinstance(model, nn.Module):
        from transformers import PreTrainedModel  # slow to load, where no such model has loaded it

        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"a {type(model).__name__} is no PreTrainedModel; give one, or a folder, or a StateDict")
        with quiet():
            model.save_pretrained(folder)
        return folder, model.name_or_path or type(model).__name__
    if isinstance(model, StateDict):
        model.write(folder)
        return folder, model.name
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


@contextmanager
def opened(models: Sequence[ModelSource], family: str | None) -> Iterator[list[Folder]]:
    """Open every model; what is no folder goes through a temporary one. All are closed afterwards."""
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
                with suppress(ValueError):  # what cannot be read, or has no table, is refused where it is needed
                    give_one_table(checkpoints)
            yield checkpoints
        finally:
            for checkpoint in checkpoints:
                checkpoint.close()


def give_one_table(models: Sequence[Folder]) -> None:
    """Let all models be read by the table of one of them, where it is proven for all: they are of one structure then,
    whatever their types are called. Else each keeps its own.

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
    """Whether a table fits a model, and leaves the function of its tiny twin as it is, in canonical form, too."""
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
    """Raise ModelError where one of the models has no usable configuration or weight files, before any is worked on."""
    for model in models:
        model.config, model.files  # noqa: B018


@contextmanager
def one_vocabulary(
    models: list[Folder], source: str | None, base: int = 0
) -> Iterator[tuple[list[Folder], Unified | None]]:
    """The models with one vocabulary. source: None refuses those that differ; else union, base or one of the models, as
    it was given. `Unified.filled` gives them the rows that they lack. Raises ModelError as `unify` does."""
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
    """Where to write: the output, or a temporary folder that lives as long as the block."""
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "model"


@contextmanager
def unit_folder(output: str | Path | None, opt: Options) -> Iterator[Options]:
    """The options with a hidden folder beside the output, in which units are kept until the job is done."""
    if output is None:
        yield opt
        return
    try:
        with kept(_units(output), opt.resume) as folder:
            yield replace(opt, units=str(folder))
    except OSError as error:
        if not _units(output).exists():
            raise
        raise CannotWrite(f"{said(error)} (what was matched is kept: go on with --resume)") from error


def refuse_places(
    outputs: Sequence[Output], inputs: Sequence[Folder | Path], overwrite: bool, opt: Options
) -> Callable[[str | Path], bool]:
    """Fail before any work where one of the outputs could not be written at the end, see `refuse_outputs`.

    outputs: the first is the job's own. The options say what else is read and written. Returns which places may be
    written over: with `resume`, those that the stopped run had filled, too.
    """
    own = placed_by(_units(outputs[0].place) / JOURNAL) if opt.resume else set()
    saved = [] if opt.checkpoint is None else [Output("the checkpoint", opt.checkpoint, "", grows=True)]
    refuse_outputs([*outputs, *saved], [*inputs, *opt.files], overwrite, own)
    return lambda place: overwrite or real(place) in own


def together(opt: Options) -> Placing:
    """Place all outputs of a job at once, and note them where a resumed run looks."""
    return Placing(Path(opt.units) / JOURNAL if opt.units else None, CannotWrite)


def _units(output: str | Path) -> Path:
    return hidden(real(output), "units")


def beside(output: str | Path, given: str | Path | None, ending: str) -> str | Path:
    """Return where something goes that belongs to the output: where it was said, or beside it."""
    return f"{str(output).rstrip('/')}-{ending}" if given is None else given


def gauge(checkpoint: Model, opt: Options, tell: Tell | None) -> Model:
    """The model in canonical form where the level rotates the residual stream, else as it is."""
    if opt.symmetry not in STREAM_LEVELS:
        return checkpoint
    if tell:
        tell(f"canonical form of {checkpoint.name}")
    return Canonical(checkpoint, opt.dtype)


def widened(model: Model, wide: Model) -> Model:
    """The model in the shapes of a wider one, where the two differ in widths that can be made up exactly."""
    if not isinstance(model, Canonical) or model.signature.family != wide.signature.family:
        return model
    return Widened(model, wide) if widening(model.signature, wide.signature) else model
