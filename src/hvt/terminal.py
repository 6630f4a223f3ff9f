"""Text from outside, such as names of files and classes, made harmless for a terminal."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Control characters, invisible formatting (writing direction among it), bytes of a path that are
# not UTF-8, and the ends of lines and paragraphs.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji are spelled with them


def printable(text: str) -> str:
    """The text in one line, with what could steer a terminal as an escape such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in _ESCAPED and c not in _JOINERS
        else c
        for c in text
    )


def print_line(console: Console, text: str) -> None:
    """Print text from outside: its brackets are not markup, and it is not wrapped."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
