"""`hvt paper`: the paper's tables, and every cost that they print beside ours."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import HVTError
from ..paper.tables import FOOTNOTE, get_table, printed_costs, tables
from .flags import Parser
from .output import Columns, add_output_flags, emit

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
    add_output_flags(paper)
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
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,  # so that `hvt paper --json costs` is not overridden
        help="print JSON instead of a table",
    )
    parser.set_defaults(run=run_costs, parser=parser)
    # Not part of the package, but where a reader looks first. No word after them is a flag.
    for name in ("run", "report"):
        parser = subcommands.add_parser(
            name, help=f"see python -m reproduction {name}", prefix_chars="+", add_help=False
        )
        parser.add_argument("rest", nargs="*")
        parser.set_defaults(run=run_elsewhere, parser=parser, subcommand=name)


def run_list(args: argparse.Namespace) -> None:
    rows = [
        {"table": t.name, "place": t.place, "about": t.about, "rows": [row.name for row in t.rows]}
        for t in tables().values()
    ]
    columns: Columns = {
        "table": "{table}",
        "in the paper": "{place:<}",
        "rows": lambda row: str(len(row["rows"])),
        "about": "{about}",
    }
    emit(rows, columns, json=args.json)


def run_costs(args: argparse.Namespace) -> int:
    compared = printed_costs([get_table(name) for name in args.tables] or None)
    equal = sum(one.equal for one in compared)
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
    columns: Columns = {
        "table": "{table}",
        "row": "{row}",
        "": "{what:<}",
        "printed": "{printed:.2f}",
        "computed": "{computed:.2f}",
        "exactly": "{computed:.4f}",
        " ": lambda row: "equal" if row["equal"] else "UNEQUAL",
    }
    emit(rows, columns, json=args.json)
    if not args.json:
        print(f"{equal} of {len(compared)} are equal to the printed digit\n{FOOTNOTE}")
    return int(equal < len(compared))


def run_elsewhere(args: argparse.Namespace) -> None:
    raise HVTError(
        "the trainings of the paper's rows are not part of the package: use "
        f"python -m reproduction {args.subcommand} in a clone of the repository"
    )
