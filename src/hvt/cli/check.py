"""`hvt check`: unreadable images of a dataset."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.progress import track

from ..terminal import printable
from .flags import add_command, add_flag, add_shared
from .output import emit, new_console, print_json

if TYPE_CHECKING:
    from ..data.check import Report

_SHOWN = 20  # classes and repeated images listed without --json


def register(commands: Any) -> None:
    parser = add_command(
        commands, "check", run_check, "find unreadable images in a dataset",
        "hvt check digits\nhvt check path/to/images --workers 8\n"
        "hvt check imagenet --root path/to/imagenet --json",
    )  # fmt: skip
    parser.add_argument("data", help="a folder of class folders, or a source such as cifar100")
    add_flag(parser, "--workers", "threads (default: one per core)", int, ge=1)
    add_shared(parser, "--root", "--json")


def run_check(args: argparse.Namespace) -> int:
    """Read every image of a dataset and list the unreadable ones with the reason.

    It also lists everything else that would stop a training. The exit code is 1 if anything was
    found, otherwise 0.
    """
    from ..data.check import check

    screen = new_console(stderr=True)

    def progress(items: Iterable[Any], total: int) -> Iterable[Any]:
        hidden = not screen.is_terminal
        return track(items, "reading", total, console=screen, transient=True, disable=hidden)

    report = check(args.data, args.workers, root=args.root, progress=progress)
    if args.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return 0 if report.clean else 1


_COLUMNS = {
    "part": "{part}",
    "images": "{images:d}",
    "broken": "{broken:d}",
    "classes": "{classes:d}",
}


def _print(report: Report) -> None:
    from ..data.check import TINY

    emit([_row(report, part) for part in report.images], _COLUMNS)
    # Paths are printed plainly: a table would wrap them.
    if report.ignored:
        print(f"ignored files, not images: {len(report.ignored)}")
    tiny = [f"{name}: {count}" for name, count in report.tiny.items()]
    _print_list(f"classes with fewer than {TINY} training images", tiny, _SHOWN)
    for what, groups in (("part", report.shared), ("class", report.contradicting)):
        paths = [" = ".join(one.path for one in group) for group in groups]
        _print_list(f"the same image in more than one {what}", paths, _SHOWN)
    _print_list("training cannot use this", report.problems)
    if not report.broken:
        print("every image can be read")
    _print_list("cannot be read", [f"{one.path}: {one.reason}" for one in report.broken])


def _row(report: Report, part: str) -> dict[str, Any]:
    broken = sum(one.part == part for one in report.broken)
    classes = sum(counts.get(part, 0) > 0 for counts in report.classes.values())
    return {"part": part, "images": report.images[part], "broken": broken, "classes": classes}


def _print_list(heading: str, lines: list[str], shown: int | None = None) -> None:
    if not lines:
        return
    print(f"{heading} ({len(lines)}):")
    for line in lines[:shown]:
        print(printable(f"  {line}"))
    if shown is not None and len(lines) > shown:
        print(f"  and {len(lines) - shown} more (--json lists all)")
