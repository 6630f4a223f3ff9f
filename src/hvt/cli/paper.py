"""`hvt paper`: every table and figure of the paper from one command each."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid
from rich.text import Text

from ..errors import HVTError
from ..fields import MAX_THREADS
from ..paper.tables import FOOTNOTE, entries, get_table, tables, trainable
from .flags import Parser, converter
from .output import new_console
from .paper_run import LISTED, check_order, run_run

if TYPE_CHECKING:
    from ..paper.protocol import Protocol
    from ..paper.results import Finished

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
    _add_protocol(paper, LISTED, default=None)
    paper.add_argument(
        "--json",
        dest=f"{LISTED}json",
        action="store_true",
        help="print JSON instead of a table",
    )
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
        help="names of hvt paper, or all; or long: rows trained for 10 to 300 epochs",
    )
    _add_protocol(parser, default=_RESULTS)
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
        type=converter("seeds", tuple[int, ...], ge=0),
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
        type=converter("threads", int, ge=1, le=MAX_THREADS),
        metavar="N",
        help="CPU threads of a process",
    )
    parser.add_argument(
        "--workers",
        type=converter("workers", int, ge=0),
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
    _add_protocol(parser, action="append")
    parser.add_argument("--data", help="the data set, where the protocol has several")
    parser.add_argument(
        "--output",
        default="docs/reproduction.md",
        metavar="FILE",
        help="default: docs/reproduction.md",
    )
    parser.set_defaults(run=run_report, parser=parser)


def _add_protocol(parser: argparse.ArgumentParser, before: str = "", **results: Any) -> None:
    """Which protocol, and where its results are; `results` is argparse's, of that flag."""
    parser.add_argument(
        "--protocol",
        dest=f"{before}protocol",
        choices=("cpu", "full"),
        default=None if before else "cpu",
        help="cpu: 32 pixels, minutes a row; full: the paper's own (default: cpu)",
    )
    parser.add_argument(
        "--protocol-file",
        dest=f"{before}protocol_file",
        metavar="TOML",
        help="a recipe that stands in for the protocol's",
    )
    more = "; may be repeated" if "action" in results else ""
    words = f"where results are (default: {_RESULTS}){more}"
    parser.add_argument("--results", dest=f"{before}results", metavar="DIR", help=words, **results)


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} must be one part of some, such as 1/4")
    return int(index), int(count)


# ── hvt paper ───────────────────────────────────────────────────────────────────────────────────


def run_list(args: argparse.Namespace) -> None:
    from ..paper import run
    from ..paper.claims import BUDGETS

    named = args.listed_results and [args.listed_results]
    protocol, known = _opened(args.listed_protocol or "cpu", args.listed_protocol_file, named)
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
    if args.listed_json:
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
    check_order(args)
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


# ── hvt paper report ────────────────────────────────────────────────────────────────────────────


def run_report(args: argparse.Namespace) -> None:
    from ..files import atomic_write
    from ..paper import run
    from ..paper.claims import BUDGETS
    from ..paper.figures import draw
    from ..paper.protocol import load_protocol
    from ..paper.report import long_results, render
    from ..paper.results import read_all

    check_order(args)
    protocol, known = _opened(args.protocol, args.protocol_file, args.results)
    folders = [Path(folder) for folder in args.results or [_RESULTS]]
    long, known_long = None, {}
    if protocol.name == "cpu":  # whose models it trains for longer
        known_long = read_all([folder / "long" for folder in folders])
        # Beside the short trainings of its own models, whatever recipe stands in for them here.
        long = long_results(load_protocol("cpu"), known, load_protocol("long"), known_long)
    if not (known or known_long):
        places = " or ".join(str(one / n) for one in folders for n in _parts(protocol.name))
        raise HVTError(
            f"there is no result in {places}: name the folder that hvt paper run filled with "
            "--results"
        )
    output = Path(args.output)
    if not output.suffix:
        raise HVTError(f"{output} should end in .md: its figures go into a folder of that name")
    folder = output.with_suffix("")
    text = render(protocol, known, folder, args.data, long)
    figures = draw(folder, protocol, known, args.data, long)
    with atomic_write(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    written = [output, *figures]
    print("\n".join(str(path) for path in written))
    planned = run.jobs(protocol, trainable().values(), BUDGETS, data=args.data)
    strangers = sorted(set(known) - {job.training.key for job in planned})
    strangers += sorted(set(known_long) - {row.training.key for row in long.rows} if long else ())
    if strangers:
        print(
            f"hvt: {len(strangers)} trainings belong to no row of this protocol, such as "
            f"{strangers[0]}: they were run under another one",
            file=sys.stderr,
        )


# ── shared ──────────────────────────────────────────────────────────────────────────────────────


def _opened(
    name: str, file: str | None, named: list[str] | None
) -> tuple[Protocol, dict[str, list[Finished]]]:
    """The protocol, and its results in the folders that were named, or else in the usual one."""
    from ..paper.protocol import load_protocol
    from ..paper.results import read_all

    protocol = load_protocol(name, file)
    for folder in named or ():
        if not any((Path(folder) / part).is_dir() for part in _parts(protocol.name)):
            raise HVTError(
                f"{Path(folder) / protocol.name} does not exist: name a folder that hvt paper run "
                "filled"
            )
    return protocol, read_all([Path(one) / protocol.name for one in named or [_RESULTS]])


def _parts(protocol: str) -> tuple[str, ...]:
    """Where a folder has the results of a page: the CPU protocol's has those of `long` too."""
    return ("cpu", "long") if protocol == "cpu" else (protocol,)
