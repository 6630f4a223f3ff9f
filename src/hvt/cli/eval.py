"""`hvt eval`: how good a checkpoint is."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..fields import MAX_THREADS
from ..terminal import printable
from .flags import add_batch_and_device, converter
from .output import new_console

if TYPE_CHECKING:
    from ..evaluation import Score


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint on images",
        description="Top-1, top-5, loss and speed of a checkpoint, per class and as a confusion.",
        epilog=(
            "examples:\n  hvt eval runs/digits-hvt_ti_2/best.safetensors --data digits\n"
            "  hvt eval model.safetensors --data IMAGES --confusion confusion.png --json\n"
            "  hvt eval model.onnx --data IMAGES\n"
            "  hvt eval deit.pth --data imagenet --root IMAGENET --match-by-order"
        ),
    )
    parser.add_argument(
        "checkpoint",
        help="a checkpoint in any form that hvt.load reads, an exported file or a built-in model",
    )
    parser.add_argument("--data", required=True, help="digits, cifar100, imagenet or a folder")
    parser.add_argument("--root", help="folder that has the named data set in it")
    parser.add_argument("--download", action="store_true", help="fetch the named data set")
    parser.add_argument(
        "--workers",
        type=converter("workers", int, ge=0, le=MAX_THREADS),
        default=1,
        metavar="N",
        help="processes that read (default: 1)",
    )
    add_batch_and_device(parser)
    parser.add_argument(
        "--match-by-order",
        action="store_true",
        help="take the data's classes for the model's in their order, not by name",
    )
    parser.add_argument("--skip-broken", action="store_true", help="pass over unreadable images")
    parser.add_argument("--confusion", metavar="PNG", help="draw the confusion of classes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_eval, parser=parser)


def run_eval(args: argparse.Namespace) -> int:
    from ..deploy.evaluate import evaluate
    from ..evaluation import draw_confusion
    from ..plot import png_path

    drawing = None if args.confusion is None else png_path(args.confusion)
    score = evaluate(
        args.checkpoint,
        args.data,
        root=args.root,
        download=args.download,
        match_by_order=args.match_by_order,
        skip_broken=args.skip_broken,
        device=args.device,
        batch_size=args.batch_size,
        workers=args.workers,
    )
    if os.environ.get("RANK", "0") != "0":  # torchrun's: one process prints
        return 0
    if args.json:
        _print_json(args, score)
    else:
        _print(args, score)
    if drawing:  # after the answer, which a full disk is not to cost
        draw_confusion(drawing, score, score.class_names)
    return 0


def _print_json(args: argparse.Namespace, score: Score) -> None:
    assert score.match is not None
    described = {
        "checkpoint": args.checkpoint,
        "data": args.data,
        "matched_by": score.match.by,
        "validation_part": score.validation_part,
        **score.to_dict(),
    }
    if score.match.by == "order":
        described["matched"] = [{"data": data, "name": name} for data, name in score.match.pairs]
    print(json.dumps(described, indent=2))


def _print(args: argparse.Namespace, score: Score) -> None:
    assert score.match is not None
    print(
        f"top-1 {score.top1:.2f} %   top-5 {score.top5:.2f} %   loss {score.loss:.4f}   "
        f"{score.images} images   {score.images_per_second:.0f} images/s on {score.device}"
    )
    print(printable(score.match.describe()))
    if not score.validation_part:
        print(
            f"all {score.images + score.skipped} images: {printable(args.data)} has no "
            "validation part, so a model trained on it has seen most of them"
        )
    if score.skipped:
        print(f"{score.skipped} unreadable images were passed over")
    rows = zip(score.per_class, score.class_names, score.class_images, strict=True)
    ranked = sorted((t, n, c) for t, n, c in rows if t is not None)
    shown = ranked if len(ranked) <= 20 else [*ranked[:5], *ranked[-5:]]
    title = None if shown is ranked else f"the 5 hardest and 5 easiest of {len(ranked)} classes"
    table = Table("class", title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("top-1", justify="right")
    table.add_column("images", justify="right")
    for top1, name, images in shown:
        table.add_row(Text(printable(name), overflow="fold"), f"{top1:.1f} %", str(images))
    new_console().print(table)
