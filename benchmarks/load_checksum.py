"""What verifying the checksum adds to loading a checkpoint, with and without it in turns.

    python benchmarks/load_checksum.py [ROUNDS]

Prints the ratio of the medians; above 1.1 would be more than a reader should wait for.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hvt
from hvt.bench.measure import describe
from hvt.checkpoint.checksum import KEY
from hvt.device import find_device


def without_checksum(path: Path, out: Path) -> Path:
    """The same file, as it was before checksums."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {key: value for key, value in file.metadata().items() if key != KEY}
    save_file(tensors, out, metadata=metadata)
    return out


def seconds(path: Path) -> float:
    start = time.perf_counter()
    hvt.load(path)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    print(describe(find_device("cpu")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"deit_s": hvt.create_model("deit_s"), "imagenet": hvt.load("imagenet")}
        for model, built in models.items():
            new = folder / f"{model}.safetensors"
            hvt.save(built, new, dtype=torch.float16 if model == "imagenet" else None)
            paths = (without_checksum(new, folder / "without.safetensors"), new)
            times = [[seconds(path) for path in paths] for _ in range(rounds)][1:]
            before, after = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{model}: {before * 1e3:.0f} → {after * 1e3:.0f} ms, × {after / before:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 31)
