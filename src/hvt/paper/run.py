"""Training rows: each training once for all rows that share it, one result file each.

Jobs know nothing of each other, so that machines can share a table: by `--row`, by `--seeds`, or by
`--shard`. An interrupted one goes on from its run's folder.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..device import find_device
from ..errors import HVTError, did_you_mean
from ..training.engine import Result, train
from ..training.interrupt import Interrupted
from . import power_baseline, results
from .going_on import go_on
from .protocol import SEEDS, Protocol, Training, plan
from .results import Finished
from .tables import Row, Table

SPEED = {"cpu": 40e9, "long": 12e9}
"""Multiply-adds a second to plan with where nothing has been measured: of two CPU cores, and of one
thread, which is how the long trainings run best."""

LEAST_PART = 0.1
"""Of a training, by which the time of the whole is told."""


@dataclass(frozen=True)
class Job:
    """A training with a seed, and the rows that it serves."""

    training: Training
    seed: int
    rows: tuple[str, ...]
    command: str

    @property
    def name(self) -> str:
        return f"{self.training.key}-seed{self.seed}"

    @functools.cached_property
    def base(self) -> Job:
        """With PoWER, the DeiT that it starts from, which is a row's too; otherwise the job."""
        if self.training.power is None:
            return self
        return Job(
            Training(self.training.config, self.training.recipe), self.seed, self.rows, self.command
        )


@dataclass(frozen=True)
class Place:
    """Where results and runs are, and what a machine adds to a recipe: root, threads, device …"""

    results: Path
    runs: Path
    recipe: Mapping[str, Any]


def jobs(
    protocol: Protocol,
    chosen: Iterable[Table],
    budgets: Sequence[str],
    seeds: Sequence[int] | None = None,
    names: Sequence[str] = (),
    data: str | None = None,
    options: Sequence[str] = (),
) -> list[Job]:
    """The trainings that fill tables, each once; `names` are the rows wanted, all without any."""
    chosen = list(chosen)
    for table in chosen:
        if not table.trained:
            raise HVTError(f"{table.name} has costs alone, nothing to train: use hvt paper costs")
    known = [row.name for table in chosen for row in table.rows]
    for name in names:
        if name not in known:
            raise HVTError(f"there is no row {name!r}: {did_you_mean(name, known)}")
    by_name: dict[str, Job] = {}
    for table in chosen:
        source = protocol.data_of(table, data)
        for row in table.rows:
            if names and row.name not in names:
                continue
            trainings = {b: plan(protocol, row, b, source).training for b in budgets}
            for seed in SEEDS.get(table.name, (0,)) if seeds is None else seeds:
                for budget, training in trainings.items():
                    command = _command(protocol, row, budget, seed, options)
                    job = Job(training, seed, (row.title,), command)
                    if job.name in by_name:
                        before = by_name[job.name]
                        titles = tuple(dict.fromkeys((*before.rows, row.title)))
                        job = Job(training, seed, titles, before.command)
                    by_name[job.name] = job
    return list(by_name.values())


def _command(protocol: Protocol, row: Row, budget: str, seed: int, options: Sequence[str]) -> str:
    words = ["hvt", "paper", "run", row.table, "--row", row.name, "--protocol", protocol.name]
    return shlex.join([*words, "--budget", budget, "--seeds", str(seed), *options])


def shard(planned: Sequence[Job], index: int, count: int) -> list[Job]:
    """The part of one machine of several, 1 to count: alike in cost, the same whatever is done.

    What PoWER prunes is trained on the same machine, as it needs the weights.
    """
    if not 1 <= index <= count:
        raise HVTError(
            f"shard {index}/{count} does not exist: give one from 1/{count} to {count}/{count}"
        )
    units: dict[str, float] = {}
    for job in planned:
        name = job.base.name
        units[name] = units.get(name, 0.0) + job.training.training_macs
    loads, owner = [0.0] * count, {}
    for name in sorted(units, key=lambda unit: (-units[unit], unit)):  # the largest first
        lightest = loads.index(min(loads))
        owner[name] = lightest
        loads[lightest] += units[name]
    return [job for job in planned if owner[job.base.name] == index - 1]


# ── one job ─────────────────────────────────────────────────────────────────────────────────────


def is_done(job: Job, place: Place) -> bool:
    """Whether its result is there; a damaged one is an error."""
    path = results.path_of(place.results, job.name)
    return path.exists() and results.read(path).name == job.name


def has_begun(job: Job, place: Place) -> bool:
    """Whether there is a run to resume."""
    return (place.runs / job.name / "recipe.json").exists()


def trains_again(job: Job, place: Place) -> bool:
    """Whether its weights are not here, though its result is: then what needs them trains it."""
    return is_done(job, place) and not has_begun(job, place)


