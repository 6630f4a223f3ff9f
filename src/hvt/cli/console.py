"""The console that commands print tables on."""

from __future__ import annotations

from rich.console import Console


def new_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe, as wide as a table needs."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=10_000)
