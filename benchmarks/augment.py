"""Images per second of crops and flips of a batch, beside torchvision's, image by image.

    python benchmarks/augment.py

Both do the same work on the same images in one process, and take turns, round after round, so
that a busy moment of the machine falls on both alike. Every figure is a median over the rounds.
The CPU time says how many cores' worth is taken from a training step that runs beside it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from hvt.bench.measure import describe, interleaved
from hvt.data.augment import BatchAugment, keys_for

# After hvt, which makes torchvision importable where its compiled part does not load.
# isort: split
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import transforms

LEAST = 0.2  # seconds that one timing fills at least
MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def main() -> None:
    args = parse()
    print(f"{'by':12}{'ms/batch':>10}{'CPU ms':>10}{'images/s':>12}")
    for by, (seconds, cpu) in measure(args).items():
        print(f"{by:12}{1e3 * seconds:10.2f}{1e3 * cpu:10.2f}{args.batch / seconds:12,.0f}")
    print(describe(torch.device("cpu")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time batch augmentation beside torchvision's.")
    parser.add_argument("--batch", type=int, default=128, help="images in a batch")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    parser.add_argument("--rounds", type=int, default=9, help="times that every case is timed")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The median seconds of a batch, and of CPU time."""
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
    median = statistics.median
    return {by: (median(seconds), median(cpu[by])) for by, seconds in times.items()}


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


if __name__ == "__main__":
    main()
