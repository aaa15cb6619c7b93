# SPDX-License-Identifier: Apache-2.0
"""Applying an alignment to what belongs to a model: fine-tunes, adapters, task vectors."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from onebasin.models import Canonical, Folder, Held, LazyTensors, Model, Rewritten, Widened, write_model
from onebasin.running import pretrained
from onebasin.running.lora import Adapter, entries_of, fit, folded, rewritten_adapter, write_adapter
from onebasin.symmetry import Alignment, Entry

from .aligning import AlignedPair
from .folders import opened
from .frame import Frame
from .options import ModelSource, Options

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelAlignment:
    """The alignment of one model, and the form of it that the alignment acts on.

    Attributes:
        alignment: One group element per space.
        source: The model as it was given, which is read again when needed.
        family: The table of the model, if one was named.
        dtype: The type of the arithmetic.
        canonical: Whether the alignment acts on the canonical form.
        widened: Whether the model was widened first.
        even: Whether its norms were made even first.
    """

    alignment: Alignment
    source: ModelSource
    family: str | None
    dtype: torch.dtype
    canonical: bool
    widened: bool
    even: bool = False

    @classmethod
    def of(
        cls, found: Alignment, source: ModelSource, form: Model, family: str | None, dtype: torch.dtype
    ) -> ModelAlignment:
        """Create it for a model that was matched.

        Args:
            found: The alignment that was found.
            source: The model as it was given.
            form: The form of the model that was matched.
            family: The table of the model, if one was named.
            dtype: The type of the arithmetic.
        """
        canonical = isinstance(form, Canonical)
        even = isinstance(form, Canonical) and form.even
        return cls(found, source, family, dtype, canonical, isinstance(form, Widened), even)

    def save(self, path: str | Path) -> None:
        """Write the alignment as a safetensors file, which `Alignment.load` reads."""
        self.alignment.save(path)

    @overload
    def apply_to(self, what: Mapping[str, Tensor], *, task_vector: bool = False) -> dict[str, Tensor]: ...

    @overload
    def apply_to(self, what: ModelSource, *, task_vector: bool = False) -> PreTrainedModel: ...

    @overload
    def apply_to(self, what: PeftModel, *, task_vector: bool = False) -> PeftModel: ...

    def apply_to(self, what: Any, *, task_vector: bool = False) -> Any:
        """Move what belongs to the source, such as a fine-tune of it, as the source was moved.

        Args:
            what: a model (folder, object or `StateDict`), a PEFT model with a LoRA adapter of the source, or tensors by
                their names in the model: a state dict, or with `task_vector` differences from the source's tensors, of
                all or some of them.
            task_vector: whether the tensors are differences from the source's; they move by the linear part of the map.

        Returns:
            The same kind of object: a model, a PEFT model, or tensors by the same names.

        Raises:
            ValueError: for what does not belong to the source, or cannot be moved with it.
        """
        if self.widened:
            raise ValueError("the model was widened to its anchor's sizes, and nothing else can be moved with it")
        peft: Any = sys.modules.get("peft")
        with opened([self.source], self.family) as (base,):
            if isinstance(what, Mapping):
                return self._tensors(base, what, task_vector)
            if task_vector:
                raise ValueError("a task vector is a dictionary of tensors")
            if peft is not None and isinstance(what, peft.PeftModel):
                return self._adapted(base, what, peft)
        return self._model(what)

    def _form(self, model: Model) -> Rewritten[Alignment]:
        form = Canonical(model, self.dtype, self.even) if self.canonical else model
        return Rewritten(form, self.alignment, self.dtype)

    def _model(self, what: ModelSource) -> PreTrainedModel:
        with opened([what], self.family) as (given,), tempfile.TemporaryDirectory() as temporary:
            form, place = self._form(given), Path(temporary) / "model"
            try:
                write_model(place, LazyTensors.of_model(form, self.dtype), form, overwrite=False, dtype=None)
            except (RuntimeError, IndexError) as error:
                raise ValueError(f"'{given.name}' has other sizes than the model that was matched") from error
            return pretrained(place)

    def _tensors(self, base: Folder, given: Mapping[str, Tensor], differences: bool) -> dict[str, Tensor]:
        called = _on_disk(base, given)
        own = {
            role: _whole([given[called[name]] for name in entry.names], called[entry.names[0]], entry).to(self.dtype)
            for role, entry in base.signature.tensors.items()
            if entry.stored and all(name in called for name in entry.names)
        }
        if self.canonical:  # where tensors move into one another, so all are needed
            start = {
                role: base.read(role, self.dtype) for role, entry in base.signature.tensors.items() if entry.stored
            }
            missing = [] if differences else sorted(start.keys() - own.keys())
            if missing:
                raise ValueError(
                    f"the tensors lack '{base.signature.tensors[missing[0]].name}', and all are needed at a level that "
                    "moves the residual stream; differences are given with task_vector"
                )
            added = {role: start[role] + tensor for role, tensor in own.items()} if differences else own
            found = self._moved(base, {**start, **added})
            if differences:
                found = {name: tensor - before for (name, tensor), before in
                         zip(found.items(), self._moved(base, start).values(), strict=True)}  # fmt: skip
        else:  # every tensor moves by itself, linearly
            found = self._moved(base, own)
        for entry in base.signature.absent.values():  # a tied tensor, which a file leaves out
            if entry.alias and entry.name in called and entry.name not in found:
                found[entry.name] = found[base.signature.tensors[entry.alias].name]
        given = {**given, **{called.get(name, name): tensor for name, tensor in found.items()}}
        return {name: tensor.to(given[name].dtype) for name, tensor in given.items()}

    def _moved(self, base: Folder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rewritten tensors by their names on disk, without those that are missing and not needed."""
        form = self._form(Held(base, tensors))
        return {
            name: tensor.clone()
            for role, entry in form.signature.tensors.items()
            if entry.stored and (self.canonical or role in tensors)
            for name, tensor in entry.split(form.read(role, self.dtype))
        }

    def _adapted(self, base: Folder, model: PeftModel, peft: Any) -> PeftModel:
        if self.even:
            raise ValueError("an adapter cannot follow a model whose norms were made even")
        with tempfile.TemporaryDirectory() as temporary:
            before, after = Path(temporary) / "before", Path(temporary) / "after"
            model.save_pretrained(str(before), selected_adapters=[model.active_adapter])
            one = before if (before / "adapter_config.json").is_file() else before / str(model.active_adapter)
            adapter = Adapter(one)
            fitted = fit(adapter, base)
            tensors = folded(adapter, fitted, base, self.dtype) if self.canonical else None
            after.mkdir()
            write_adapter(adapter, rewritten_adapter(adapter, fitted, self.alignment, self.dtype, tensors), after, "")
            found: PeftModel = peft.PeftModel.from_pretrained(self._model(self.source), after)
            return found


def alignments_of(
    given: Sequence[ModelSource], frame: Frame, found: Sequence[AlignedPair], opt: Options
) -> list[ModelAlignment]:
    """Return the alignments of all models of a frame except its centre. given: the models as the user named them."""
    return [
        ModelAlignment.of(pair.alignment, given[i], frame.models[i], opt.family, opt.dtype)
        for i, pair in zip(frame.others, found, strict=True)
    ]


def _on_disk(base: Folder, given: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name on disk -> name that was given. Raises ValueError for a tensor that the model does not have."""
    entries = entries_of(base, given)
    for name, tensor in given.items():
        if name not in entries and tensor.is_floating_point():
            raise ValueError(f"'{name}' belongs to no tensor of '{base.name}'")
    return {name if name in entry.names else entry.name: name for name, entry in entries.items()}


def _whole(parts: Sequence[Tensor], name: str, entry: Entry) -> Tensor:
    whole = entry.whole(parts)
    if tuple(whole.shape) != entry.shape:
        raise ValueError(f"'{name}' has shape {tuple(whole.shape)}, and '{entry.name}' of the model that was matched "
                         f"{entry.shape}")  # fmt: skip
    return whole.detach()
