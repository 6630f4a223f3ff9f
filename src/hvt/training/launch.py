"""A training in this process, or in several local ones that torch's elastic launcher starts.

Several single-threaded processes can be faster on a CPU than one with several threads: each has a
share of every batch, and they meet once a step. Batches are the same however many there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import distributed
from ..checkpoint.save_load import load
from ..costs import cost
from ..data.sources import Images
from ..device import find_device
from ..errors import HVTError
from . import engine
from .engine import Result, open_trainer
from .interrupt import Interrupted
from .pipeline import build_model
from .recipe import Recipe
from .run_lock import discard_empty, holds_run
from .state import states, step_of
from .worker import DECLINED, FAILED, FINISHED, INTERRUPTED, REFUSED, step_seconds

LEAST_SECONDS = 180.0
"""A shorter training is not measured by `auto`: starting processes would cost what they gain."""
LEAST_GAIN = 1.1
"""How many times as fast several processes must be for `auto` to take them."""
MOST = 4
"""Processes that `auto` tries at most."""
LONGEST_STEP = 5.0
"""Seconds of a step, at `SPEED`, above which it is not measured: that would take minutes, and large
operations are what threads share well."""
SPEED = 30e9
"""Multiply-adds a second of a thread."""
_DROPOUT = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate")

# The started process finds modules where this one does, also in a notebook and from a script that
# would train again if it were imported, and not first in the working folder; 3.10 has no -P, and
# -I leaves more out. Ctrl-C is quiet while it imports.
_SAFE = "-P" if sys.version_info >= (3, 11) else "-I"
_START = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
with open(sys.argv[1], encoding="utf-8") as file:
    job = json.load(file)
sys.path[:] = job["path"]
from hvt.training.worker import main
main(job)
"""


def train(recipe: Recipe, name: str = "run", console: Console | None = None) -> Result:
    """`engine.train` in as many processes as the recipe says.

    Several of them print to the standard output, or not at all where the console is quiet.
    """
    wanted = recipe.processes
    if _launched() or wanted in (None, 1):
        return engine.train(recipe, name, console)
    folder = engine.new_folder(recipe, name)
    if holds_run(folder):
        raise engine.taken(folder)
    named, recipe = recipe.output is not None, recipe.replace(output=str(folder))
    job: dict[str, Any] = {"recipe": recipe.to_dict(), "name": name}
    try:
        if wanted != "auto":
            _check_batch(recipe, int(wanted))
            return _run(job, int(wanted), folder, console)
        alone = recipe.replace(processes=1)
        return _if_faster(job, recipe, folder, console) or engine.train(alone, name, console)
    finally:
        if not named:
            discard_empty(folder)


def resume(
    folder: str | Path,
    console: Console | None = None,
    epochs: float | None = None,
    processes: int | str | None = None,
) -> Result:
    """`engine.resume` in as many processes as the run had, or in `processes` of them this time."""
    recipe = engine.read_recipe(folder)
    recorded = recipe.processes if isinstance(recipe.processes, int) else 1
    wanted = recorded if processes is None else recipe.replace(processes=processes).processes
    if _launched() or wanted in (None, 1):
        return engine.resume(folder, console, epochs)
    job = {"resume": str(folder), "epochs": epochs}
    if wanted != "auto":
        engine.check_batch(recipe, int(wanted), folder)
        return _run(job, int(wanted), Path(folder), console)
    longer = recipe if epochs is None else recipe.replace(epochs=epochs)
    done = max(map(step_of, states(Path(folder) / "checkpoints")), default=0)
    faster = _if_faster(job, longer, Path(folder), console, done)
    return faster or engine.resume(folder, console, epochs)


def _launched() -> bool:
    """Whether torchrun, or this module, has started this process: then it knows how many."""
    return "WORLD_SIZE" in os.environ


def _check_batch(recipe: Recipe, processes: int) -> None:
    """Refuse a batch that the processes of a new run cannot share, before they are started.

    One of more than the training images is fitted to them.
    """
    batch, unit = recipe.batch_size, 2 * processes * recipe.accumulate
    if batch % unit == 0:
        return
    if batch > unit:
        train = build_model(recipe).data.train
        if isinstance(train, Images) and 0 < len(train) // unit * unit < batch:
            return
    raise HVTError(f"batch_size={batch} must be a multiple of {unit} (2 × processes × accumulate)")


# ── how many ────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Choice:
    """Processes that may be faster than one."""

    processes: int
    steps: int
    """Of a measurement."""
    seconds: float
    """Of a step in one process."""


def choose(recipe: Recipe, done: int = 0) -> Choice | None:
    """How many processes to try, with the time of one's step; None where one is to be taken.

    `done` steps of the run need not be taken any more.

    The steps are taken by a model that is thrown away, so that a run is what it would have been.
    """
    if not several_processes(recipe):
        return None
    device = torch.device("cpu")
    trainer = open_trainer(
        recipe, Path(recipe.output or "."), distributed.DistributedContext(), device, _silent()
    )
    if not isinstance(build_model(recipe).data.train, Images) or any(
        getattr(trainer.learner.model.config, rate) for rate in _DROPOUT
    ):
        # A stream deals out its files, and dropout its masks, by the number of processes.
        return None
    batch, pieces = trainer.recipe.batch_size, 2 * recipe.accumulate
    threads = torch.get_num_threads()
    counts = [n for n in (4, 2) if n <= min(MOST, threads) and batch % (n * pieces) == 0]
    macs = 3 * batch * cost(trainer.learner.model.config).macs
    if not counts or macs > LONGEST_STEP * SPEED * threads:
        return None
    estimate = trainer.learner.seconds_per_step()
    if estimate * (trainer.total - done) < LEAST_SECONDS:
        return None
    # About two seconds of them, as both ways are to be measured.
    steps = max(3, min(20, int(2 / estimate)))
    return Choice(counts[0], steps, step_seconds(trainer, steps))


