"""`hvt upcycle`: a trained ViT in, a cheap one with nearly its outputs out."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import HVTError
from ..upcycling.settings import Settings
from .flags import add_fields, given_fields
from .output import add_output_flags, new_console

_EXAMPLES = """\
examples:
  hvt upcycle deit_tiny.safetensors small.safetensors --gflops 0.7 --data PHOTOS --minutes 30
  hvt upcycle vit_small_patch14_dinov2 dino.safetensors --gflops 12 --data PHOTOS
  hvt upcycle deit.pth small.safetensors --data PHOTOS --epochs 0 \\
      --img-size 192 --pool-after 7 --pool avg --pool-dims 2     fixed by hand, untrained, at once
  hvt upcycle --resume runs/upcycle-deit_tiny                    resume a run
  torchrun --nproc-per-node 2 -m hvt upcycle deit.pth small.safetensors --gflops 0.7 --data PHOTOS
"""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "upcycle",
        help="make a trained ViT cheap",
        description=(
            "Rank smaller images and pooled tokens for a trained plain ViT within a budget, take\n"
            "whatever changes its outputs least, and distil the ViT into that cheaper copy of\n"
            "itself on unlabelled photos. See docs/upcycle.md."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "source",
        nargs="?",
        help="a checkpoint that hvt.load reads, or a name of hvt's or timm's with weights",
    )
    parser.add_argument("output", nargs="?", metavar="OUT.safetensors", help="what to write")
    parser.add_argument("--data", metavar="PHOTOS", help="any folder of images")
    parser.add_argument("--run-folder", metavar="FOLDER", help="the run's folder "
                        "(default: runs/upcycle-SOURCE)")  # fmt: skip
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this folder")
    add_output_flags(parser)
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--pool",
        nargs="?",
        const="any",
        default=argparse.SUPPRESS,
        choices=("any", "max", "avg"),
        help="pool, even where the unpooled source on smaller images ranks higher",
    )
    add_fields(group, Settings, skip=("pool",))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    from ..upcycling.run import resume, upcycle

    values = given_fields(args, Settings)
    console = new_console(stderr=True) if args.json else None
    if args.resume:
        if args.source or args.data or args.run_folder or values:
            raise HVTError("--resume uses the run's own settings: leave the others out")
        done = resume(args.resume, console)
    else:
        if not args.source or not args.output:
            raise HVTError("a source and a file to write are needed: hvt upcycle SOURCE OUT")
        if not args.data:
            raise HVTError("no photos are given: use --data with a folder of images")
        done = upcycle(
            args.source,
            args.output,
            args.data,
            run_folder=args.run_folder,
            console=console,
            **values,
        )
    if args.json and done.rows:
        print((done.folder / "report.json").read_text(), end="")
