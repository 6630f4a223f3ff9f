"""`hvt eval`: the accuracy of a checkpoint."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ..costs import arrow
from ..errors import HVTError
from ..fields import MAX_THREADS
from ..plot import figure_path
from ..terminal import printable
from .flags import add_command, add_flag, add_shared, keywords_of
from .output import Columns, emit, print_json

if TYPE_CHECKING:
    from ..evaluation import Score


_SETTINGS: Columns = {
    "setting": "{setting:<}",
    "image": lambda row: "×".join(map(str, row["image"])),
    "tokens": lambda row: arrow(row["tokens"]),
    "GFLOPs": "{gflops:.3f}",
    "top-1": "{top1:.2f} %",
    "top-5": "{top5:.2f} %",
    "images/s": "{images_per_second:.1f}",
}


def register(commands: Any) -> None:
    parser = add_command(
        commands, "eval", run_eval, "measure the accuracy of a checkpoint",
        "hvt eval runs/digits-hvt_ti_2/best.safetensors --data digits\n"
        "hvt eval model.safetensors --data IMAGES --confusion confusion.png --json\n"
        "hvt eval model.onnx --data IMAGES\n"
        "hvt eval elastic.safetensors --data IMAGES --settings all --plot curve.png\n"
        "hvt eval deit.pth --data imagenet --root IMAGENET --match-by-order",
    )  # fmt: skip
    parser.add_argument(
        "checkpoint",
        help="a checkpoint in any format that hvt.load reads, an ONNX file or a built-in model",
    )
    add_flag(parser, "--data", "digits, cifar100, imagenet or a folder", required=True)
    add_flag(parser, "--download", "download the named dataset", bool)
    add_flag(parser, "--workers", "reading processes", int, 1, ge=0, le=MAX_THREADS)
    add_flag(parser, "--skip-broken", "skip unreadable images", bool)
    text = "draw the misclassified images with the highest loss"
    add_flag(parser, "--worst", text, metavar="PNG")
    add_flag(parser, "--confusion", "draw the confusion matrix", metavar="PNG|SVG")
    add_shared(parser, "--gflops")
    parser.add_argument(
        "--settings", choices=("all",), help="measure each setting of an elastic checkpoint"
    )
    add_shared(parser, "--plot")
    add_shared(parser, "--root", "--batch-size", "--device", "--match-by-order", "--json")


def run_eval(args: argparse.Namespace) -> None:
    """Measure top-1, top-5, loss and images/s of a checkpoint, overall and for each class."""
    from ..deploy.evaluate import evaluate
    from ..see.confusion import draw_confusion

    if args.settings:
        _run_settings(args)
        return
    if args.plot:
        raise HVTError("--plot needs --settings all: add it, or leave --plot out")
    drawing = None if args.confusion is None else figure_path(args.confusion)
    score = evaluate(args.checkpoint, **keywords_of(evaluate, args))
    if os.environ.get("RANK", "0") != "0":  # torchrun's: one process prints
        return
    (_print_json if args.json else _print)(args, score)
    if drawing:  # after the score, which a full disk must not cost
        draw_confusion(drawing, score, score.class_names)


def _run_settings(args: argparse.Namespace) -> None:
    """Accuracy, cost and speed of each setting, and the curve."""
    if args.gflops or args.confusion or args.worst:
        raise HVTError("--settings all excludes --gflops, --confusion and --worst: leave them out")
    drawing = None if args.plot is None else figure_path(args.plot)

    from ..deploy.elastic import draw_curve, evaluate_settings
    from ..deploy.evaluate import evaluate

    keywords = keywords_of(evaluate, args)
    rows = evaluate_settings(args.checkpoint, keywords.pop("data"), **keywords)
    if os.environ.get("RANK", "0") != "0":
        return
    emit(rows, _SETTINGS, json=args.json)
    if drawing:
        draw_curve(drawing, rows)


def _print_json(args: argparse.Namespace, score: Score) -> None:
    assert score.match is not None
    described = {"checkpoint": args.checkpoint, "data": args.data, "matched_by": score.match.by}
    described |= {"validation_part": score.validation_part} | score.to_dict()
    if score.match.by == "order":
        described["matched"] = [{"data": data, "name": name} for data, name in score.match.pairs]
    print_json(described)


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
            "validation split, so a model trained on it has seen most of them"
        )
    if score.skipped:
        print(f"{score.skipped} unreadable images were skipped")
    counted = zip(score.per_class, score.class_names, score.class_images, strict=True)
    ranked = sorted((t, n, c) for t, n, c in counted if t is not None)
    shown = ranked if len(ranked) <= 20 else [*ranked[:5], *ranked[-5:]]
    title = None if shown is ranked else f"the 5 hardest and 5 easiest of {len(ranked)} classes"
    emit(
        ({"top1": top1, "name": name, "images": images} for top1, name, images in shown),
        {"class": "{name}", "top-1": "{top1:.1f} %", "images": "{images:d}"},
        title=title,
    )
