"""`hvt fit`: a classifier of your own images."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import converter
from .output import add_output_flags, emit, new_console, print_json

_EXAMPLES = """\
examples:
  hvt fit IMAGES                          a folder per class; the result in runs/fit-IMAGES
  hvt fit IMAGES --output RUN             RUN/model.safetensors, RUN/report.html
  hvt predict RUN/model.safetensors NEW_IMAGES
"""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "fit",
        help="fit a classifier to your own images, in a minute",
        description=(
            "Embed every image once with a trained model, fit a linear head to the embeddings and\n"
            "write an ordinary checkpoint and a report. IMAGES has one folder per class, or train\n"
            "and val with such folders; without val, a fifth of each class is held out."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument("data", metavar="IMAGES", help="a folder with one folder per class")
    parser.add_argument("--output", metavar="RUN", help="where to write (default: runs/fit-IMAGES)")
    parser.add_argument(
        "--init", metavar="CHECKPOINT", help="the trained model (default: the built-in imagenet)"
    )
    parser.add_argument(
        "--size", type=converter("size", int, ge=16), metavar="N", help="image size in pixels"
    )
    parser.add_argument(
        "--balance", action="store_true", help="weight classes equally, whatever their size"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.2, metavar="X",
        help="share of each class to hold out where there is no val folder (default: 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--skip-broken", action="store_true", help="skip unreadable images and count them"
    )
    parser.add_argument("--seed", type=converter("seed", int, ge=0), default=0, metavar="N")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    add_output_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    from ..fitting.run import fit
    from ..zoo import DEFAULT

    console = new_console(stderr=args.json)
    fitted = fit(
        args.data,
        args.output,
        init=args.init or DEFAULT,
        size=args.size,
        balance=args.balance,
        val_fraction=args.val_fraction,
        skip_broken=args.skip_broken,
        seed=args.seed,
        device=args.device,
        console=console,
    )
    report = fitted.report
    if args.json:
        print_json(report.to_dict() | {"path": str(fitted.path)})
        return
    emit(report.per_class, {"class": "{name}", "images": "{images:d}", "top-1 %": "{top1:.1f}"})
    low, high = report.interval
    console.print(
        f"top-1 {report.top1:.1f} % ({low:.1f} to {high:.1f}) on {report.val_images} validation "
        f"images, in {report.seconds:.0f} s\n{fitted.path}\n{fitted.folder / 'report.html'}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
