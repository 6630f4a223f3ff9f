"""Which folder near the named one has the class folders, if that one has not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .images import image_extensions

_DEPTH = 3  # levels below the named folder that are looked into


def better_folder(folder: Path) -> str:
    """The end of a sentence: the folder that would do, if there is just one."""
    near = [folder.resolve().parent] if _has_images(folder) else []
    near += [path for path in _below(folder, _DEPTH) if path.name not in ("train", "val")]
    would_do = [path for path in near if _would_do(path)]
    if len(would_do) != 1:
        return ""
    return f"; {would_do[0]} would do"


def _would_do(folder: Path) -> bool:
    """Whether it has two or more class folders, or a train folder that has them."""
    classes = folder / "train" if (folder / "train").is_dir() else folder
    return sum(_has_images(child) for child in _folders(classes)) >= 2


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for child in _folders(folder) if depth else ():
        yield child
        yield from _below(child, depth - 1)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if e.is_dir() and e.name[0] != ".")
    except OSError:
        return []


def _has_images(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            endings = image_extensions()
            return any(Path(e.name).suffix.lower() in endings for e in entries)
    except OSError:
        return False
