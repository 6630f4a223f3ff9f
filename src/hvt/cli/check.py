"""`hvt check`: whether every image of a data set can be read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.progress import track
from rich.table import Table

from ..terminal import printable
from .flags import converter
from .output import new_console

if TYPE_CHECKING:
    from ..data.check import DuplicateGroup, Report

_SHOWN = 20  # classes and repeated images listed without --json


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "check",
        help="find the broken images of a data set",
        description=(
            "Read every image of a data set and list those that are broken, with the reason.\n"
            "It also lists everything else for which training would raise an error.\n"
            "The exit code is 0 if all is well and 1 if it is not."
        ),
        epilog=(
            "examples:\n  hvt check digits\n  hvt check path/to/images --workers 8\n"
            "  hvt check imagenet --root path/to/imagenet --json"
        ),
    )
    parser.add_argument("data", help="a folder of class folders, or a source such as cifar100")
    parser.add_argument("--root", help="where a named source lies (default: data)")
    parser.add_argument(
        "--workers",
        type=converter("workers", int, ge=1),
        metavar="N",
        help="threads (default: one per core)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a summary")
    parser.set_defaults(run=run_check, parser=parser)


def run_check(args: argparse.Namespace) -> int:
    from ..data.check import check

    screen = new_console(stderr=True)

    def progress(items: Iterable[Any], total: int) -> Iterable[Any]:
        hidden = not screen.is_terminal
        return track(items, "reading", total, console=screen, transient=True, disable=hidden)

    report = check(args.data, args.workers, root=args.root, progress=progress)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    return 0 if report.clean else 1


def _print(report: Report) -> None:
    from ..data.check import TINY

    table = Table("part", box=None, header_style="bold")
    for heading in ("images", "broken", "classes", "smallest class", "median", "largest"):
        table.add_column(heading, justify="right")
    for part, images in report.images.items():
        counts = [c[part] for c in report.classes.values() if c.get(part)]
        spread = (min(counts), median(counts), max(counts)) if counts else ()
        broken = sum(one.part == part for one in report.broken)
        figures = (images, broken, len(counts), *spread)
        table.add_row(part, *(f"{figure:.10g}" for figure in figures))
    new_console().print(table)

    # Paths are printed plainly: a table would wrap them, and brackets would be colours.
    for side, sizes in (("width", report.width), ("height", report.height)):
        if sizes:
            print(f"{side}: {sizes[0]} to {sizes[2]} pixels, median {sizes[1]:g}")
    if report.modes:
        print("modes: " + ", ".join(f"{mode} {count}" for mode, count in report.modes.items()))
    if report.ignored:
        print(f"ignored files, not images: {len(report.ignored)}")
    if report.tiny:
        few = [f"{printable(name)} {count}" for name, count in report.tiny.items()]
        print(f"classes with fewer than {TINY} training images ({len(few)}): {_some(few)}")
    _print_twins("in more than one part", report.shared)
    _print_twins("in more than one class", report.contradicting)
    if not report.broken:
        print("every image can be read")
    if report.problems:
        print(f"training cannot use this ({len(report.problems)}):")
        for problem in report.problems:
            print(printable(f"  {problem}"))
    if not report.broken:
        return
    print(f"cannot be read ({len(report.broken)}):")
    for one in report.broken:
        print(printable(f"  {one.path}: {one.reason}"))


def _print_twins(what: str, twins: list[DuplicateGroup]) -> None:
    if not twins:
        return
    print(f"the same image {what} ({len(twins)}):")
    for one in twins[:_SHOWN]:
        print(printable("  " + " = ".join(one.paths)))
    if len(twins) > _SHOWN:
        print(f"  and {len(twins) - _SHOWN} more (--json lists all)")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
