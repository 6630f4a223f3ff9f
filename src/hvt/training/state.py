"""A training's state on disk: written whole, two kept, one that cannot be used passed over."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HVTError
from ..files import atomic_write, stale_temp_files

KEEP = 2
_STATE = re.compile(r"state-\d{9,}\.pt")
# What a run writes, and so what may be left half-written in its folder and in checkpoints.
_RESULTS = re.compile(
    r"(recipe|config)\.json|metrics\.csv|curves\.png|(best|model)\.safetensors|" + _STATE.pattern
)


class StateMismatchError(HVTError):
    """A state that can be read and is not one of this run."""


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
    consecutive_nonfinite: int = 0
    broken: int = 0
    """Unreadable training images that were passed over, in all."""
    best: float | None = None
    """The best value of the run's measure so far."""
    rows: list[dict[str, Any]] = field(default_factory=list)


def write_state(folder: Path, step: int, state: dict[str, Any], resume: str) -> Path:
    """Write the state after so many steps, then drop all but the newest two.

    `resume` is the command that goes on, for the sentence where the disk is full.
    """
    path = folder / f"state-{step:09d}.pt"
    with atomic_write(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # how torch reports a failed write, for whatever reason
            raise HVTError(
                f"cannot write {path}, the disk may be full: make room, then resume with {resume}"
            ) from error
    for old in states(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def newest_state(
    folder: Path, check: Callable[[Path, dict[str, Any]], None] = lambda path, state: None
) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """The newest state that can be used, and a sentence for each one passed over.

    `check` raises `StateMismatchError` for a state of another run. Where nothing else is left, so
    does this: they may be right, and the recipe wrong. A state that the machine fails to read, for
    want of permission or memory say, may be good: that is an error, not damage.
    """
    passed: dict[Path, str] = {}
    misfit: HVTError | None = None
    for path in reversed(states(folder)):
        try:
            state = read_state(path)
            check(path, state)
            return path, state, passed
        except StateMismatchError as error:
            reason = f"does not fit this run: {error}"
            misfit = misfit or StateMismatchError(
                f"{path} {reason}; put recipe.json and the data back as they were, or train again "
                "with another --output"
            )
        except Exception as error:  # damaged files raise all sorts
            if why := _not_readable_now(error):
                raise HVTError(
                    f"{path} cannot be read now: {why}; try again when that is mended, or rename "
                    "it to go on without it"
                ) from error
            reason = f"is damaged ({type(error).__name__})"
        passed[path] = f"{path} {reason}; going back to the one before"
    if misfit is not None:
        raise misfit
    return None, {}, passed


def _not_readable_now(error: Exception) -> str | None:
    """Why a file that may be good could not be read; None if the error is of its content."""
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, RuntimeError) and "allocate" in str(error):  # how torch says the same
        return "there is not enough memory"
    # A damaged archive has places that lie before its beginning or beyond all files.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.EOVERFLOW):
        return error.strerror or str(error)
    return None


def set_aside(paths: Iterable[Path]) -> None:
    """Rename states that cannot be used, or they would count among the newest two."""
    for path in paths:
        try:
            path.replace(path.with_suffix(".pt.bad"))
        except OSError as error:
            raise HVTError(f"cannot rename {path}: {error.strerror or error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """A state, after a look at its checksums, which torch writes and does not look at."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{name} in {path} has a wrong checksum")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def weights_digest(model: nn.Module) -> str:
    """Another one for other weights, whatever their file is called."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        plain = tensor.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def states(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    try:  # not glob, to which a folder that cannot be read is an empty one
        names = os.listdir(folder)  # noqa: PTH208
        ours = [folder / name for name in names if _STATE.fullmatch(name)]
        return sorted((path for path in ours if path.is_file()), key=step_of)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise HVTError(f"{folder} cannot be read now: {error.strerror or error}") from error


def step_of(path: Path) -> int:
    """After how many steps a state was written, by its name."""
    return int(path.stem.removeprefix("state-"))


def remove_leftovers(folder: Path) -> None:
    """Drop what is left of a run's files whose writing a kill cut short."""
    for place in (folder, folder / "checkpoints"):
        for path, name in stale_temp_files(place).items():
            if _RESULTS.fullmatch(name):
                path.unlink(missing_ok=True)


# ── whether a state is this run's ───────────────────────────────────────────────────────────────


def check_form(name: str, value: Any, like: Any) -> None:
    """Raise `StateMismatchError` unless both have the same types, names, shapes and dtypes."""
    kind: Any = dict if isinstance(like, dict) else type(like)
    if not isinstance(value, kind):
        raise StateMismatchError(f"its {name} is {type(value).__name__}, not {type(like).__name__}")
    if isinstance(like, Tensor):
        if value.shape != like.shape or value.dtype != like.dtype:
            raise StateMismatchError(f"its {name} is {_describe(value)}, not {_describe(like)}")
    elif isinstance(like, dict):
        for key in (*like, *value):
            if key not in value:
                raise StateMismatchError(f"its {name} has no {key}")
            if key not in like:
                raise StateMismatchError(f"its {name} has {key}, which is unknown here")
            check_form(f"{name}.{key}", value[key], like[key])
    elif isinstance(like, list | tuple):
        if len(value) != len(like):
            raise StateMismatchError(f"its {name} has {len(value)} parts, not {len(like)}")
        for index, (one, other) in enumerate(zip(value, like, strict=True)):
            check_form(f"{name}[{index}]", one, other)


def check_progress(value: Any, step: int, steps: int, total: int) -> None:
    """Raise `StateMismatchError` unless this is the progress after `step` of `total` steps."""
    rows, best = (value.get(k) if isinstance(value, dict) else None for k in ("rows", "best"))
    check_form("progress", value, vars(Progress()) | {"rows": rows, "best": best})
    progress = Progress(**value)
    if not 0 <= progress.step <= steps or progress.epoch * steps + progress.step != step:
        raise StateMismatchError(
            f"its name says step {step}, but it is at step {progress.step} of epoch "
            f"{progress.epoch + 1}, and an epoch has {steps}"
        )
    # The last epoch of a run may be a part of one: what follows it is counted as whole.
    behind = progress.epoch * steps + progress.step
    if behind > -(-total // steps) * steps or (progress.step and behind > total):
        raise StateMismatchError(f"it has {behind} steps behind it, of {total}")
    if not isinstance(rows, list) or len(rows) != progress.epoch:
        raise StateMismatchError(
            f"its table does not have one row for each of {progress.epoch} epochs"
        )
    for epoch, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.get("epoch") != epoch:
            raise StateMismatchError(f"its table has another epoch in row {epoch}")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'×'.join(map(str, tensor.shape)) or '()'}"
