"""`hvt paper`: the paper's tables, and every cost that they print beside ours."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table as Grid
from rich.text import Text

from ..errors import HVTError
from ..paper.tables import FOOTNOTE, get_table, printed_costs, tables
from .flags import Parser
from .output import new_console

_EXAMPLES = """\
examples:
  hvt paper                       the tables
  hvt paper costs                 every printed cost, and ours
  hvt paper costs main --json
Training their rows: python -m reproduction run TABLE, in a clone of the repository.
"""


def register(commands: Any) -> None:
    """Add the commands of this group."""
    paper = commands.add_parser(
        "paper",
        help="the paper's tables and their costs",
        description="List the paper's tables.",
        epilog=_EXAMPLES,
    )
    paper.add_argument("--json", action="store_true", help="print JSON instead of a table")
    paper.set_defaults(run=run_list, parser=paper)
    subcommands = paper.add_subparsers(metavar="COMMAND", parser_class=Parser)
    parser = subcommands.add_parser(
        "costs",
        help="recompute every printed cost",
        description=(
            "Recompute every FLOPs and parameter count of the tables beside the printed one.\n"
            "The exit code is 0 if all are equal to the printed digit and 1 if not."
        ),
        epilog="examples:\n  hvt paper costs\n  hvt paper costs main resolution --json",
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables (default: all)")
    # Without a default of its own, the flag counts before `costs` too.
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print JSON instead of a table",
    )
    parser.set_defaults(run=run_costs, parser=parser)
    for name in ("run", "report"):  # no part of the package, but where a reader looks first
        parser = subcommands.add_parser(name, help=f"see python -m reproduction {name}")
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.set_defaults(run=run_elsewhere, parser=parser, subcommand=name)


def run_list(args: argparse.Namespace) -> None:
    if args.json:
        rows = [
            {"table": t.name, "place": t.place, "about": t.about, "rows": [r.name for r in t.rows]}
            for t in tables().values()
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    grid = Grid("table", "in the paper", box=None, header_style="bold")
    grid.add_column("rows", justify="right")
    grid.add_column("about", overflow="fold")
    for table in tables().values():
        grid.add_row(table.name, table.place, str(len(table.rows)), table.about)
    new_console().print(grid)


def run_elsewhere(args: argparse.Namespace) -> None:
    raise HVTError(
        "the trainings of the paper's rows are not part of the package: use "
        f"python -m reproduction {args.subcommand} in a clone of the repository"
    )


def run_costs(args: argparse.Namespace) -> int:
    compared = printed_costs([get_table(name) for name in args.tables] or None)
    equal = sum(one.equal for one in compared)
    if args.json:
        rows = [
            {
                "table": one.row.table,
                "row": one.row.name,
                "what": one.what,
                "printed": one.printed,
                "computed": one.computed,
                "equal": one.equal,
            }
            for one in compared
        ]
        print(json.dumps(rows, indent=2))
        return int(equal < len(compared))
    grid = Grid("table", "row", "", box=None, header_style="bold")
    for heading in ("printed", "computed", "exactly"):
        grid.add_column(heading, justify="right", overflow="fold")
    grid.add_column("")
    for one in compared:
        grid.add_row(
            Text(one.row.table, overflow="fold"),
            Text(one.row.name, overflow="fold"),
            one.what,
            f"{one.printed:.2f}",
            f"{one.computed:.2f}",
            f"{one.computed:.4f}",
            "equal" if one.equal else "UNEQUAL",
        )
    console = new_console()
    console.print(grid)
    console.print(f"{equal} of {len(compared)} are equal to the printed digit", highlight=False)
    console.print(FOOTNOTE, highlight=False, soft_wrap=True)
    return int(equal < len(compared))
