"""`hvt upcycle`: make a trained ViT cheaper."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import HVTError
from ..upcycling.settings import Settings
from .flags import add_command, add_fields, add_flag, add_shared, keywords_of
from .output import new_console

_EXAMPLES = """\
hvt upcycle deit_tiny.safetensors small.safetensors --gflops 0.7 --data PHOTOS --minutes 30
hvt upcycle vit_small_patch14_dinov2 dino.safetensors --gflops 12 --data PHOTOS
hvt upcycle deit.pth small.safetensors --data PHOTOS --epochs 0 \\
    --img-size 192 --pool-after 7 --pool avg --pool-dims 2     fixed by hand, untrained, at once
hvt upcycle --resume runs/upcycle-deit_tiny                    resume a run
torchrun --nproc-per-node 2 -m hvt upcycle deit.pth small.safetensors --gflops 0.7 --data PHOTOS
"""


def register(commands: Any) -> None:
    parser = add_command(commands, "upcycle", run, "make a trained ViT cheaper", _EXAMPLES)
    parser.add_argument(
        "source",
        nargs="?",
        help="a checkpoint that hvt.load reads, or the name of an hvt or timm model with weights",
    )
    parser.add_argument("output", nargs="?", metavar="OUT.safetensors", help="file to write")
    add_flag(parser, "--data", "any folder of images", metavar="PHOTOS")
    text = "the run's folder (default: runs/upcycle-SOURCE)"
    add_flag(parser, "--run-folder", text, metavar="FOLDER")
    add_flag(parser, "--resume", "resume the run in this folder", metavar="RUN")
    add_shared(parser, "--json")
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--pool",
        nargs="?",
        const="any",
        default=argparse.SUPPRESS,
        choices=("any", "max", "avg"),
        help="require pooling, even if the unpooled source on smaller images ranks higher",
    )
    add_fields(group, Settings, skip=("pool",))


def run(args: argparse.Namespace) -> None:
    """Make a trained plain ViT cheaper by smaller images or pooling, and distil it.

    Ranks smaller images and pooled tokens within a budget, takes the candidate that changes the
    outputs least, and distils the ViT into it on unlabelled photos. See docs/upcycle.md.
    """
    from ..upcycling.run import resume, upcycle

    values = keywords_of(Settings, args)
    console = new_console(stderr=True) if args.json else None
    if args.resume:
        if args.source or args.data or args.run_folder or values:
            raise HVTError("--resume uses the run's own settings: leave the others out")
        done = resume(args.resume, console)
    else:
        if not args.source or not args.output:
            raise HVTError("name a source and an output: hvt upcycle SOURCE OUT.safetensors")
        if not args.data:
            raise HVTError("name photos with --data: any folder of images")
        done = upcycle(**keywords_of(upcycle, args), console=console, **values)
    if args.json and done.rows:
        print((done.folder / "report.json").read_text(), end="")
