"""Training rows: each training once for all rows that share it, one result file each.

Jobs know nothing of each other, so that machines can share a table: by `--row`, by `--seeds`, or by
`--shard`. An interrupted one resumes from its run's folder.
"""

from __future__ import annotations

import functools
import os
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from hvt.costs import cost
from hvt.device import find_device
from hvt.errors import HVTError, did_you_mean
from hvt.paper.tables import PaperRow, PaperTable
from hvt.power import search
from hvt.training.engine import resume, train
from hvt.training.interrupt import Interrupted
from hvt.training.recipe import Recipe, read_recipe
from hvt.training.trainer import Result

from . import long, results
from .protocol import BUDGETS, SEEDS, Protocol, Training, plan
from .results import Finished, Known

SPEED = {"cpu": 40e9, "long": 12e9}
"""MACs per second to plan with where nothing has been measured: of two CPU cores, and of one
thread, which is how the long trainings run best."""


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
        return self if self.training.power is None else replace(self, training=self.training.base)


@dataclass(frozen=True)
class Place:
    """Where results and runs are, and what a machine adds to a recipe: root, threads, device …"""

    results: Path
    runs: Path
    recipe: Mapping[str, Any]


def jobs(
    protocol: Protocol,
    chosen: Iterable[PaperTable],
    budgets: Sequence[str] = BUDGETS,
    seeds: Sequence[int] | None = None,
    names: Sequence[str] = (),
    data: str | None = None,
    options: Sequence[str] = (),
) -> list[Job]:
    """The trainings that fill tables, each once; `names` are the rows wanted, all without any."""
    pairs = [(table, row) for table in chosen for row in table.rows]
    known = [row.name for _, row in pairs]
    for name in names:
        if name not in known:
            raise HVTError(f"there is no row {name!r}: {did_you_mean(name, known)}")
    by_name: dict[str, Job] = {}
    for table, row in pairs:
        if names and row.name not in names:
            continue
        usual, variants = _variants(protocol, table, row, budgets, data)
        for seed in usual if seeds is None else seeds:
            for flags, training in variants:
                words = [*flags, "--row", row.name, "--seeds", str(seed), *options]
                command = shlex.join(["python", "-m", "reproduction", "run", *words])
                job = Job(training, seed, (), command)
                job = by_name.get(job.name, job)
                rows = dict.fromkeys((*job.rows, f"{table.name}: {row.name}"))
                by_name[job.name] = replace(job, rows=tuple(rows))
    return list(by_name.values())


def _variants(
    protocol: Protocol, table: PaperTable, row: PaperRow, budgets: Sequence[str], data: str | None
) -> tuple[Sequence[int], list[tuple[list[str], Training]]]:
    """The seeds of a row by default, and its trainings after the flags that ask for them."""
    if isinstance(table, long.Part):
        flags = ["long", "--part", table.name]
        return table.seeds, [(flags, long.training(protocol, table, row))]
    source = protocol.data_of(table, data)
    flags = [table.name, "--protocol", protocol.name, "--budget"]
    variants = [([*flags, budget], plan(protocol, row, budget, source)) for budget in budgets]
    return SEEDS.get(table.name, (0,)), variants


def shard(planned: Sequence[Job], index: int, count: int) -> list[Job]:
    """The part of one machine of several, 1 to count: alike in cost, the same whatever is done.

    What PoWER prunes is trained on the same machine, as it needs the weights.
    """
    macs: dict[str, float] = {}
    for job in planned:
        macs[job.base.name] = macs.get(job.base.name, 0.0) + job.training.training_macs
    loads, owner = [0.0] * count, {}
    for name in sorted(macs, key=lambda unit: (-macs[unit], unit)):  # the largest first
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += macs[name]
    return [job for job in planned if owner[job.base.name] == index - 1]


# ── one job ─────────────────────────────────────────────────────────────────────────────────────


def is_done(job: Job, place: Place) -> bool:
    """Whether its result is there; a damaged one is an error."""
    path = place.results / f"{job.name}.json"
    return path.exists() and results.read(path).name == job.name


def has_begun(job: Job, place: Place) -> bool:
    """Whether there is a run to resume."""
    return (place.runs / job.name / "recipe.json").exists()


