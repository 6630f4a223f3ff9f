"""A training's state on disk: written whole, two kept, a damaged one passed over."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import HVTError
from ..files import whole_file

KEEP = 2


@dataclass
class Progress:
    """What must be known, beside the tensors, to go on as if nothing had happened."""

    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    bad_steps: int = 0
    """Losses that were not finite, in all."""
    bad_in_a_row: int = 0
    broken: int = 0
    """Unreadable training pictures that were passed over, in all."""
    best_top1: float = -1.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after so many steps, then drop all but the newest two."""
    path = folder / f"state-{step:09d}.pt"
    with whole_file(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # how torch reports a failed write, for whatever reason
            raise HVTError(
                f"cannot write {path}, the disk may be full: make room, then go on with "
                f"hvt train --resume {folder.parent}"
            ) from error
    for old in states(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def newest_state(folder: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest state that is whole, and a sentence for each damaged one passed over."""
    passed: list[str] = []
    for path in reversed(states(folder)):
        try:
            return path, read_state(path), passed
        except Exception as error:  # damaged files raise all sorts
            passed.append(
                f"{path} is damaged ({type(error).__name__}): going back to the one before"
            )
    return None, {}, passed


def read_state(path: Path) -> dict[str, Any]:
    """A state, after a look at its checksums, which torch writes and does not look at."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{name} in {path} has a wrong checksum")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def states(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    return sorted(folder.glob("state-*.pt"))


def remove_leftovers(folder: Path) -> None:
    """Drop what is left of files whose writing a kill cut short."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)
