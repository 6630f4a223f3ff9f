"""Images per second of the batch augmentation beside timm's transforms, picture by picture.

    python benchmarks/augment.py

Both do the same work on the same pictures in one process, and take turns, round after round, so
that a busy moment of the machine falls on both alike. Every figure is a median over the rounds.
The CPU time says how many cores' worth is taken from a training step that runs beside it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from hvt.bench.measure import describe, in_turns, portable_command
from hvt.data.augment import Augmentation, BatchAugment, keys_for

# After hvt, which imports torchvision where timm alone could not.
# isort: split
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torchvision import transforms

LEAST = 0.2  # seconds that one timing fills at least
# The paper's string, but for a limit of 9: at level 10 timm asks PIL to keep 0 bits of a colour,
# which PIL 13 refuses. The work is the same.
RAND_AUGMENT = "rand-m9-mstd0.5-mmax9-inc1"
SETTINGS: dict[str, dict[str, str | float]] = {
    "crop, flip": {},
    "crop, flip, colour jitter": {"color_jitter": 0.4},
    "crop, flip, RandAugment": {"rand_augment": RAND_AUGMENT},
    "crop, flip, RandAugment, erasing": {"rand_augment": RAND_AUGMENT, "erase": 0.25},
}


class Case(NamedTuple):
    setting: str
    by: str


def main() -> None:
    args = parse()
    rows = measure(args)
    show(rows)
    if args.out is not None:
        described = describe(torch.device("cpu")) | {"command": portable_command(sys.argv)}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *described])
            writer.writeheader()
            writer.writerows(row | described for row in rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time batch augmentation beside timm's.")
    parser.add_argument("--batch", type=int, default=128, help="pictures in a batch")
    parser.add_argument("--size", type=int, default=32, help="side of a picture in pixels")
    parser.add_argument("--rounds", type=int, default=9, help="times that every case is timed")
    parser.add_argument("--out", type=Path, help="also write the table as CSV")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> list[dict[str, str | float]]:
    generator = np.random.default_rng(0)
    shape = (args.batch, args.size, args.size, 3)
    images = torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8))
    cpu: dict[Case, list[float]] = {}
    runs: dict[Case, Callable[[], object]] = {}
    for setting, fields in SETTINGS.items():
        augmentation = Augmentation(size=args.size, **fields)  # type: ignore[arg-type]
        for by, run in (("hvt", ours(augmentation, images)), ("timm", timms(augmentation, images))):
            runs[Case(setting, by)] = counted(run, cpu.setdefault(Case(setting, by), []))
    for run in runs.values():
        run()
    times: dict[Case, list[float]] = {}
    for turn in range(args.rounds):
        in_turns(runs, torch.device("cpu"), turn, LEAST, times)
    return [
        {
            "setting": case.setting,
            "by": case.by,
            "batch": args.batch,
            "size": args.size,
            "ms_per_batch": round(1e3 * statistics.median(seconds), 3),
            "cpu_ms_per_batch": round(1e3 * statistics.median(cpu[case]), 3),
            "images_per_second": round(args.batch / statistics.median(seconds)),
        }
        for case, seconds in times.items()
    ]


def counted(run: Callable[[], object], into: list[float]) -> Callable[[], object]:
    """The same run, noting the CPU time of all its threads."""

    def counting() -> None:
        start = time.process_time()
        run()
        into.append(time.process_time() - start)

    return counting


def ours(augmentation: Augmentation, images: torch.Tensor) -> Callable[[], object]:
    augment, epoch, positions = (
        BatchAugment(augmentation),
        itertools.count(),
        np.arange(len(images)),
    )
    return lambda: augment(images, keys_for(0, next(epoch), positions))


def timms(augmentation: Augmentation, images: torch.Tensor) -> Callable[[], object]:
    """The same in timm's and torchvision's parts, in timm's order."""
    steps = [
        transforms.RandomCrop(augmentation.size, padding=augmentation.padding),
        transforms.RandomHorizontalFlip(augmentation.flip),
    ]
    if augmentation.rand_augment:
        fill = tuple(round(255 * value) for value in augmentation.mean)
        hparams = {"img_mean": fill, "interpolation": Image.Resampling.BILINEAR}
        steps.append(rand_augment_transform(augmentation.rand_augment, hparams))
    elif augmentation.color_jitter:
        steps.append(transforms.ColorJitter(*[augmentation.color_jitter] * 3))
    steps += [transforms.ToTensor(), transforms.Normalize(augmentation.mean, augmentation.std)]
    if augmentation.erase:
        steps.append(RandomErasing(augmentation.erase, mode="pixel", device="cpu"))
    transform = transforms.Compose(steps)
    pictures = images.numpy()
    return lambda: torch.stack([transform(Image.fromarray(picture)) for picture in pictures])


def show(rows: list[dict[str, str | float]]) -> None:
    print(f"{'':34}{'by':6}{'ms/batch':>10}{'CPU ms':>10}{'images/s':>12}")
    for row in rows:
        print(
            f"{row['setting']:34}{row['by']:6}{row['ms_per_batch']:10.2f}"
            f"{row['cpu_ms_per_batch']:10.2f}{row['images_per_second']:12,.0f}"
        )


if __name__ == "__main__":
    main()
