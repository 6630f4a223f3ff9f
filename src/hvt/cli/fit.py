"""`hvt fit`: a classifier of your own images."""

from __future__ import annotations

import argparse
from typing import Any

from ..zoo import DEFAULT
from .flags import add_command, add_flag, add_shared, keywords_of
from .output import emit, new_console, print_json

_EXAMPLES = """\
hvt fit IMAGES                          a folder per class; the result in runs/fit-IMAGES
hvt fit IMAGES --output RUN             RUN/model.safetensors, RUN/report.html
hvt predict RUN/model.safetensors NEW_IMAGES
"""


def register(commands: Any) -> None:
    text = "fit a classifier to your own images, in a minute"
    parser = add_command(commands, "fit", run, text, _EXAMPLES)
    parser.add_argument("data", metavar="IMAGES", help="a folder with one folder per class")
    add_flag(parser, "--output", "where to write (default: runs/fit-IMAGES)", metavar="RUN")
    add_flag(parser, "--init", "the trained model", str, DEFAULT, metavar="CHECKPOINT")
    add_flag(parser, "--size", "image size in pixels", int, ge=16)
    add_flag(parser, "--balance", "weight classes equally, whatever their size", bool)
    text = "share of each class to hold out where there is no val folder"
    add_flag(parser, "--val-fraction", text, float, 0.2)
    add_flag(parser, "--skip-broken", "skip unreadable images and count them", bool)
    add_flag(parser, "--seed", "seed of the split", int, 0, ge=0)
    add_shared(parser, "--device", "--json")


def run(args: argparse.Namespace) -> None:
    """Fit a linear head to the embeddings of images, by a trained model.

    Every image is embedded once. Writes an ordinary checkpoint and a report. IMAGES has one folder
    per class, or train and val with such folders; without val, a fifth of each class is held out.
    """
    from ..fitting.run import fit

    console = new_console(stderr=args.json)
    fitted = fit(**keywords_of(fit, args), console=console)
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
