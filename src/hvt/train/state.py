"""A training's state on disk: written whole, two kept, a damaged one passed over."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors import HVTError
from ..files import whole_file

KEEP = 2


def write_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after so many steps, then drop all but the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-{step:09d}.pt"
    with whole_file(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # how torch reports a failed write
            raise HVTError(
                f"cannot write {path} ({str(error).splitlines()[0]}): free some disk space, "
                "then go on with --resume"
            ) from error
    for old in states(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def read_state(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest state that can be read, and a sentence for each damaged one passed over."""
    passed: list[str] = []
    for part in folder.glob(".*.part"):  # a write that a kill cut short
        part.unlink(missing_ok=True)
    for path in reversed(states(folder)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True), passed
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as e:
            passed.append(f"{path} is damaged ({type(e).__name__}), going back to the one before")
    return None, passed


def states(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    return sorted(folder.glob("state-*.pt"))
