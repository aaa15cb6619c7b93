# SPDX-License-Identifier: Apache-2.0
"""onebasin merge --config: a merge described by a YAML file in mergekit's schema."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from onebasin.data.calibration import Data
from onebasin.engine import peak_memory
from onebasin.fusion import METHODS, method_of
from onebasin.models import Folder, Model, Target, write_model
from onebasin.models.card import paths_of
from onebasin.models.fetching import locate
from onebasin.models.outputs import Output, model_folder, refuse_outputs
from onebasin.models.published import without_paths
from onebasin.running.lora import CONFIG, WEIGHTS, Adapter, write_adapted
from onebasin.settings import OutputSettings, refuse_unknown, refuses_unknown

from ..aligning import AlignedPair, align_all
from ..apply import alignments_of
from ..folders import one_vocabulary, opened, refuse_damaged, together, workplace
from ..frame import in_one_frame
from ..merge import merge
from ..options import Options, Tell, least_agreement
from ..results import MergeResult
from ..search import judged_on
from ..verdict import verdict_on
from ..writing import Record, hashed, refuse_incomplete, tensors_of
from .run import merge_in_mergekit, parameters_of, required_by, spec_of
from .schema import Recipe, Reference, parameter_names, read_recipe, split_documents
from .stacking import refuse_missing_layers, write_stacked

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..keywords import OutputKeywords


@refuses_unknown(OutputSettings)
def merge_config(
    config: str | Path,
    output: str | Path | None = None,
    *,
    device: str = "cpu",
    precision: str = "float32",
    family: str | None = None,
    overwrite: bool = False,
    verify: bool | str = "outputs",
    verdict: bool = True,
    require: float | None = None,
    seed: int | None = None,
    workers: int | None = None,
    tell: Tell | None = None,
    command: str | None = None,
    **options: Unpack[OutputKeywords],
) -> MergeResult:
    """Merge as a file in mergekit's schema says; its block `align` matches the models first.

    `linear` and the methods of `onebasin.merge` run here, tensor by tensor. Every other method runs in mergekit, on the
    models as they are or, with `align`, on matched copies of all of them, the base model included. The file is saved
    beside the weights as mergekit_config.yml, with names of models instead of paths. A file may hold several documents:
    all but the last have a `name`, by which later ones refer to the model that they make.

    Args:
        config: the YAML file.
        output: as in `merge`.
        device: where it is computed.
        precision: type of the computation, float32 or float64.
        family: the table of the models, for a model type that has none.
        overwrite: as in `merge`.
        verify: as in `merge`.
        verdict: as in `merge`.
        require: as in `merge`.
        seed: of methods that draw random numbers, and of the starts of a search (default: the file's `random_seed`, or
            0).
        workers: threads of matching (default: one per core, one for small models).
        tell: as in `merge`.
        command: as in `merge`.
        options: the fields of `OutputSettings`.

    Returns:
        As `merge`.

    Raises:
        ValueError: in one sentence, for a file that is not valid or asks for what is impossible.
    """
    started = time.perf_counter()
    require = least_agreement(require, verdict)
    common: dict[str, Any] = {"precision": precision, "device": device, "family": family, "seed": seed,
                              "workers": workers}  # fmt: skip
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        *before, last = split_documents(config, scratch)
        for file in before:
            if tell:
                tell(f"document {file.stem}")
            merge_config(file, scratch / file.stem, **common, verify=verify, verdict=False, tell=tell)
        recipe, text = read_recipe(last)
        if before:
            text = Path(config).read_text("utf-8")
        refuse_unknown_words(recipe)
        if require is not None and recipe.slices:
            raise ValueError("require: stacked layers make a new model, which gets no verdict; leave require out")
        if recipe.out_shard_size is not None:
            options.setdefault("shard_size", recipe.out_shard_size)
        look = OutputSettings(
            **options, files={"mergekit_config.yml": text} if options.get("write_model_card", True) else {}
        )
        common["seed"] = recipe.seed if seed is None else seed
        named = recipe.references
        names = [str(reference) for reference in named]
        folders = resolved(named, scratch, family)
        sources = stack.enter_context(opened(folders, family))
        for checkpoint, name in zip(sources, names, strict=True):
            checkpoint.name = name
        if output is not None:
            refuse_outputs([Output("the output", output)], [*sources, Path(config)], overwrite)
        refuse_missing_layers(recipe, dict(zip(names, sources, strict=True)))
        files = {name: without_paths(content, paths_of(sources)) for name, content in look.files.items()}
        look = replace(look, files=files)
        base = names.index(str(recipe.base_model)) if recipe.base_model else 0
        if recipe.merge_method in METHODS:
            whole = merge(sources, output, **_whole(recipe, names, base), **common, **vars(look), overwrite=overwrite,
                          verify=verify, verdict=verdict, require=require, tell=tell, command=command)  # fmt: skip
            whole["models"] = names
            return whole
        align = recipe.align if recipe.align and recipe.align.symmetry != "none" else None
        opt = Options(**(align.options() if align else {}), **common)
        target = stack.enter_context(workplace(output))
        ours = recipe.merge_method == "linear" and not (recipe.modules or recipe.tokenizer or recipe.chat_template)
        models: list[Model]
        if recipe.tokenizer_source and not (ours or align):
            models, unified = list(sources), None  # mergekit does it
        else:
            source = None if recipe.tokenizer_source is None else str(recipe.tokenizer_source)
            given, unified = stack.enter_context(one_vocabulary(sources, source, base))
            models = list(given)
        sha256 = stack.enter_context(hashed(sources))
        found: list[AlignedPair] = []
        result = MergeResult({"output": None if output is None else str(output), "models": names,
                              "method": recipe.merge_method, "match": align.symmetry if align else "none"})  # fmt: skip
        if verdict:
            refuse_incomplete(sources[base])
        if align:
            anchor = _number(align.anchor, names, base)
            frame = in_one_frame(models, anchor, opt.symmetry, opt, tell, verify=verify)
            aligned = align_all(frame.models, frame.centre, opt.symmetry, opt, tell)
            models, found = list(aligned.models), aligned.found
            result.alignments = alignments_of(folders, frame, found, opt)
            result |= {"anchor": frame.centre, "max_output_difference": frame.differences(aligned.models, opt, tell)}
        if unified:
            models = unified.filled(models, opt.dtype)
        result["distance_before"] = [item.before.distance for item in found]
        result["distance_after"] = [item.after.distance for item in found]
        result["notes"] = list(dict.fromkeys(note for item in found for note in item.notes))
        layout = models[base]
        record = Record("merge", command, sources, opt, result, found, sha256)

        if tell:
            tell(recipe.merge_method if ours else f"{recipe.merge_method}, in mergekit")
        with together(opt) as placing:
            folder = model_folder(placing, target, overwrite)
            if ours:
                out = Target(folder, target, layout, None)
                result["notes"] += write_stacked(recipe, dict(zip(names, models, strict=True)), out, opt, look)
            else:
                places = [model.origin.folder for model in models]
                for number, model in enumerate(models if align else []):
                    places[number] = scratch / f"matched-{number}"
                    write_model(places[number], tensors_of(model, opt), model)
                if unified is not None:  # the folders share their vocabulary already
                    recipe = recipe.model_copy(update={"tokenizer_source": None})
                by_place = dict(zip(names, places, strict=True))
                merge_in_mergekit(recipe, by_place, folder, places[base], opt, look)
            if verdict and not recipe.slices:  # stacked layers make a new model, which predicts something else
                judged = verdict_on(
                    folder, sources, lambda: Data(sources, opt, opt).judged, judged_on(opt, sources[0]), opt, tell
                )
                result.update(judged.facts(require))
                result["notes"].append(judged.sentence)
            record.write(folder, look.write_model_card)
        if output is None:
            result.hold(target)
    result["seconds"], result["peak_memory"] = round(time.perf_counter() - started, 3), peak_memory()
    return result


def merge_in_words(words: Mapping[str, Any], output: str | Path | None, **options: Any) -> MergeResult:
    """Merge as `merge_config` does, by a mapping in mergekit's schema, which is saved with the result."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "mergekit_config.yml"
        file.write_text(yaml.safe_dump(dict(words), sort_keys=False), "utf-8")
        return merge_config(file, output, **options)


