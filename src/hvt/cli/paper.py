"""`hvt paper`: every table and figure of the paper from one command each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid
from rich.text import Text

from ..errors import HVTError
from ..paper.tables import FOOTNOTE, entries, get_table, tables, trainable
from .console import new_console
from .flags import Parser, converter

if TYPE_CHECKING:
    from rich.console import Console

    from ..paper.protocol import Protocol
    from ..paper.results import Finished
    from ..paper.run import Job, Place
    from ..paper.tables import Table

_RESULTS = "benchmarks/results/paper"
_RUNS = "runs/paper"

_EXAMPLES = """\
examples:
  hvt paper                                     the tables
  hvt paper costs                               every printed cost, and ours
  hvt paper run main --dry-run                  what there is to train, and how long it takes
  hvt paper run main --root DATA                train the rows, fill the table
  hvt paper run all --root DATA --shard 2/4     the second of four machines' part of everything
  hvt paper report                              docs/reproduction.md from the results
"""

_RUN_EXAMPLES = """\
examples:
  hvt paper run pool_type --root DATA
  hvt paper run main --row HVT-Ti-1 --seeds 0,1,2 --budget compute --root DATA
  hvt paper run all --root DATA --shard 1/2
  hvt paper run long --part A --part A10 --root DATA --threads 1 --shard 1/2
  torchrun --nproc-per-node 8 -m hvt paper run main --protocol full --root IMAGENET
