# SPDX-License-Identifier: Apache-2.0
"""The test of a table on a model's tiny twin: random elements must leave its outputs unchanged.

A twin has the structure of its model but not its size, so this takes about a second.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from onebasin.models import Canonical, Folder, Model, ModelError, Rewritten
from onebasin.models.errors import one_line
from onebasin.models.model import View
from onebasin.symmetry import Alignment, Signature, acting_groups
from onebasin.symmetry.groups.elements import Element

from .classes import class_for, quietly
from .twins import build
from .valid_inputs import recipes
from .verification import compare_rewritten

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-8  # relative difference of outputs in float64; a wrong table changes them by about one
LAYERS = (2, 4, 8)  # of a twin, until it has every kind of layer


def saved_twin(model: Folder, place: Path) -> Folder:
    """Write the twin of a model folder, and return it, opened with the same table.

    Only the configuration and the names of the tensors are read.

    Raises:
        ModelError: No small model of this configuration could be made whose layers have the same tensors.
    """
    config = CONFIG_MAPPING[model.raw_config["model_type"]].from_dict(deepcopy(model.raw_config))
    cls, reason = class_for(config), ""
    for layers in LAYERS:
        folder = Path(tempfile.mkdtemp(dir=place))
        try:
            made, _ = build(config, cls, layers=layers, probes=probes)
            with quietly():
                made.save_pretrained(folder)
        except Exception as error:  # each class refuses sizes in its own way
            reason = reason or one_line(error)
            continue
        found = Folder(folder)
        found.name = model.name
        found.read_by(model.table)
        lacking = _patterns(model.signature) - _patterns(found.signature)
        if not lacking:
            return found
        reason = reason or f"it lacks '{min(lacking)}'"
    raise ModelError(f"'{model.name}': no small model of its configuration could be made to test its table on "
                     f"({reason}); use --verify outputs")  # fmt: skip


def probes(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs on which a twin and its rewritten copy are compared, as candidates for `build`."""
    return (recipe(2, 0) for recipe in recipes(model, model, 8))


def _patterns(signature: Signature) -> set[str]:
    """Return the names of the layers' tensors, without the numbers of layers and experts."""
    return {re.sub(r"\d+", "{}", role) for role, entry in signature.tensors.items() if entry.layer is not None}


def departure_on_twin(model: Model) -> float:
    """Return the largest relative difference of outputs that a table makes on the twin of a model.

    The twin is in the form of the model (as it is or canonical, with even norms or not), and a random element acts on
    every space that may move. All is in float64, where rounding is about 1e-12. The result depends only on the
    configuration, the table and the form, and is cached.

    Raises:
        ModelError: There is no such twin, see `saved_twin`.
    """
    origin, canonical = model.origin, _canonical_form(model)
    even = canonical is not None and canonical.even
    what = json.dumps([origin.raw_config, repr(origin.table), canonical is not None, even,
                       sorted(_patterns(origin.signature))])  # fmt: skip
    if what not in _FOUND:
        with tempfile.TemporaryDirectory() as place:
            twin = saved_twin(origin, Path(place))
            form = Canonical(twin, torch.float64, even) if canonical else twin
            _FOUND[what] = max(_changed(twin, form, level) for level in (("invertible",) if canonical else LEVELS))
    return _FOUND[what]


_FOUND: dict[str, float] = {}
LEVELS = ("permutation", "paper")  # those that need no canonical form


def _canonical_form(model: Model) -> Canonical | None:
    """Return the canonical form that a view is made of."""
    if isinstance(model, Canonical):
        return model
    return _canonical_form(model.base) if isinstance(model, View) else None


def even_form(model: Model) -> Canonical | None:
    """Return the canonical form that a view is made of, if its norms were made even: what exact copies of it equal."""
    form = _canonical_form(model)
    return form if form is not None and form.even else None


def _changed(twin: Folder, form: Model, level: str) -> float:
    """Return the relative difference that a random element of every group of a level makes."""
    moved = Rewritten(form, scrambling(form.signature, level), torch.float64)
    before = even_form(form)
    return compare_rewritten(twin, moved, before, dtype=torch.float64).relative_difference


def scrambling(signature: Signature, level: str, only: Collection[str] | None = None) -> Alignment:
    """Return a random element of every group that acts at a level, or only on spaces with some names.

    level: as in `LEVELS` of `onebasin.symmetry`, scales included.
    """
    generator = torch.Generator().manual_seed(0)
    elements: dict[str, Element] = {}
    for root, group in acting_groups(signature, level, rescale="joint").items():
        space = signature.spaces[root]
        if only is None or space.name in only:
            elements[root] = group.random(space.size, tuple(signature.sizes[key] for key in space.batch), generator)
    return Alignment(elements, {root: signature.spaces[root].batch for root in elements})
