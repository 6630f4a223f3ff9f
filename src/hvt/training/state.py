"""A training's state on disk: written whole, the newest two kept, a damaged one passed over."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..distributed import DistributedContext
from ..errors import HVTError
from ..files import atomic_write, stale_temp_files
from ..terminal import print_line

KEEP = 2

_STATE = "state-" + "[0-9]" * 9 + ".pt"
RESULTS = (
    "recipe.json", "config.json", "metrics.csv", "curves.png", "best.safetensors",
    "model.safetensors", "worst.png",
)  # fmt: skip
"""What a run writes beside its states."""


class StateMismatchError(HVTError):
    """A state that can be read and is not one of this run."""


@dataclass
class Progress:
    """What must be known, beside the tensors, to continue as if nothing had happened."""

    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    bad_steps: int = 0
    """Losses that were not finite, in all."""
    consecutive_nonfinite: int = 0
    broken: int = 0
    """Unreadable training images that were skipped, in all."""
    best: float | None = None
    """The best value of the run's measure so far."""
    stale: int = 0
    """Evaluations since then."""
    seconds: float = 0.0
    """In training so far, where the recipe limits them."""
    time_used: float = 0.0
    """The same as a share of what it allows."""
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after so many steps, then drop all but the newest two."""
    path = folder / f"state-{step:09d}.pt"
    with atomic_write(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # how torch reports a failed write, for whatever reason
            raise HVTError(f"cannot write {path}, the disk may be full") from error
    for old in states(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def newest_state(
    folder: Path, processes: DistributedContext, console: Console
) -> dict[str, Any] | None:
    """The newest state that is whole, the same in all processes; None where there is none.

    Damaged ones are renamed, or they would count among the newest two. A state that the machine
    fails to read, for want of permission or memory say, may be good: that is an error.
    """
    path, state = None, None
    for candidate in reversed(states(folder)) if processes.is_main_process else ():
        try:
            path, state = candidate, read_state(candidate)
            break
        except zipfile.BadZipFile:
            path = None
            candidate.replace(candidate.with_suffix(".pt.bad"))
            print_line(console, f"{candidate} is damaged: using the previous one")
        except Exception as error:  # torch has no class for a want of memory
            reason = str(error) or "not enough memory"
            raise HVTError(
                f"{candidate} cannot be read now: {reason}; try again when that is fixed, or "
                "rename it to resume without it"
            ) from error
    path = processes.broadcast(path)
    return state if state is not None or path is None else read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """A state, after a look at its checksums, which torch writes and does not verify."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{name} in {path} has a wrong checksum")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def weights_digest(model: nn.Module) -> str:
    """A digest of a model's tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        plain = tensor.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def states(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    return sorted(folder.glob(_STATE))


def remove_stale_files(folder: Path) -> None:
    """Drop what is left of a run's files whose writing a kill cut short."""
    for place in (folder, folder / "checkpoints"):
        for path, name in stale_temp_files(place).items():
            if name in RESULTS or fnmatch(name, _STATE):
                path.unlink(missing_ok=True)
