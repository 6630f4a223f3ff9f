"""Errors that a user can fix: each message is one sentence that names the thing and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HVTError(ValueError):
    """Invalid input; the command line prints only its message and exits with 2."""


class CheckpointError(HVTError):
    """A checkpoint that cannot be read, is unsafe, or does not fit."""


class UnsafeCheckpointError(CheckpointError):
    """A file that was not opened because its content is not trusted."""


MOST_NAMES = 100
"""Names that an error lists; of more, such as timm's, it lists the nearest."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error that suggests the known names closest to a mistyped one."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(known) > MOST_NAMES:
        return f"the nearest are {', '.join(difflib.get_close_matches(name, known, cutoff=0.0))}"
    return f"known: {', '.join(known)}"


def first_line(error: Exception) -> str:
    """The first line of a library's error, of limited length, to be quoted in one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")[:300]
