"""Whose a run's folder is: one training's at a time, and a new name for each that begins.

Two trainings in one folder would mix their weights and figures without an error.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..distributed import DistributedContext
from ..errors import HVTError
from .recipe import Recipe
from .state import RESULTS, states

LOCK = ".lock"


class RunLock:
    """A lock in a run's folder, which ends with its process whatever happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, FileLock(folder / LOCK)

    def take(self) -> HVTError | None:
        """The error where another process has it; where there are no locks, none has."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)
        except Timeout:
            return HVTError(
                f"{self.folder} is being trained by another process: wait for its end, or choose "
                "another folder"
            )
        except (NotImplementedError, OSError):  # a folder that cannot be written fails later
            pass
        return None

    def release(self) -> None:
        if self.lock.is_locked:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()
            self.lock.release()


@contextlib.contextmanager
def locked(folder: Path, processes: DistributedContext) -> Iterator[None]:
    """Hold a run's folder for all processes; one that stays empty is removed at the end."""
    lock = RunLock(folder)
    try:
        error = processes.broadcast(lock.take() if processes.is_main_process else None)
        if error is not None:
            raise error
        yield
    finally:
        lock.release()
        if processes.is_main_process:
            discard_empty(folder)


def found_run(folder: Path) -> str | None:
    """A file in a folder that a new run would replace; None where there is none."""
    results = [name for name in RESULTS if (folder / name).exists()]
    return next(iter([*results, *(path.name for path in states(folder / "checkpoints"))]), None)


def new_folder(recipe: Recipe, name: str, restarted: bool) -> Path:
    """The folder of a run: the one asked for, or the default one with a number if it is taken.

    A run that torchrun `restarted` is in the newest of these.
    """
    if recipe.output is not None:
        return Path(recipe.output)
    folder = Path(f"runs/{name}-{recipe.model or Path(recipe.init or 'model').stem}")
    return newest_folder(folder) if restarted else unused_folder(folder)


def resume_command(folder: Path) -> str:
    """How to resume a run."""
    return shlex.join(["hvt", "train", "--resume", str(folder)])


def unused_folder(folder: Path) -> Path:
    """A new folder of this name, or with -2, -3 … behind it; no two processes get the same."""
    number, path = 1, folder
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = folder.with_name(f"{folder.name}-{number}")
        except OSError:  # the error of whoever writes there says more
            return path


def newest_folder(folder: Path) -> Path:
    """The one of these names that was begun last."""
    number, path = 2, folder
    while found_run(following := folder.with_name(f"{folder.name}-{number}")):
        number, path = number + 1, following
    return path


def discard_empty(folder: Path) -> None:
    """Remove the folder of a training that did not come to write anything."""
    with contextlib.suppress(OSError):
        folder.rmdir()
