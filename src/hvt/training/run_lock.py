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


@contextlib.contextmanager
def locked(folder: Path, processes: DistributedContext) -> Iterator[None]:
    """Hold a run's folder for all processes; one that stays empty is removed at the end.

    The lock ends with its process, whatever happens to it; where there are no locks, none is held.
    """
    lock, error = FileLock(folder / LOCK), None
    if processes.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            error = HVTError(
                f"{folder} is in use by another process: wait until it ends, or choose another "
                "folder"
            )
        except (NotImplementedError, OSError):  # a folder that cannot be written fails later
            pass
    try:
        if (error := processes.broadcast(error)) is not None:
            raise error
        yield
    finally:
        with contextlib.suppress(OSError):
            if lock.is_locked:
                (folder / LOCK).unlink()
        lock.release()
        with contextlib.suppress(OSError):
            if processes.is_main_process:
                folder.rmdir()


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
