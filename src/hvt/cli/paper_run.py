"""`hvt paper run`: what there is to train, the trainings, and the tables that they fill."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text

from ..errors import HVTError
from ..paper.tables import get_table, trainable
from .output import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..paper.protocol import Protocol
    from ..paper.results import Finished
    from ..paper.run import Job, Place
    from ..paper.tables import Table


LISTED = "listed_"
"""Before the names of flags that stand before a command, where they are those of `hvt paper`."""


def check_order(args: argparse.Namespace) -> None:
    """Refuse flags of `hvt paper` before a command, which has its own of the same names."""
    for name in ("protocol", "protocol_file", "results", "json"):
        if getattr(args, LISTED + name):
            raise HVTError(
                f"--{name.replace('_', '-')} stands before the command: put it behind, as in "
                "hvt paper report --results DIR"
            )


def run_run(args: argparse.Namespace) -> int:
    from ..paper import long, run
    from ..paper.claims import BUDGETS
    from ..paper.protocol import load_protocol
    from ..paper.results import read_all

    check_order(args)
    is_long = "long" in args.tables
    _check_long(args, is_long)
    protocol = load_protocol(args.protocol, args.protocol_file)
    place, console = _place(args), new_console()
    known = read_all([place.results])
    options = ["--protocol-file", args.protocol_file] if args.protocol_file else []
    options += ["--data", args.data] if args.data else []
    seeds = None if args.seeds is None else tuple(dict.fromkeys(args.seeds))
    if is_long:
        parts = [long.get_part(name) for name in dict.fromkeys(args.part)] or [*long.PARTS.values()]
        jobs = long.jobs(protocol, parts, seeds, args.row, options)
    else:
        chosen = _chosen(args.tables)
        budgets = BUDGETS if args.budget == "both" else (args.budget,)
        jobs = run.jobs(protocol, chosen, budgets, seeds, args.row, args.data, options)
    if args.shard:
        jobs = run.shard(jobs, *args.shard)
    pending = [job for job in jobs if not run.is_done(job, place)]
    if run.is_main_process():
        _announce(jobs, pending, protocol, place, known, console)
    if args.dry_run:
        return 0
    try:
        for number, job in enumerate(pending, 1):
            if run.is_main_process():
                title = f"{number}/{len(pending)} {job.name}: {', '.join(job.rows)}"
                console.print(title, highlight=False, soft_wrap=True)
            if run.is_alone() and run.is_done(job, place):
                console.print("done meanwhile by another command", highlight=False)
                continue
            run.run_job(job, protocol, place, console)
    except KeyboardInterrupt:  # outside of the training's own care, so nothing is half written
        print("hvt: stopped; the same command resumes from there", file=sys.stderr)
        return 130
    if run.is_main_process() and not is_long:
        _show(chosen, protocol, read_all([place.results]), args.data, console)
    return 0


def _check_long(args: argparse.Namespace, is_long: bool) -> None:
    """The long protocol has parts in place of tables, one data set and one budget."""
    if not is_long:
        if args.part:
            raise HVTError("--part belongs to the long protocol: use hvt paper run long --part A")
        return
    if args.tables != ["long"]:
        raise HVTError("long has parts of its own: run the tables by another command")
    for name, default in (("budget", "both"), ("data", None), ("protocol", "cpu")):
        if getattr(args, name) != default:
            raise HVTError(f"--{name} is for tables: the parts of long have their own")
    args.protocol = "long"


def _chosen(names: Sequence[str]) -> list[Table]:
    chosen = [get_table(name) for name in dict.fromkeys(names) if name != "all"]
    return list(trainable().values()) if "all" in names else chosen


def _announce(
    jobs: Sequence[Job],
    pending: Sequence[Job],
    protocol: Protocol,
    place: Place,
    known: dict[str, list[Finished]],
    console: Console,
) -> None:
    """What there is to train, what is done, and how long the rest takes."""
    from ..paper import run
    from ..training.watch import clock

    finished = [one for results in known.values() for one in results]
    estimate = run.estimate(protocol, pending, finished, place)
    grid = Grid("training", box=None, header_style="bold")
    for heading in ("seed", "epochs", "G multiply-adds", "about"):
        grid.add_column(heading, justify="right")
    grid.add_column("state")
    grid.add_column("rows", overflow="fold")
    left, waiting = 0.0, {job.name for job in pending}
    for job in jobs:
        seconds = estimate(job)
        state = "done"
        if job.name in waiting:
            state = "begun" if run.has_begun(job, place) else "to do"
            left += seconds or 0.0
        grid.add_row(
            Text(job.training.key, overflow="fold"),
            str(job.seed),
            f"{job.training.epochs:g}",
            f"{job.training.training_macs / 1e9:.0f}",
            "?" if seconds is None else clock(seconds),
            state,
            Text(", ".join(job.rows)),
        )
    console.print(grid)
    summary = f"{len(jobs) - len(pending)} of {len(jobs)} trainings are done"
    if pending:
        known_speed = estimate(pending[0]) is not None
        summary += f"; the rest takes about {clock(left)}" if known_speed else "; no speed is known"
    console.print(summary, highlight=False)


def _show(
    chosen: Sequence[Table],
    protocol: Protocol,
    known: dict[str, list[Finished]],
    data: str | None,
    console: Console,
) -> None:
    """The tables with what has been measured so far."""
    from ..paper.filled import cells, fill

    for table in chosen:
        headings, rows = cells(fill(protocol, table, known, data))
        grid = Grid(title=f"{table.name}: {table.about}", box=None, header_style="bold")
        for index, heading in enumerate(headings):
            grid.add_column(heading, justify="right" if index else "left")
        for row in rows:
            grid.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(grid)


def _place(args: argparse.Namespace) -> Place:
    from ..paper.run import Place

    flags = {name: getattr(args, name) for name in ("root", "device", "threads", "workers")}
    recipe = {name: value for name, value in flags.items() if value is not None}
    if args.download:
        recipe["download"] = True
    return Place(Path(args.results) / args.protocol, Path(args.runs) / args.protocol, recipe)