def in_words(
    models: Sequence[str],
    method: str,
    *,
    base: str | None = None,
    weights: Sequence[float] | None = None,
    parameters: Mapping[str, Any] | None = None,
    match: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Return a merge by one of mergekit's methods in its schema.

    Args:
        models: folders or hub ids, each with an adapter after a plus sign where it has one.
        method: such as `ties`, `slerp` or `dare_ties`.
        base: the base model, where the method needs one; the first model where that is None and the method is `slerp`.
        weights: one per model (default: equal).
        parameters: the method's, such as `density`.
        match: match the models first, at this level.
        dtype: of the weights written.

    Returns:
        The content of a merge file.

    Raises:
        ValueError: for weights that are not one per model.
    """
    parts = dict(parameters or {})
    if method == "slerp":
        base, parts = base or models[0], {"t": 0.5, **parts}
    shares = None if weights is None else [float(weight) for weight in weights]
    if shares is not None and len(shares) != len(models):
        raise ValueError(f"{len(models)} models need {len(models)} weights, not {len(shares)}")
    ours: dict[str, list[str]] = {"linear": ["weight"], **{name: [] for name in METHODS}}
    needed = ours[method] if method in ours else required_by(spec_of(method, [*ours]))
    if shares is None and "weight" in needed:
        shares = [1.0] * len(models)
    sources = [{"model": model, **({"parameters": {"weight": shares[i]}} if shares else {})}
               for i, model in enumerate(models)]  # fmt: skip
    return {
        "merge_method": method,
        "models": sources,
        **({"base_model": base} if base else {}),
        **({"parameters": parts} if parts else {}),
        **({"align": {"match": match}} if match not in (None, "none") else {}),
        **({"dtype": dtype} if dtype else {}),
    }


def refuse_unknown_words(recipe: Recipe) -> None:
    """Raise ValueError for an unknown method or parameter, naming the nearest known one."""
    method = recipe.merge_method
    if method == "linear":
        known: Sequence[str] = ("weight", "normalize")
    elif method in METHODS:
        known = ("weight", *method_of(method).names())
        if not recipe.models:
            raise ValueError(f"'{method}' merges whole models; list them under models")
    else:
        spec = spec_of(method, ("linear", *METHODS))
        known = parameters_of(spec)
    for name, place in parameter_names(recipe).items():
        refuse_unknown([name], known, "parameter", f"of {method} in {place}")
    if recipe.models and method not in ("linear", *METHODS):
        refuse_missing_words(recipe, required_by(spec))


def refuse_missing_words(recipe: Recipe, needed: Sequence[str]) -> None:
    """Raise ValueError where a merge of whole models lacks a base model or a parameter that its method needs."""
    method, base = recipe.merge_method, str(recipe.base_model)
    if "base_model" in needed and recipe.base_model is None:
        raise ValueError(f"{method} needs a base model: --base MODEL, or base_model in the file")
    given = [{**recipe.parameters, **one.parameters} for one in recipe.models or [] if str(one.model) != base]
    for name in needed:
        if name != "base_model" and not all(name in parameters for parameters in given):
            raise ValueError(f"{method} needs the parameter '{name}': --set {name}=NUMBER, or parameters in the file")


def resolved(references: Sequence[Reference], scratch: Path, family: str | None) -> list[Path]:
    """Return the folders of models, with their adapters merged into them. All models and adapters are checked before
    the first is merged."""
    bases = [Folder(str(reference.model), family) for reference in references]
    try:
        refuse_damaged(bases)
        loras = [
            None if reference.lora is None else Adapter(locate(str(reference.lora), CONFIG, WEIGHTS))
            for reference in references
        ]
        places = [base.folder for base in bases]
        for number, (base, adapter) in enumerate(zip(bases, loras, strict=True)):
            if adapter is not None:
                places[number] = scratch / f"adapted-{number}"
                write_adapted(base, adapter, places[number])
    finally:
        for base in bases:
            base.close()
    return places


def _whole(recipe: Recipe, names: Sequence[str], base: int) -> dict[str, Any]:
    """Return the arguments of `merge` for a method that takes whole models with one weight each. A base model that is
    not among them only serves as the anchor."""
    own = {str(source.model): source.parameters for source in recipe.models or []}
    settings = {name: value for name, value in recipe.parameters.items() if name != "weight"}
    for name, parameters in own.items():
        for setting in parameters.keys() - {"weight"}:
            raise ValueError(f"{setting} of '{name}': it applies to the whole merge; write it under parameters")
    weights = []
    for name in names:
        weight = {**recipe.parameters, **own[name]}.get("weight", 1.0) if name in own else 0.0
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"'{recipe.merge_method}' takes one weight for each model, not gradients or filters")
        weights.append(float(weight))
    if not sum(weights):
        raise ValueError("the weights add up to 0")
    options = recipe.align.options() if recipe.align else {"symmetry": "none"}
    centre = _number(recipe.align.anchor if recipe.align else "base", names, base)
    return {
        "method": recipe.merge_method,
        "weights": [weight / sum(weights) for weight in weights],
        "match": options.pop("symmetry"),
        "anchor": "auto" if centre is None else centre,
        "dtype": recipe.out_dtype or recipe.dtype,
        "tokenizer_source": None if recipe.tokenizer_source is None else str(recipe.tokenizer_source),
        **options,
        **settings,
    }


def _number(anchor: str, names: Sequence[str], base: int) -> int | None:
    """Return the number of the anchor; None for auto."""
    if anchor == "auto":
        return None
    if anchor != "base" and anchor not in names:
        raise ValueError(f"align.anchor: '{anchor}' is not base, auto or a model: {', '.join(names)}")
    return base if anchor == "base" else names.index(anchor)
