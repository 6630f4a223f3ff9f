"""What a command prints: rows as a table, as JSON or as CSV."""

from __future__ import annotations

import csv as csv_module
import json as json_module
import sys
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from ..terminal import printable

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
"""A column's heading → how its cell is made of a row: by `str.format`, or by a function.

`"{name}"` may wrap, `"{name:<}"` does not, and `"{gflops:.2f}"` is a number: to the right and not
wrapped. A cell is empty where the row has no value or `None`.
"""


def new_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe, as wide as a table needs."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=10_000)


def note(text: str) -> None:
    """Tell on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def emit(
    rows: Iterable[Row],
    columns: Columns,
    *,
    json: bool = False,
    csv: bool = False,
    title: str | None = None,
) -> None:
    """Print rows: all their values as JSON or CSV, or else the columns as a table."""
    if json:
        print_json(list(rows))
    elif csv:
        _print_csv(rows)
    else:
        new_console().print(make_table(rows, columns, title))


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json_module.dumps(value, indent=2))


def make_table(rows: Iterable[Row], columns: Columns, title: str | None = None) -> Table:
    """The table of rows. Text is shown as it is: brackets are not markup."""
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    for heading, form in columns.items():
        spec = _spec(form)
        left = spec is None or spec.startswith("<")
        justify: JustifyMethod = "left" if left else "right"
        table.add_column(heading, justify=justify, no_wrap=spec is not None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(_cell(form, row))) for form in columns.values()))
    return table


def _spec(form: str | Callable[[Row], str]) -> str | None:
    """The format specification of a column, such as `.2f`; None without one."""
    if callable(form):
        return None
    return next((spec for _, _, spec, _ in Formatter().parse(form) if spec), None)


def _cell(form: str | Callable[[Row], str], row: Row) -> str:
    if callable(form):
        return form(row)
    names = [name for _, name, _, _ in Formatter().parse(form) if name]
    return "" if any(row.get(name) is None for name in names) else form.format_map(row)


def _print_csv(rows: Iterable[Row]) -> None:
    """Print each row as soon as it is there, under the keys of the first."""
    writer = csv_module.writer(sys.stdout, lineterminator="\n")
    for number, row in enumerate(rows):
        if not number:
            writer.writerow(row)
        writer.writerow(
            " ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for v in row.values()
        )
