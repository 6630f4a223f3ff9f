"""Images per second of crops and flips of a batch, beside torchvision's, image by image.

    python benchmarks/augment.py

Both do the same work on the same images in one process, and take turns, round after round, so
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

import numpy as np
import torch
from PIL import Image

from hvt.bench.measure import describe, interleaved, portable_command
from hvt.data.augment import BatchAugment, keys_for

# After hvt, which imports torchvision where timm alone could not.
# isort: split
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import transforms

LEAST = 0.2  # seconds that one timing fills at least
MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


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
    parser.add_argument("--batch", type=int, default=128, help="images in a batch")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    parser.add_argument("--rounds", type=int, default=9, help="times that every case is timed")
    parser.add_argument("--out", type=Path, help="also write the table as CSV")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> list[dict[str, str | float]]:
    generator = np.random.default_rng(0)
    shape = (args.batch, args.size, args.size, 3)
    images = torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8))
    cpu: dict[str, list[float]] = {"hvt": [], "torchvision": []}
    runs = {
        "hvt": counted(ours(args.size, images), cpu["hvt"]),
        "torchvision": counted(theirs(args.size, images), cpu["torchvision"]),
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        interleaved(runs, torch.device("cpu"), turn, LEAST, times)
    return [
        {
            "by": by,
            "batch": args.batch,
            "size": args.size,
            "ms_per_batch": round(1e3 * statistics.median(seconds), 3),
            "cpu_ms_per_batch": round(1e3 * statistics.median(cpu[by]), 3),
            "images_per_second": round(args.batch / statistics.median(seconds)),
        }
        for by, seconds in times.items()
    ]


def counted(run: Callable[[], object], into: list[float]) -> Callable[[], object]:
    """The same run, noting the CPU time of all its threads."""

    def counting() -> None:
        start = time.process_time()
        run()
        into.append(time.process_time() - start)

    return counting


def ours(size: int, images: torch.Tensor) -> Callable[[], object]:
    augment, positions = BatchAugment(size, MEAN, STD), np.arange(len(images))
    epoch = itertools.count()
    return lambda: augment(images, keys_for(0, next(epoch), positions))


def theirs(size: int, images: torch.Tensor) -> Callable[[], object]:
    transform = transforms.Compose(
        [
            transforms.RandomCrop(size, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    arrays = images.numpy()
    return lambda: torch.stack([transform(Image.fromarray(array)) for array in arrays])


def show(rows: list[dict[str, str | float]]) -> None:
    print(f"{'by':12}{'ms/batch':>10}{'CPU ms':>10}{'images/s':>12}")
    for row in rows:
        print(
            f"{row['by']:12}{row['ms_per_batch']:10.2f}"
            f"{row['cpu_ms_per_batch']:10.2f}{row['images_per_second']:12,.0f}"
        )


if __name__ == "__main__":
    main()
