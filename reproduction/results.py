"""Result files: one JSON per training and seed, written atomically, that merge by being copied."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import timm
import torch

from hvt import __version__
from hvt.device import cpu_name
from hvt.errors import HVTError
from hvt.files import atomic_write

FOLDER = Path("benchmarks/results/paper")


@dataclass(frozen=True)
class Finished:
    """What is kept of a training."""

    key: str
    """The training's, without the seed; `Training.key`."""
    seed: int
    protocol: str
    data: str
    command: str
    epochs: float
    training_macs: float
    top1: float
    """Of the last weights on the test images, in per cent; no epoch is chosen by them."""
    top5: float
    loss: float
    seconds: float | None
    """The time of the training; None where it was interrupted at its very end."""
    images_per_second: float | None
    config: dict[str, Any]
    recipe: dict[str, Any]
    curve: list[dict[str, Any]]
    """By epoch: `epoch`, `train_loss`, `val_top1`."""
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str

    @property
    def name(self) -> str:
        return f"{self.key}-seed{self.seed}"


Known = dict[str, list[Finished]]
"""Results by training, seeds rising."""


def write(folder: Path, finished: Finished) -> Path:
    """Write one result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{finished.name}.json"
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(asdict(finished), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Finished:
    """Read one result; the error names a file that is not one."""
    try:
        finished = Finished(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise HVTError(
            f"{path} is not a readable result ({type(error).__name__}: {error}): copy it again, or "
            "delete it and run the row"
        ) from error
    if path.stem != finished.name:
        raise HVTError(f"{path} holds the result of {finished.name}: give it back that name")
    return finished


def read_all(folders: Iterable[Path]) -> Known:
    """The results of several folders; one training may have copies in several of them."""
    by_name: dict[str, tuple[Path, Finished]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        finished = read(path)
        before, same = by_name.setdefault(path.stem, (path, finished))
        if (finished.top1, finished.curve) != (same.top1, same.curve):
            raise HVTError(
                f"{before} and {path} have different figures of one training: keep the right one"
            )
    known: Known = {}
    for _, finished in sorted(by_name.values(), key=lambda pair: (pair[1].key, pair[1].seed)):
        known.setdefault(finished.key, []).append(finished)
    return known


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What a training on this device runs on; a GPU that it leaves idle is not part of that."""
    cuda = device is not None and device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
    }


def versions() -> dict[str, str]:
    """What it ran with."""
    return {
        "hvt": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "numpy": numpy.__version__,
    }