def is_alone() -> bool:
    """Whether no torchrun started this process: several might see different files."""
    return "WORLD_SIZE" not in os.environ


def is_main_process() -> bool:
    """Whether this process is rank 0 of those that torchrun started: the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def run_job(job: Job, protocol: Protocol, place: Place, console: Console) -> Finished:
    """Train, or go on, to the end; then write the result."""
    try:
        if job.training.power is not None and trains_again(job.base, place) and is_main_process():
            console.print(
                f"{job.base.name} has a result but no weights in {place.runs}: it is trained again",
                highlight=False,
                soft_wrap=True,
            )
        last = _train(job.base, place, console)
        seconds = _seconds(last, job.base.training)
        if job.training.power is not None:
            if last.stop_asked:
                raise Interrupted("stopped before PoWER's search")
            if seconds is None and is_done(job.base, place):  # not trained now, but here before
                seconds = results.read(results.path_of(place.results, job.base.name)).seconds
            weights, folder = last.folder / "model.safetensors", place.runs / job.name
            last, searching = power_baseline.search_and_retrain(
                job.training, job.seed, weights, folder, place.recipe, console
            )
            known = seconds is not None and searching is not None
            seconds = (seconds or 0) + (searching or 0) + last.seconds if known else None
    except Interrupted as stopped:
        where = str(stopped).partition(";")[0]
        raise Interrupted(f"{job.name}: {where}; the same command resumes from there") from stopped
    finished = _finished(job, protocol, last, seconds)
    if is_main_process():
        results.write(place.results, finished)
    if last.stop_asked:
        raise Interrupted(f"{job.name}: stopped at its end; the same command goes on from there")
    return finished


def _train(job: Job, place: Place, console: Console) -> Result:
    folder = place.runs / job.name
    recipe = job.training.recipe.replace(seed=job.seed, output=str(folder), tensorboard=False)
    if has_begun(job, place):
        return go_on(folder, job.training, recipe.to_dict(), place.recipe, console)
    return train(recipe.replace(**place.recipe), console=console)


def _seconds(result: Result, training: Training) -> float | None:
    """The time of a whole training: one that went on knows its last part's alone, but the speed.

    A part of some steps knows no speed either, as it has an evaluation at its end.
    """
    images = training.epochs * training.images
    if result.images_per_second * result.seconds < LEAST_PART * images:
        return None
    return images / result.images_per_second


def _finished(job: Job, protocol: Protocol, result: Result, seconds: float | None) -> Finished:
    training, last = job.training, result.rows[-1]
    recipe = {k: v for k, v in training.recipe.to_dict().items() if v is not None}
    lost = next((row["epoch"] for row in result.rows if not math.isfinite(row["train_loss"])), None)
    if lost is not None:
        raise HVTError(f"no step of epoch {lost} of {job.name} had a finite loss: lower its lr")
    return Finished(
        key=training.key,
        seed=job.seed,
        protocol=protocol.name,
        data=training.recipe.data or "",
        command=job.command,
        epochs=training.epochs,
        training_macs=training.training_macs,
        # `result.top1` may be that of averaged weights, and its best is chosen by the test part.
        top1=last["val_top1"],
        top5=last["val_top5"],
        loss=last["val_loss"],
        seconds=seconds,
        images_per_second=training.epochs * training.images / seconds if seconds else None,
        config=result.model.config.to_dict(),
        recipe=recipe | {"seed": job.seed},
        curve=[
            {
                "epoch": row["epoch"],
                "train_loss": row["train_loss"],
                "val_top1": row.get("val_top1"),
            }
            for row in result.rows
        ],
        machine=results.machine(next(result.model.parameters()).device),
        versions=results.versions(),
        date=results.today(),
    )


# ── many jobs ───────────────────────────────────────────────────────────────────────────────────


def estimate(
    protocol: Protocol, pending: Sequence[Job], known: Sequence[Finished], place: Place
) -> Callable[[Job], float | None]:
    """Seconds that a job takes from the beginning, by what was measured on such a machine."""
    names = {job.name for job in pending}
    recipe = next(iter(protocol.recipes.values()))
    here = results.machine(_device(place.recipe.get("device", recipe.device)))
    here["threads"] = place.recipe.get("threads") or recipe.threads or here["threads"]
    rate = results.speed(known, here) or SPEED.get(protocol.name)

    def seconds(job: Job) -> float | None:
        macs = job.training.training_macs
        # What PoWER starts from is counted where it is trained, or has been.
        if job.training.power is not None and (
            job.base.name in names or has_begun(job.base, place)
        ):
            macs -= job.base.training.training_macs
        return None if rate is None else macs / rate

    return seconds


def _device(name: str) -> torch.device:
    """One that is not here may be where the trainings are to run: they tell, a plan does not."""
    try:
        return find_device(name)
    except HVTError:
        return torch.device("cpu")
