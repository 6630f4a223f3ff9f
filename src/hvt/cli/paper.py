"""`hvt paper`: the paper's tables, and every cost that they print beside ours."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import HVTError
from ..paper.tables import FOOTNOTE, get_table, printed_costs, tables
from .flags import Parser, add_command, add_shared
from .output import Columns, emit

_EXAMPLES = """\
hvt paper                       the tables
hvt paper costs                 every printed cost, and ours
hvt paper costs main --json
"""


def register(commands: Any) -> None:
    paper = add_command(
        commands, "paper", run_list, "the paper's tables and their costs", _EXAMPLES
    )
    add_shared(paper, "--json")
    subcommands = paper.add_subparsers(metavar="COMMAND", parser_class=Parser)
    parser = add_command(
        subcommands, "costs", run_costs, "recompute every printed cost",
        "hvt paper costs\nhvt paper costs main resolution --json",
    )  # fmt: skip
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables (default: all)")
    add_shared(parser, "--json")
    # Not part of the package, but where a reader looks first. No word after them is a flag.
    for name in ("run", "report"):
        parser = subcommands.add_parser(
            name, help=f"see python -m reproduction {name}", prefix_chars="+", add_help=False
        )
        parser.add_argument("rest", nargs="*")
        parser.set_defaults(run=run_elsewhere, parser=parser, subcommand=name)


def run_list(args: argparse.Namespace) -> None:
    """List the paper's tables.

    To train their rows: python -m reproduction run TABLE, in a clone of the repository.
    """
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
    """Recompute every FLOPs and parameter count of the tables beside the printed one.

    The exit code is 0 if all are equal to the printed digit and 1 if not.
    """
    rows = printed_costs([get_table(name) for name in args.tables or tables()])
    equal = sum(row["equal"] for row in rows)
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
        print(f"{equal} of {len(rows)} are equal to the printed digit\n{FOOTNOTE}")
    return int(equal < len(rows))


def run_elsewhere(args: argparse.Namespace) -> None:
    raise HVTError(
        "the trainings of the paper's rows are not part of the package: use "
        f"python -m reproduction {args.subcommand} in a clone of the repository"
    )
