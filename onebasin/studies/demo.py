# SPDX-License-Identifier: Apache-2.0
"""The demo: small vision transformers trained apart on handwritten digits, then matched and merged.

The models start from different seeds and see the data in different orders, so they have nothing in common. They are
stock `ViTForImageClassification`, and matched and merged by the same functions as in the commands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import onebasin
from onebasin.data import Scores, Task, digits, evaluate, load_model, load_task
from onebasin.engine import Tell, appearing_json, threads
from onebasin.landscape import curve
from onebasin.landscape.plots import plot_curves
from onebasin.models.outputs import Output, refuse_outputs
from onebasin.running.classes import quietly, seeded
from onebasin.settings import Few, Seed, checked

RESULTS = "results.json"
LEVELS = ("paper", "full")
BEST = "best"  # the method that `onebasin merge` chooses itself,
CHOOSING = {"data": "builtin:digits", "report": True}  # on images without labels
WIDTH, HEADS = 48, 4
EPOCHS = 30
BATCH = 64
NOISE = 0.2  # standard deviation of the noise added to training pixels, which are in [-1, 1]
LEARNING_RATE = 3e-3
POINTS = 11
SETTINGS = {"none": "plain", "paper": "paper: heads and neurons", "full": "full: every space"}  # legend texts

# The configuration of an image processor that turns raw images with pixels 0..16 into this model's input.
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_convert_rgb": False,
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "do_rescale": True,
    "rescale_factor": 1 / 16,
    "do_normalize": True,
    "image_mean": [0.5],
    "image_std": [0.5],
}


@threads(1)  # for models this small, more threads only slow each other down, and round differently
def demo(
    output: str | Path = "demo",
    *,
    seed: int = 0,
    models: int = 3,
    width: int = WIDTH,
    levels: Sequence[str] = LEVELS,
    epochs: int = EPOCHS,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Train `models` digit ViTs of a width from seeds `seed`, `seed` + 1, ...; match, merge and measure them.

    Model 0 is the anchor of every curve (lambda 0). Writes to `output`: model-0, model-1, ... (ordinary model folders),
    LEVEL-1 (model 1 matched to model 0), merged-*, merged-*-report.html (of the best merges), curves.png and
    results.json.

    Args:
        output: The folder.
        seed: Of the first model; the others take the next numbers.
        models: Their number, at least 2.
        width: Of their stream, a multiple of 4.
        levels: The levels of symmetry at which to match them.
        epochs: Of training.
        tell: Called with a line about each step.

    Returns:
        The object in results.json: `models` (loss, accuracy, seed and seconds of each), `pair` (none and each level ->
        loss, accuracy, distances and barrier of the merge of models 0 and 1), `all` (the same without barrier for the
        merge of all, if there are more than two; of the best merges also `report` and `verdict`), `curves` (as
        `landscape.curve`), `picture` (None if matplotlib is not installed) and `seconds`.

    Raises:
        ValueError: There are fewer than two models, the four heads cannot share the width, or the output contains
            anything but an earlier demo.
    """
    width, models, seed = checked(Few, "width", width), checked(Few, "models", models), checked(Seed, "seed", seed)
    if width % HEADS:
        raise ValueError(f"width {width}: choose a multiple of {HEADS}, the number of heads")
    if models < 2:
        raise ValueError(f"the demo needs at least 2 models, not {models}")
    refuse_outputs([Output("the output", output, RESULTS)], overwrite=True)
    started = time.perf_counter()
    folder = Path(output)
    settings = ("none", *levels)
    groups = 1 if models == 2 else 2  # of models to merge: the first two, and all
    steps = models + len(settings) * (groups + 1) + groups  # models to train, merges and curves, the best merges
    done = 0

    def next_step(what: str) -> None:
        nonlocal done
        done += 1
        if tell:
            tell(f"step {done} of {steps}: {what}")

    folder.mkdir(parents=True, exist_ok=True)
    appearing_json(folder / RESULTS, {})  # marks the folder of a demo that is interrupted
    folders = [folder / f"model-{i}" for i in range(models)]
    ends = []
    for i, place in enumerate(folders):
        next_step(f"training model {i} of {models}")
        start = time.perf_counter()
        with quietly():
            train(seed + i, epochs, width).save_pretrained(place)
        (place / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", "utf-8")
        ends.append({"seed": seed + i, "seconds": _seconds(start), "folder": str(place)})
    task = load_task("image-classification", "builtin:digits", folders[0])
    for end in ends:
        end.update(_scores(str(end["folder"]), task))

    results: dict[str, Any] = {"models": ends, "pair": {}, "all": {}, "curves": {}}
    for level in settings:
        next_step(f"merging models 0 and 1, {level}")
        results["pair"][level] = _merged(folders[:2], folder / f"merged-{level}", level, task)
        if models > 2:
            next_step(f"merging all models, {level}")
            results["all"][level] = _merged(folders, folder / f"merged-all-{level}", level, task)
        next_step(f"the line between models 0 and 1, {level}")
        start = time.perf_counter()
        anchor, matched = str(folders[0]), str(folders[1])
        if level != "none":
            target = folder / f"{level}-1"
            found = onebasin.match(
                folders[1], folders[0], output=target, symmetry=level, rescale="joint", overwrite=True
            )
            # A level that moves the residual stream rewrites the anchor in canonical form: the line starts there.
            anchor, matched = found.get("anchor_output", anchor), found["output"]
        results["curves"][level] = curve(anchor, matched, task, POINTS)
        results["pair"][level]["barrier"] = results["curves"][level]["barrier"]
        results["pair"][level]["curve_seconds"] = _seconds(start)

    for group, some in (("pair", folders[:2]), ("all", folders)):
        if group == "pair" or models > 2:
            next_step(f"the best merge of {len(some)} models")
            results[group][BEST] = _merged(some, folder / f"merged-{group}-{BEST}", BEST, task)
    results["picture"] = None
    if find_spec("matplotlib") is not None:
        names = {level: SETTINGS.get(level, level) for level in settings}
        plot_curves(
            {names[level]: results["curves"][level] for level in settings},
            folder / "curves.png",
            title="Two digit ViTs trained apart: test loss and accuracy on the line between them",
            ends=("model 0", "model 1, matched to it"),
        )
        results["picture"] = str(folder / "curves.png")
    results["seconds"] = _seconds(started)
    appearing_json(folder / RESULTS, results)
    return results


@threads(1)
def train(seed: int, epochs: int = EPOCHS, width: int = WIDTH) -> ViTForImageClassification:
    """Train a ViT of 3 layers on the digits; initial weights and data order depend on `seed`."""
    with seeded(seed):
        config = ViTConfig(  # type: ignore[call-arg, unused-ignore]
            hidden_size=width,
            num_hidden_layers=3,
            num_attention_heads=HEADS,
            intermediate_size=4 * width,
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
        )
        model = ViTForImageClassification(config)
        model.train()
        pixels, labels = digits("train")
        steps = epochs * -(-len(labels) // BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(len(labels)), BATCH):
                noisy: Tensor = pixels[chosen] + NOISE * torch.randn_like(pixels[chosen])
                loss = cross_entropy(model(pixel_values=noisy).logits, labels[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    model.train(False)
    return model


def _merged(folders: Sequence[Path], output: Path, level: str, task: Task) -> dict[str, Any]:
    """Merge at a level, or, for `BEST`, in the best way by training images without labels."""
    how: dict[str, Any] = CHOOSING if level == BEST else {"match": level, "verdict": False}
    found = onebasin.merge(folders, output, anchor=0, overwrite=True, **how)
    keys = (
        "distance_before",
        "distance_after",
        "max_output_difference",
        "seconds",
        *(["report", "verdict"] if level == BEST else []),
    )
    return {"folder": str(output), **_scores(output, task), **{key: found[key] for key in keys}}


def _scores(folder: str | Path, task: Task) -> dict[str, float]:
    scores: Scores = evaluate(load_model(folder, task.name), task)
    return {"loss": scores.loss, "accuracy": scores.accuracy}


def _seconds(start: float) -> float:
    return round(time.perf_counter() - start, 2)