def is_main_process() -> bool:
    """Whether this process is rank 0 of those that torchrun started: the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def run_job(job: Job, protocol: Protocol, place: Place, console: Console) -> Finished:
    """Train, or resume, to the end; then write the result."""
    recipe = job.training.recipe.replace(
        seed=job.seed, output=str(place.runs / job.base.name), tensorboard=False
    )
    try:
        last, seconds = _train(recipe, place, console)
        if job.training.power is not None:
            if last.stop_asked:
                raise Interrupted("stopped before PoWER's search")
            last, more = _search_and_retrain(job, last.folder / "model.safetensors", place, console)
            seconds = None if seconds is None or more is None else seconds + more
    except Interrupted as stopped:
        where = str(stopped).partition(";")[0]
        raise Interrupted(f"{job.name}: {where}; the same command resumes from there") from stopped
    finished = _finished(job, protocol, last, seconds)
    if is_main_process():
        results.write(place.results, finished)
    if last.stop_asked:
        raise Interrupted(f"{job.name}: stopped at its end; the same command does the rest")
    return finished


def _train(recipe: Recipe, place: Place, console: Console) -> tuple[Result, float | None]:
    """Train in the recipe's folder, or resume there; the seconds where all of it was now."""
    folder = Path(recipe.output or "")
    if not (folder / "recipe.json").exists():
        result = train(recipe.replace(**place.recipe), console=console)
        return result, result.seconds
    epochs = read_recipe(folder).epochs
    if epochs != recipe.epochs:  # made longer by `hvt train --resume`
        raise HVTError(
            f"{folder} has another training: its epochs is {epochs}, the row's is "
            f"{recipe.epochs}; move it away, or name another folder with --runs"
        )
    return resume(folder, console, **place.recipe), None


def _search_and_retrain(
    job: Job, deit: Path, place: Place, console: Console
) -> tuple[Result, float | None]:
    """PoWER's search from a trained DeiT, then retraining, and the seconds of both.

    A search that was stopped begins anew, as it is short; its result is kept for the training.
    """
    training, folder = job.training, place.runs / job.name
    steps, searched = training.power, folder / "searched.safetensors"
    assert steps is not None
    # The architecture is the checkpoint's from here on.
    recipe = replace(training.recipe, model=None, overrides={}, seed=job.seed, tensorboard=False)
    began = None if searched.exists() else time.perf_counter()
    if began is not None:
        folder.mkdir(parents=True, exist_ok=True)
        looking = recipe.replace(init=str(deit), epochs=steps.search, **place.recipe)
        gflops = steps.share * cost(training.config).gflops
        search(looking, gflops, output=searched, console=console)
    again = recipe.replace(init=str(searched), epochs=steps.retrain, output=str(folder))
    result, _ = _train(again, place, console)
    return result, None if began is None else time.perf_counter() - began


def _finished(job: Job, protocol: Protocol, result: Result, seconds: float | None) -> Finished:
    training, last = job.training, result.rows[-1]
    recipe = {k: v for k, v in training.recipe.to_dict().items() if v is not None}
    return Finished(
        key=training.key,
        seed=job.seed,
        protocol=protocol.name,
        data=training.recipe.data or "",
        command=job.command,
        epochs=training.epochs,
        training_macs=training.training_macs,
        # `result.top1` may be that of averaged weights, and its best is chosen by the test images.
        top1=last["val_top1"],
        top5=last["val_top5"],
        loss=last["val_loss"],
        seconds=seconds,
        images_per_second=training.epochs * training.images / seconds if seconds else None,
        config=result.model.config.to_dict(),
        recipe=recipe | {"seed": job.seed},
        curve=[_point(row) for row in result.rows],
        machine=results.machine(next(result.model.parameters()).device),
        versions=results.versions(),
        date=date.today().isoformat(),
    )


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ("epoch", "train_loss", "val_top1")}


def rate(protocol: Protocol, known: Known, place: Place) -> float | None:
    """MACs per second to expect, by what was measured on such a machine."""
    recipe = next(iter(protocol.recipes.values())).replace(**place.recipe)
    here = results.machine(find_device(recipe.device))
    here["threads"] = recipe.threads or here["threads"]
    alike = [one for each in known.values() for one in each if one.machine == here]
    rates = [one.training_macs / one.seconds for one in alike if one.seconds]
    return statistics.median(rates) if rates else SPEED.get(protocol.name)