def several_processes(recipe: Recipe) -> bool:
    """Whether a training can gain by several processes, as far as can be told without its data."""
    return (
        sys.platform == "linux"  # where it is tested
        and _can_launch()
        and find_device(recipe.device).type == "cpu"
        and torch.get_num_threads() > 1
        and recipe.threads is None
        and not recipe.compile  # whose first steps take minutes
    )


def _if_faster(
    job: dict[str, Any], recipe: Recipe, folder: Path, console: Console | None, done: int = 0
) -> Result | None:
    """The training in several processes if they are faster; None where one process is."""
    choice = choose(recipe, done)
    if choice is None:
        return None
    beat = {"steps": choice.steps, "seconds": choice.seconds / LEAST_GAIN}
    try:
        return _run(job | {"beat": beat}, choice.processes, folder, console)
    except _Declined as declined:
        (console or Console()).print(
            f"in one process: a step takes {choice.seconds:.3g} s, in {choice.processes} "
            f"processes {declined.seconds:.3g} s",
            highlight=False,
        )
        return None


class _Declined(Exception):
    """Several processes are not faster."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


# ── starting and ending ─────────────────────────────────────────────────────────────────────────


def _can_launch() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def _run(job: dict[str, Any], processes: int, folder: Path, console: Console | None) -> Result:
    """Have processes do a job, and give what the first of them says."""
    if not _can_launch():
        raise HVTError(f"processes={processes}: this torch has no gloo, so train in one process")
    if "recipe" in job:
        job["recipe"]["processes"] = processes
    job |= {
        "path": sys.path,
        "quiet": console is not None and console.quiet,
        "parent": os.getpid(),
        "threads": max(1, torch.get_num_threads() // processes),
    }
    with tempfile.TemporaryDirectory(prefix="hvt-") as exchange:
        ended = _launch(job, processes, Path(exchange))
        outcomes = {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank in range(processes)
            if (path := Path(exchange) / f"outcome-{rank}.json").exists()
        }
    return _result(outcomes, ended, folder)


@dataclasses.dataclass(frozen=True)
class _Ended:
    """How processes ended."""

    signal: int | None = None
    """The one that this process was asked to stop with."""
    codes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Exit codes of those that failed, by rank."""


def _launch(job: dict[str, Any], processes: int, exchange: Path) -> _Ended:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    path = exchange / "job.json"
    path.write_text(json.dumps(job | {"exchange": str(exchange)}), encoding="utf-8")
    # Not SIGHUP, which nohup has it ignore; and time to end a step of a large model.
    newer = {"signals_to_handle": "SIGTERM,SIGINT", "shutdown_timeout": 120}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # the name of this machine need not be known to it
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(exchange / "logs")),
        **{name: value for name, value in newer.items() if name in known},  # type: ignore[arg-type]
    )
    with _own_signals(), _quiet_launcher():
        try:
            elastic_launch(config, sys.executable)(_SAFE, "-c", _START, str(path))
        except ChildFailedError as error:
            return _Ended(codes={rank: one.exitcode for rank, one in error.failures.items()})
        except SignalException as error:
            return _Ended(signal=int(error.sigval))
        finally:
            _end(exchange)
    return _Ended()


def _result(outcomes: dict[int, dict[str, Any]], ended: _Ended, folder: Path) -> Result:
    """What processes outcomes, or the error that tells best why there is nothing."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for rank in sorted(outcomes):
        by_kind.setdefault(outcomes[rank]["kind"], []).append(outcomes[rank])
    if REFUSED in by_kind:
        raise HVTError(by_kind[REFUSED][0]["words"])
    if INTERRUPTED in by_kind:
        raise Interrupted(by_kind[INTERRUPTED][0]["words"])
    if ended.signal is not None:
        raise KeyboardInterrupt
    silent = {rank: code for rank, code in ended.codes.items() if rank not in outcomes}
    if silent:  # the others then fail for want of it
        rank, code = next(iter(silent.items()))
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        has_run = (folder / "recipe.json").exists()
        after = f"; resume with: {engine.how_to_resume(folder)}" if has_run else ""
        raise HVTError(
            f"process {rank} of the training {how}, which the system does where memory is "
            f"short{after}"
        )
    if FAILED in by_kind:
        first = min(by_kind[FAILED], key=lambda one: float(one["time"]))
        raise RuntimeError(f"process {first['rank']} of the training failed:\n{first['words']}")
    if DECLINED in by_kind:
        raise _Declined(by_kind[DECLINED][0]["seconds"])
    figures = by_kind[FINISHED][0]["result"]
    where = Path(figures.pop("folder"))
    return Result(folder=where, model=load(where / "model.safetensors").eval(), **figures)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher sets handlers and leaves them behind: bring ours back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs on stderr what we say in a sentence of our own."""
    roots = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [
        one
        for name, one in logging.root.manager.loggerDict.items()
        if name.startswith(roots) and isinstance(one, logging.Logger) and not one.disabled
    ]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one in loggers:
            one.disabled = False


def _end(exchange: Path) -> None:
    """End what a second Ctrl-C has left of the processes: those that are still our children."""
    for path in exchange.glob("pid-*"):
        pid = int(path.read_text())
        with contextlib.suppress(OSError, AttributeError):  # it has ended; there is no such call
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.killpg(pid, signal.SIGKILL)


def _silent() -> Console:
    return Console(quiet=True)
