"""Result files: one JSON for each training and seed, written whole, that merge by being copied."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import timm
import torch

from .._version import __version__
from ..device import processor
from ..errors import HVTError
from ..files import whole_file

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
    """Of the last weights on the test pictures, in per cent; no epoch is chosen by them."""
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


def path_of(folder: Path, name: str) -> Path:
    """Where the result of a training and seed is."""
    return folder / f"{name}.json"


def write(folder: Path, finished: Finished) -> Path:
    """Write one result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {folder}: {error.strerror}") from error
    path = path_of(folder, finished.name)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(finished), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Finished:
    """Read one result; a file that is not one is named."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        finished = Finished(**values)
        checked = (finished.top1, finished.top5, finished.loss, finished.training_macs)
        if not all(isinstance(value, (int, float)) for value in checked):
            raise TypeError("its figures are not numbers")
        for point in finished.curve:
            point["epoch"], point["train_loss"], point["val_top1"]
        finished.recipe["epochs"], finished.machine["cpu"], finished.versions["torch"]
    except (OSError, TypeError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise HVTError(
            f"{path} is not a readable result ({reason}): copy it again, or delete it and run the "
            "row"
        ) from error
    if path.stem != finished.name:
        raise HVTError(f"{path} holds the result of {finished.name}: give it back that name")
    return finished


def read_all(folders: Iterable[Path]) -> dict[str, list[Finished]]:
    """The results of several folders by training, seeds rising; of two alike the first counts."""
    by_name: dict[str, Finished] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            by_name.setdefault(path.stem, read(path))
    grouped: dict[str, list[Finished]] = {}
    for finished in sorted(by_name.values(), key=lambda one: (one.key, one.seed)):
        grouped.setdefault(finished.key, []).append(finished)
    return grouped


# ── where and with what ─────────────────────────────────────────────────────────────────────────


def machine() -> dict[str, Any]:
    """What the training ran on."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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


def today() -> str:
    return date.today().isoformat()


def speed(results: Sequence[Finished], here: dict[str, Any]) -> float | None:
    """Multiply-adds a second of trainings on a machine like this one; None without any."""
    alike = [
        one.training_macs / one.seconds for one in results if one.seconds and one.machine == here
    ]
    return statistics.median(alike) if alike else None
