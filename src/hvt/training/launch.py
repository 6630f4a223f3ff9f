"""A training in this process or, where the recipe has `processes`, together with other local ones.

This process is rank 0 and starts the others with torch's `env://` variables, so what is printed,
Ctrl-C, the result and errors are those of a single process. torchrun would be one more process
above them, whose banner follows every error, and which cannot give a result back to Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from rich.console import Console

from ..device import find_device
from ..distributed import ConnectionLostError
from ..errors import HVTError
from . import engine
from .interrupt import Interrupted
from .recipe import Recipe, from_dict
from .run_lock import read_recipe
from .trainer import Result

# A started process finds modules where this one does, also in a notebook and from a script that
# would train again if it were imported, and never in the working folder; 3.10 has no -P, and -I
# leaves more out.
_SAFE = "-P" if sys.version_info >= (3, 11) else "-I"
_START = """\
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from hvt._openmp import wait_briefly
wait_briefly()
from hvt.training.launch import join
join(job)
"""
_GRACE = 20.0
"""Seconds that another process has to end once this one has."""


def train(recipe: Recipe, name: str = "run", console: Console | None = None) -> Result:
    """`engine.train` in as many processes as the recipe says."""
    with _processes(recipe.processes, recipe, {"recipe": recipe.to_dict(), "name": name}):
        return engine.train(recipe, name, console)


def resume(
    folder: str | Path,
    console: Console | None = None,
    epochs: float | None = None,
    processes: int | None = None,
    **overrides: Any,
) -> Result:
    """`engine.resume` in as many processes as the run had, or in `processes` of them this time."""
    recipe = read_recipe(folder)
    job = {"resume": str(folder), "epochs": epochs, "overrides": overrides}
    with _processes(processes or recipe.processes, recipe, job):
        return engine.resume(folder, console, epochs, **overrides)


def join(job: dict[str, Any]) -> NoReturn:
    """What a started process does: the same training, without output but its error.

    It is `ready` once nothing but the training can fail: the first process then waits for it.
    """
    code, console = 0, Console(quiet=True)
    try:
        resumed = job.get("resume")
        recipe = read_recipe(resumed) if resumed else from_dict(job["recipe"], "the job")
        find_device(recipe.device)
        print("ready", flush=True)
        sys.stdout = sys.stderr
        if resumed:
            engine.resume(resumed, console, job["epochs"], **job["overrides"])
        else:
            engine.train(recipe, job["name"], console)
    except ConnectionLostError:
        code = 3
    except HVTError as error:
        print(error, file=sys.stderr)
        code = 2
    except (Interrupted, KeyboardInterrupt):
        code = 130
    sys.exit(code)


@contextlib.contextmanager
def _processes(count: int | None, recipe: Recipe, job: dict[str, Any]) -> Iterator[None]:
    """While it is entered, this process is rank 0 of `count`, and the others do the job too."""
    if count in (None, 1) or "WORLD_SIZE" in os.environ:  # torchrun knows how many there are
        yield
        return
    assert count is not None
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise HVTError(f"processes={count}: this torch has no gloo, so train in one process")
    if find_device(recipe.device).type != "cpu":
        raise HVTError(f"processes={count} is for the CPU: start one for each GPU by torchrun")
    threads = torch.get_num_threads()
    each = max(1, threads // count)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(each),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,  # torchrun's name of this start of processes
    }
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to connect
    job = job | {"path": sys.path}
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
        others = []
        for rank in range(1, count):
            errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            others.append(stack.enter_context(_Process(rank, shared, job, errors)))
        for other in others:
            other.wait_until_ready()
        try:
            os.environ.update(shared, RANK="0", LOCAL_RANK="0")
            torch.set_num_threads(each)
            yield
        except ConnectionLostError as error:
            for other in others:
                other.explain(error)
            raise
        finally:
            torch.set_num_threads(threads)
            os.environ.clear()
            os.environ.update(before)


class _Process:
    """Another process of the training; it ends with this one."""

    def __init__(
        self, rank: int, shared: dict[str, str], job: dict[str, Any], errors: IO[str]
    ) -> None:
        self.rank, self.errors = rank, errors
        self.process = subprocess.Popen(
            [sys.executable, _SAFE, "-c", _START],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's, which tells the others to stop
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin:
            json.dump(job, self.process.stdin)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.explain(HVTError("it did not start"))

    def explain(self, lost: HVTError) -> None:
        """Raise what ended it, if it has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        code = self.process.poll()
        self.errors.seek(0)
        words = self.errors.read().strip()
        if code == 2:
            raise HVTError(words) from lost
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            raise HVTError(
                f"process {self.rank} was ended by {how}, as the system does where memory is "
                f"short: {lost}"
            ) from lost
        if code == 1:
            raise RuntimeError(f"process {self.rank} of the training failed:\n{words}") from lost

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """It ends by itself where this process has; after an error it has nothing to save."""
        try:
            self.process.wait(_GRACE if kind in (None, Interrupted) else 0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
