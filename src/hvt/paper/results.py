"""Result files: one JSON for each training and seed, written whole, that merge by being copied."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import timm
import torch

from .. import __version__
from ..config import HVTConfig
from ..device import cpu_name
from ..errors import HVTError
from ..fields import check_type, check_values
from ..files import atomic_write
from .protocol import PROTOCOLS, key_begins

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

    @property
    def power(self) -> bool:
        """Whether it is a DeiT with PoWER, whose epochs and seconds are those of three steps."""
        return self.key.startswith("power_")

    @property
    def figures(self) -> tuple[Any, ...]:
        """What was measured of the model, by which two results are one."""
        return self.top1, self.top5, self.loss, self.curve

    @property
    def place(self) -> str:
        """What it ran on, in words."""
        machine = self.machine
        processes, threads = machine.get("processes", 1), machine["threads"]
        several = f" × {processes} processes" if processes > 1 else ""
        plural = "" if threads == 1 else "s"
        return f"{machine.get('gpu') or machine['cpu']}, {threads} thread{plural}{several}"


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
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(asdict(finished), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Finished:
    """Read one result; a file that is not one is named."""
    try:
        finished = Finished(**json.loads(path.read_text(encoding="utf-8")))
        _check(finished)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        kind = "" if isinstance(error, HVTError) else f"{type(error).__name__}: "
        raise HVTError(
            f"{path} is not a readable result ({kind}{error}): copy it again, or delete it and run "
            "the row"
        ) from error
    if path.stem != finished.name:
        raise HVTError(f"{path} holds the result of {finished.name}: give it back that name")
    folder = path.parent.name
    if folder in PROTOCOLS and folder != finished.protocol:
        raise HVTError(
            f"{path} holds a result of the protocol {finished.protocol}: move it to "
            f"{path.parent.parent / finished.protocol}"
        )
    return finished


def read_all(folders: Iterable[Path]) -> dict[str, list[Finished]]:
    """The results of several folders by training, seeds rising; one may be in several of them."""
    by_name: dict[str, tuple[Path, Finished]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            finished = read(path)
            before, same = by_name.setdefault(path.stem, (path, finished))
            if finished.figures != same.figures:
                raise HVTError(
                    f"{before} and {path} have different figures of one training: keep the one "
                    "that is right"
                )
    grouped: dict[str, list[Finished]] = {}
    for finished in sorted((one for _, one in by_name.values()), key=lambda o: (o.key, o.seed)):
        grouped.setdefault(finished.key, []).append(finished)
    return grouped


# ── what a result must be ───────────────────────────────────────────────────────────────────────


def _check(finished: Finished) -> None:
    """Refuse what `hvt paper run` would not have written."""
    check_values(finished)
    _check_limits(vars(finished), {"top1": 100, "top5": 100})
    if finished.protocol not in PROTOCOLS:
        raise HVTError(f"protocol={finished.protocol!r} must be one of {', '.join(PROTOCOLS)}")
    power = finished.power
    begins = key_begins(HVTConfig.from_dict(finished.config), power, finished.epochs)
    if not finished.config or not finished.key.startswith(begins):
        raise HVTError(f"its config and epochs are those of {begins}…, not of {finished.key}")
    recipe = {"seed": finished.seed, "data": finished.data}
    recipe |= {} if power else {"epochs": finished.epochs}  # which has those of three steps
    for name, value in recipe.items():
        if finished.recipe.get(name) != value:
            raise HVTError(f"{name} is {value} and, in its recipe, {finished.recipe.get(name)}")
    _check_limits({"smoothing": finished.recipe.get("smoothing", 0.0)}, {"smoothing": 1})
    _check_curve(finished)
    _check_kinds("machine", finished.machine, {"cpu": str, "threads": int})
    _check_kinds("machine", {"processes": 1} | finished.machine, {"processes": int})
    _check_kinds("versions", finished.versions, dict.fromkeys(("hvt", "torch", "timm"), str))
    try:
        shlex.split(finished.command)
    except ValueError as error:
        raise HVTError(f"command={finished.command!r}: {error}") from error


def _check_curve(finished: Finished) -> None:
    if not finished.curve:
        raise HVTError("its curve is empty")
    for point in finished.curve:
        _check_kinds("a point of its curve", point, {"epoch": int, "train_loss": float})
        known = {k: v for k, v in point.items() if v is not None}
        if "val_top1" not in point:
            raise HVTError("a point of its curve has no val_top1")
        _check_limits(known, {"val_top1": 100})
    last = finished.curve[-1]
    # With PoWER the curve is that of retraining alone. A rest of less than half a step is none.
    if not finished.power and abs(last["epoch"] - finished.epochs) >= 1:
        raise HVTError(f"its curve ends at epoch {last['epoch']} of {finished.epochs:g}")
    if last.get("val_top1") != finished.top1:
        raise HVTError(f"its curve ends at {last.get('val_top1')}, top1 is {finished.top1}")


def _check_kinds(where: str, values: Any, kinds: Mapping[str, type]) -> None:
    if not isinstance(values, dict):
        raise HVTError(f"{where} must be a table")
    for name, kind in kinds.items():
        if name not in values:
            raise HVTError(f"{where} has no {name}")
        check_type(name, values[name], kind)
    _check_limits(values, {})


def _check_limits(values: Mapping[str, Any], most: Mapping[str, float]) -> None:
    """Every number is finite and not negative, and those named are numbers up to a limit."""
    for name, value in values.items():
        if name in most:
            check_type(name, value, float)
        if isinstance(value, (int, float)) and not 0 <= value <= most.get(name, sys.float_info.max):
            limit = f" and at most {most[name]:g}" if name in most else ""
            raise HVTError(f"{name}={value!r} must be finite, at least 0{limit}")


# ── where and with what ─────────────────────────────────────────────────────────────────────────


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What a training on this device runs on; a GPU that it leaves idle is no part of that."""
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


def today() -> str:
    return date.today().isoformat()


def speed(results: Sequence[Finished], here: dict[str, Any]) -> float | None:
    """Multiply-adds a second of trainings on a machine like this one; None without any."""
    alike = [
        one.training_macs / one.seconds for one in results if one.seconds and one.machine == here
    ]
    return statistics.median(alike) if alike else None
