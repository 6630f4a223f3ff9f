"""Tables of measured figures within a page: made anew between two marks, or only checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def fill(text: str, mark: str, content: str) -> str:
    """A page's text with what stands between `<!-- mark:begin -->` and `:end` replaced."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise SystemExit(f"the page must have the lines {begin} and {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def write(page: Path, text: str, check: bool, command: str) -> int:
    """Write a page, or say how to where it is not current; an exit code."""
    current = page.read_text(encoding="utf-8") == text
    if check and not current:
        print(f"{page.name} is stale: run {command}", file=sys.stderr)
        return 1
    if not current:
        page.write_text(text, encoding="utf-8")
    return 0


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """Markdown: the first column and those headed by `texts` to the left, numbers to the right."""
    rule = ["---" if h in (headings[0], *texts) else "--:" for h in headings]
    lines = [headings, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
