"""`python -m reproduction run` and `report`: train rows of the paper's tables, fill the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hvt.cli.flags import Parser, converter
from hvt.cli.output import make_table, new_console
from hvt.errors import HVTError
from hvt.files import atomic_write
from hvt.paper.tables import PaperTable
from hvt.training.interrupt import Interrupted
from hvt.training.watch import clock

from . import report, run
from .figures import draw
from .long import PARTS
from .protocol import BUDGETS, Protocol, load_protocol
from .results import FOLDER, read_all
from .rows import get_table, trainable
from .run import Job, Place

_RUNS = "runs/paper"

_EXAMPLES = """\
examples:
  python -m reproduction run main --dry-run       what there is to train, and how long it takes
  python -m reproduction run main --root DATA     train the rows, fill the table
  python -m reproduction run main --row HVT-Ti-1 --seeds 0,1,2 --budget compute --root DATA
  python -m reproduction run long --part A --root DATA --threads 1
  torchrun --nproc-per-node 8 -m reproduction run main --protocol full --root IMAGENET
  python -m reproduction report                   the tables and figures from the results
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one sentence on stderr and exit code 2."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return int(args.run(args))
    except (HVTError, OSError) as error:
        print(f"reproduction: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as stopped:
        words = str(stopped) or "stopped; the same command resumes from there"
        print(f"reproduction: {words}", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(
        prog="python -m reproduction",
        description="Train the rows of the paper's tables and fill the tables.",
        epilog=_EXAMPLES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser, required=True)
    runs = commands.add_parser(
        "run",
        help="train the rows of tables",
        description=(
            "Train the rows of tables and fill in what they reach. Rows that train alike are\n"
            "trained once; what has a result is skipped, what was interrupted resumes."
        ),
    )
    runs.add_argument(
        "tables",
        nargs="+",
        metavar="TABLE",
        help="names of hvt paper, figure4, or all; or long: rows trained for 10 to 300 epochs",
    )
    runs.add_argument("--results", default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    runs.add_argument(
        "--part",
        action="append",
        default=[],
        choices=[*PARTS],
        help="with long (default: all of them); may be repeated",
    )
    runs.add_argument(
        "--budget",
        choices=(*BUDGETS, "both"),
        default="both",
        help="what is equal for all rows: epochs, compute or, one after the other, both (default)",
    )
    runs.add_argument("--row", action="append", default=[], metavar="NAME", help="only this row")
    seeds = converter("seeds", tuple[int, ...], ge=0)
    runs.add_argument("--seeds", type=seeds, metavar="N,N,…", help="default: 0,1,2 in main, 0")
    runs.add_argument("--shard", type=_shard, metavar="I/N", help="only the I-th of N parts")
    runs.add_argument("--root", help="folder that has the dataset in it")
    runs.add_argument("--download", action="store_true", default=None, help="fetch it if absent")
    runs.add_argument("--runs", default=_RUNS, metavar="DIR", help=f"default: {_RUNS}")
    runs.add_argument("--device", help="auto, cpu, cuda … (default: the protocol's, auto)")
    runs.add_argument("--threads", type=int, metavar="N", help="CPU threads of a process")
    runs.add_argument("--workers", type=int, metavar="N", help="processes that read")
    runs.add_argument("--dry-run", action="store_true", help="only tell what there is to do")
    runs.set_defaults(run=run_run, parser=runs)

    page = commands.add_parser(
        "report",
        help="write the tables and figures",
        description="Write the tables and figures from the result files, those of long too.",
    )
    where = f"default: {FOLDER}; may be repeated"
    page.add_argument("--results", action="append", metavar="DIR", help=where)
    file = Path(_RUNS) / "tables.md"
    beside = f"figures go beside it (default: {file})"
    page.add_argument("--output", type=Path, default=file, metavar="FILE", help=beside)
    page.set_defaults(run=run_report, parser=page)
    for each in (runs, page):
        each.add_argument(
            "--protocol",
            choices=("cpu", "full"),
            default="cpu",
            help="cpu: 32 pixels, minutes a row; full: the paper's own (default: cpu)",
        )
        each.add_argument("--protocol-file", metavar="TOML", help="a recipe in place of its own")
        each.add_argument("--data", help="the dataset, where the protocol has several")
    return parser


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} must be one part of some, such as 1/4")
    return int(index), int(count)


# ── run ─────────────────────────────────────────────────────────────────────────────────────────


def run_run(args: argparse.Namespace) -> int:
    protocol, chosen = _chosen(args)
    options = ["--protocol-file", args.protocol_file] if args.protocol_file else []
    options += ["--data", args.data] if args.data else []
    budgets = BUDGETS if args.budget == "both" else (args.budget,)
    jobs = run.jobs(protocol, chosen, budgets, args.seeds, args.row, args.data, options)
    if args.shard:
        jobs = run.shard(jobs, *args.shard)
    flags = {n: getattr(args, n) for n in ("root", "device", "threads", "workers", "download")}
    recipe = {name: value for name, value in flags.items() if value is not None}
    place = Place(Path(args.results) / protocol.name, Path(args.runs) / protocol.name, recipe)
    console = new_console()
    pending = [job for job in jobs if not run.is_done(job, place)]
    if run.is_main_process():
        _announce(jobs, pending, protocol, place, console)
    if args.dry_run:
        return 0
    for number, job in enumerate(pending, 1):
        if run.is_main_process():
            title = f"{number}/{len(pending)} {job.name}: {', '.join(job.rows)}"
            console.print(title, highlight=False, soft_wrap=True)
        run.run_job(job, protocol, place, console)
    if run.is_main_process():
        known = read_all([place.results])
        if protocol.name == "long":
            print(report.long_table(known, protocol))
        else:
            for table in chosen:
                print(report.table_part(protocol, table, known, args.data))
    return 0


def _chosen(args: argparse.Namespace) -> tuple[Protocol, Sequence[PaperTable]]:
    """The protocol, and the tables to fill or the parts of long."""
    if "long" not in args.tables:
        if args.part:
            raise HVTError("--part belongs to long: use run long --part A")
        chosen = [get_table(name) for name in dict.fromkeys(args.tables) if name != "all"]
        chosen = [*trainable().values()] if "all" in args.tables else chosen
        return load_protocol(args.protocol, args.protocol_file), chosen
    if args.tables != ["long"]:
        raise HVTError("long has parts of its own: run the tables by another command")
    for name, default in (("budget", "both"), ("data", None), ("protocol", "cpu")):
        if getattr(args, name) != default:
            raise HVTError(f"--{name} is for tables: the parts of long have their own")
    parts = [PARTS[name] for name in dict.fromkeys(args.part)] or [*PARTS.values()]
    return load_protocol("long", args.protocol_file), parts


def _announce(
    jobs: Sequence[Job], pending: Sequence[Job], protocol: Protocol, place: Place, console: Console
) -> None:
    """What there is to train, what is done, and how long the rest takes."""
    rate = run.rate(protocol, read_all([place.results]), place)
    rows, left, waiting = [], 0.0, {job.name for job in pending}
    for job in jobs:
        macs, state = job.training.training_macs, "done"
        if job.name in waiting:
            state = "begun" if run.has_begun(job, place) else "to do"
            left += macs
        rows.append(
            {
                "key": job.training.key,
                "seed": job.seed,
                "epochs": job.training.epochs,
                "gmacs": macs / 1e9,
                "about": clock(macs / rate) if rate else "?",
                "state": state,
                "rows": ", ".join(job.rows),
            }
        )
    columns = {
        "training": "{key:<}", "seed": "{seed:d}", "epochs": "{epochs:g}", "GMACs": "{gmacs:.0f}",
        "about": "{about:>}", "state": "{state:<}", "rows": "{rows}",
    }  # fmt: skip
    console.print(make_table(rows, columns))
    summary = f"{len(jobs) - len(pending)} of {len(jobs)} trainings are done"
    if pending:
        summary += f"; the rest takes about {clock(left / rate)}" if rate else "; no speed is known"
    console.print(summary, highlight=False)


# ── report ──────────────────────────────────────────────────────────────────────────────────────


def run_report(args: argparse.Namespace) -> int:
    protocol = load_protocol(args.protocol, args.protocol_file)
    folders = [Path(folder) for folder in args.results or [FOLDER]]
    known = read_all([folder / protocol.name for folder in folders])
    # The models of the CPU protocol, trained for longer.
    long_folders = [folder / "long" for folder in folders if protocol.name == "cpu"]
    known_long = read_all(long_folders)
    if not (known or known_long):
        places = " or ".join(str(folder / protocol.name) for folder in folders)
        raise HVTError(
            f"there is no result in {places}: name a folder that run filled with --results"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figures = draw(args.output.parent, protocol, known, args.data)
    with atomic_write(args.output) as temporary:
        text = report.render(protocol, known, args.data, known_long)
        temporary.write_text(text, encoding="utf-8")
    print("\n".join(str(path) for path in [args.output, *figures]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