"""


def register(commands: Any) -> None:
    """Add the commands of this group."""
    paper = commands.add_parser(
        "paper",
        help="the paper's tables: costs, trainings, report",
        description="List the paper's tables, and how much of each has been trained.",
        epilog=_EXAMPLES,
    )
    _add_protocol(paper)
    paper.add_argument("--json", action="store_true", help="print JSON instead of a table")
    paper.set_defaults(run=run_list, parser=paper)
    whats = paper.add_subparsers(metavar="COMMAND", parser_class=Parser)

    parser = whats.add_parser(
        "costs",
        help="recompute every printed cost",
        description=(
            "Recompute every FLOPs and parameter count of the tables beside the printed one.\n"
            "The exit code is 0 if all are equal to the printed digit and 1 if not."
        ),
        epilog="examples:\n  hvt paper costs\n  hvt paper costs main resolution --json",
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_costs, parser=parser)

    parser = whats.add_parser(
        "run",
        help="train the rows of tables",
        description=(
            "Train the rows of tables and fill in what they reach. Rows that train alike are\n"
            "trained once; what has a result is passed over, what was interrupted goes on."
        ),
        epilog=_RUN_EXAMPLES,
    )
    parser.add_argument(
        "tables",
        nargs="+",
        metavar="TABLE",
        help="names of hvt paper, or all; or long: rows trained until the curve flattens",
    )
    _add_protocol(parser)
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME",
        help="with long: A, A10, B, C or P (default: all of them); may be repeated",
    )
    parser.add_argument(
        "--budget",
        choices=("epochs", "compute", "both"),
        default="both",
        help="what is equal for all rows: epochs, compute or, one after the other, both (default)",
    )
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="only this row")
    parser.add_argument(
        "--seeds",
        type=converter("seeds", tuple[int, ...], least=0),
        metavar="N,N,…",
        help="default: 0,1,2 in main, 0",
    )
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="only the I-th of N parts")
    parser.add_argument("--data", help="the data set, where the protocol has several")
    parser.add_argument("--root", help="folder that has the data set in it")
    parser.add_argument("--download", action="store_true", help="fetch the data set if absent")
    parser.add_argument("--runs", default=_RUNS, metavar="DIR", help=f"default: {_RUNS}")
    parser.add_argument("--device", help="auto, cpu, cuda … (default: the protocol's, auto)")
    parser.add_argument(
        "--threads",
        type=converter("threads", int, least=1),
        metavar="N",
        help="CPU threads of a process",
    )
    parser.add_argument(
        "--workers",
        type=converter("workers", int, least=0),
        metavar="N",
        help="processes that read",
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what there is to do")
    parser.set_defaults(run=run_run, parser=parser)

    parser = whats.add_parser(
        "report",
        help="write the page of tables, claims and figures",
        description=(
            "Write the page with every table, claim and figure from the result files, those of\n"
            "long too. A file TABLE.md in the folder named like the page is added to that table\n"
            "as a comment, and long.md to the part on long."
        ),
        epilog=(
            "examples:\n  hvt paper report\n"
            "  hvt paper report --results mine --results theirs --output page.md"
        ),
    )
    _add_protocol(parser, several=True)
    parser.add_argument("--data", help="the data set, where the protocol has several")
    parser.add_argument(
        "--output",
        default="docs/reproduction.md",
        metavar="FILE",
        help="default: docs/reproduction.md",
    )
    parser.set_defaults(run=run_report, parser=parser)


def _add_protocol(parser: argparse.ArgumentParser, several: bool = False) -> None:
    parser.add_argument(
        "--protocol",
        choices=("cpu", "full"),
        default="cpu",
        help="cpu: 32 pixels, minutes a row; full: the paper's own (default: cpu)",
    )
    parser.add_argument(
        "--protocol-file", metavar="TOML", help="a recipe that stands in for the protocol's"
    )
    more = {"action": "append"} if several else {"default": _RESULTS}
    parser.add_argument(
        "--results",
        metavar="DIR",
        help=f"where results are (default: {_RESULTS})" + ("; may be repeated" if several else ""),
        **more,  # type: ignore[arg-type]
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} must be one part of some, such as 1/4")
    return int(index), int(count)


# ── hvt paper ───────────────────────────────────────────────────────────────────────────────────


def run_list(args: argparse.Namespace) -> None:
    from ..paper import run
    from ..paper.claims import BUDGETS

    protocol, known = _opened(args)
    done = {one.name for results in known.values() for one in results}
    rows: list[dict[str, Any]] = []
    for table in (tables() | trainable()).values():
        jobs = run.jobs(protocol, [table], BUDGETS) if table.trained else []
        rows.append(
            {
                "table": table.name,
                "place": table.place,
                "about": table.about,
                "rows": [row.name for row in table.rows],
                "trainings": len(jobs),
                "done": sum(job.name in done for job in jobs),
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    grid = Grid("table", "in the paper", box=None, header_style="bold")
    for heading in ("rows", "trained"):
        grid.add_column(heading, justify="right")
    grid.add_column("about", overflow="fold")
    for row in rows:
        trained = f"{row['done']} of {row['trainings']}" if row["trainings"] else "costs alone"
        grid.add_row(
            Text(row["table"], overflow="fold"),
            row["place"],
            str(len(row["rows"])),
            trained,
            row["about"],
        )
    new_console().print(grid)


def run_costs(args: argparse.Namespace) -> int:
    chosen = [get_table(name) for name in args.tables] or None
    priced = entries(chosen)
    unequal = [entry for entry in priced if not entry.equal]
    if args.json:
        rows = [
            {
                "table": entry.row.table,
                "row": entry.row.name,
                "what": entry.what,
                "printed": entry.printed,
                "computed": entry.computed,
                "equal": entry.equal,
            }
            for entry in priced
        ]
        print(json.dumps(rows, indent=2))
        return 1 if unequal else 0
    grid = Grid("table", "row", "", box=None, header_style="bold")
    for heading in ("printed", "computed", "exactly"):
        grid.add_column(heading, justify="right", overflow="fold")
    grid.add_column("")
    for entry in priced:
        ours = entry.computed
        grid.add_row(
            Text(entry.row.table, overflow="fold"),
            Text(entry.row.name, overflow="fold"),
            entry.what,
            f"{entry.printed:.2f}",
            "" if ours is None else f"{ours:.2f}",
            "" if ours is None else f"{ours:.4f}",
            "equal" if entry.equal else "no such model" if ours is None else "UNEQUAL",
        )
    console = new_console()
    console.print(grid)
    equal = len(priced) - len(unequal)
    console.print(f"{equal} of {len(priced)} are equal to the printed digit", highlight=False)
    console.print(FOOTNOTE, highlight=False, soft_wrap=True)
    return 1 if unequal else 0


# ── hvt paper run ───────────────────────────────────────────────────────────────────────────────


def run_run(args: argparse.Namespace) -> int:
    from ..paper import long, run
    from ..paper.claims import BUDGETS
    from ..paper.results import read_all

    is_long = "long" in args.tables
    _check_long(args, is_long)
    protocol, known = _opened(args)
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
    place, console = _place(args), new_console()
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
    if "all" in names:
        return list(trainable().values())
    return [get_table(name) for name in dict.fromkeys(names)]


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
    estimate = run.estimate(protocol, jobs, finished)
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


# ── hvt paper report ────────────────────────────────────────────────────────────────────────────


def run_report(args: argparse.Namespace) -> None:
    from ..files import whole_file
    from ..paper import run
    from ..paper.claims import BUDGETS
    from ..paper.figures import draw
    from ..paper.protocol import load_protocol
    from ..paper.report import long_results, render
    from ..paper.results import read_all

    args.results = args.results or [_RESULTS]
    protocol, known = _opened(args)
    long, known_long = None, {}
    if protocol.name == "cpu":  # whose models it trains for longer
        known_long = read_all([Path(folder) / "long" for folder in args.results])
        parts = load_protocol("long", args.protocol_file)
        long = long_results(protocol, known, parts, known_long)
    output = Path(args.output)
    folder = output.with_suffix("")
    text = render(protocol, known, folder, args.data, long)
    with whole_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    written = [output, *draw(folder, protocol, known, args.data, long)]
    print("\n".join(str(path) for path in written))
    planned = run.jobs(protocol, _chosen(["all"]), BUDGETS, data=args.data)
    strangers = sorted(set(known) - {job.training.key for job in planned})
    strangers += sorted(set(known_long) - {row.training.key for row in long.rows} if long else ())
    if strangers:
        print(
            f"hvt: {len(strangers)} trainings belong to no row of this protocol, such as "
            f"{strangers[0]}: they were run under another one",
            file=sys.stderr,
        )


# ── shared ──────────────────────────────────────────────────────────────────────────────────────


def _opened(args: argparse.Namespace) -> tuple[Protocol, dict[str, list[Finished]]]:
    """The protocol, and the results that there are."""
    from ..paper.protocol import load_protocol
    from ..paper.results import read_all

    protocol = load_protocol(args.protocol, args.protocol_file)
    results = [args.results] if isinstance(args.results, str) else args.results
    folders = [Path(folder) / protocol.name for folder in results]
    if isinstance(args.results, list) and args.results != [_RESULTS]:
        for folder in folders:
            if not folder.is_dir():
                raise HVTError(f"{folder} does not exist: name a folder that hvt paper run filled")
    return protocol, read_all(folders)


def _place(args: argparse.Namespace) -> Place:
    from ..paper.run import Place

    flags = {name: getattr(args, name) for name in ("root", "device", "threads", "workers")}
    recipe = {name: value for name, value in flags.items() if value is not None}
    if args.download:
        recipe["download"] = True
    return Place(Path(args.results) / args.protocol, Path(args.runs) / args.protocol, recipe)
