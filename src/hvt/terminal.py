"""Text from outside, such as names of files and classes, made harmless for a terminal."""

from __future__ import annotations

import unicodedata

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
