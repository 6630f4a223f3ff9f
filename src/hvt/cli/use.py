"""`hvt eval` and `hvt predict`: how good a checkpoint is, and what it says of pictures."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import HVTError
from ..terminal import printable

if TYPE_CHECKING:
    from ..deploy.predict import Answer


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint on pictures",
        description="Top-1, top-5, loss and speed of a checkpoint, per class and as a confusion.",
        epilog=(
            "examples:\n  hvt eval runs/digits-hvt_ti_2/best.safetensors --data digits\n"
            "  hvt eval model.safetensors --data PICTURES --confusion confusion.png --json\n"
            "  hvt eval model.onnx --data PICTURES\n"
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
        type=_at_least(0),
        default=1,
        metavar="N",
        help="processes that read (default: 1)",
    )
    _add_device(parser)
    parser.add_argument(
        "--match-by-order",
        action="store_true",
        help="take the data's classes for the model's in their order, not by name",
    )
    parser.add_argument("--skip-broken", action="store_true", help="pass over unreadable pictures")
    parser.add_argument("--confusion", metavar="PNG", help="draw the confusion of classes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_eval, parser=parser)

    parser = commands.add_parser(
        "predict",
        help="say what is in pictures",
        description=(
            "The likeliest classes of pictures: files, folders or globs, by a checkpoint's model\n"
            "or an exported one. Without either it is the built-in model, which knows\n"
            "CIFAR-100's classes."
        ),
        epilog=(
            "examples:\n  hvt predict cat.jpg\n  hvt predict model.safetensors PICTURES --csv\n"
            "  hvt predict model.safetensors 'holiday/*.jpg' --top 1 --json"
        ),
    )
    parser.add_argument(
        "first",
        metavar="MODEL|PICTURE",
        help="a checkpoint, an exported file or a built-in model, if not the default; or a picture",
    )
    parser.add_argument("others", nargs="*", metavar="PICTURE", help="what to look at")
    parser.add_argument(
        "--top", type=_at_least(1), default=5, metavar="N", help="classes to name (default: 5)"
    )
    _add_device(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.set_defaults(run=run_predict, parser=parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute, and how much at once."""
    parser.add_argument(
        "--batch-size",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="pictures at once (default: 64)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            message = f"{text!r} must be a whole number of at least {least}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return convert


def run_eval(args: argparse.Namespace) -> int:
    from ..deploy.evaluate import evaluate
    from ..evaluation import draw_confusion

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
    names, match = score.class_names, score.match
    assert match is not None
    if args.confusion:
        draw_confusion(Path(args.confusion), score, names)
    if args.json:
        described = {
            "checkpoint": args.checkpoint,
            "data": args.data,
            "matched_by": match.by,
            **score.to_dict(),
        }
        if match.by == "order":
            described["matched"] = [{"data": data, "name": name} for data, name in match.pairs]
        print(json.dumps(described, indent=2))
        return 0
    print(
        f"top-1 {score.top1:.2f} %   top-5 {score.top5:.2f} %   loss {score.loss:.4f}   "
        f"{score.pictures} pictures   {score.images_per_second:.0f} images/s on {score.device}"
    )
    print(printable(match.describe()))
    if score.skipped:
        print(f"{score.skipped} unreadable pictures were passed over")
    rows = zip(score.per_class, names, score.class_pictures, strict=True)
    ranked = sorted((t, n, c) for t, n, c in rows if t is not None)
    shown = ranked if len(ranked) <= 20 else [*ranked[:5], *ranked[-5:]]
    title = None if shown is ranked else f"the 5 hardest and 5 easiest of {len(ranked)} classes"
    table = Table("class", title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("top-1", justify="right")
    table.add_column("pictures", justify="right")
    for top1, name, pictures in shown:
        table.add_row(Text(printable(name), overflow="fold"), f"{top1:.1f} %", str(pictures))
    _console().print(table)
    return 0


def run_predict(args: argparse.Namespace) -> int:
    from ..builtin import is_checkpoint
    from ..deploy.inputs import find_pictures
    from ..deploy.predict import Predictor

    inputs, checkpoint = [args.first, *args.others], None
    if is_checkpoint(inputs[0]):
        checkpoint = inputs.pop(0)
        if not inputs:
            hint = f" (./{checkpoint} is the folder)" if Path(checkpoint).is_dir() else ""
            raise HVTError(f"no picture is named: use hvt predict {checkpoint} PICTURE{hint}")
    elif (swapped := next(filter(is_checkpoint, inputs), None)) is not None:
        first = [word for word in inputs if word != swapped]
        raise HVTError(
            f"{swapped} is a model, and the model comes first: use hvt predict {swapped} "
            f"{' '.join(first)}"
        )
    pictures = find_pictures(inputs)
    predictor = Predictor(checkpoint, args.device, args.top, args.batch_size)
    show = _print_json if args.json else _print_csv if args.csv else _print_table
    return 1 if show(predictor.stream(pictures)) else 0


def _print_json(answers: Iterable[Answer]) -> int:
    """Print answers and count the broken pictures, as the other two do."""
    listed = list(answers)
    print(json.dumps([answer.to_dict() for answer in listed], indent=2))
    return sum(answer.error is not None for answer in listed)


def _print_csv(answers: Iterable[Answer]) -> int:
    broken = 0
    print("source,rank,label,name,probability,error")
    for answer in answers:
        # A path that is not UTF-8 could not be printed as it is.
        source = str(answer.source).encode(errors="backslashreplace").decode()
        if answer.error is not None:
            broken += 1
            print(_csv_line(source, "", "", "", "", answer.error))
        for rank, guess in enumerate(answer.top, 1):
            probability = f"{guess.probability:.6f}"
            print(_csv_line(source, rank, guess.label, guess.name, probability, ""))
    return broken


def _csv_line(*fields: object) -> str:
    """One line without its end; a writer whose lines end in \\n alone leaves \\r unquoted."""
    buffer = io.StringIO()
    csv.writer(buffer).writerow(fields)
    return buffer.getvalue().removesuffix("\r\n")


def _print_table(answers: Iterable[Answer]) -> int:
    broken = 0
    table = Table("picture", "what it shows", box=None, header_style="bold")
    for answer in answers:
        said = "  ".join(f"{guess.name} {100 * guess.probability:.0f} %" for guess in answer.top)
        if answer.error is not None:
            broken += 1
            said = f"cannot be read: {answer.error}"
        # Text, not str: brackets in a file's name are no colours.
        source = Text(printable(str(answer.source)), overflow="fold")
        table.add_row(source, Text(printable(said), overflow="fold"))
    _console().print(table)
    return broken


def _console() -> Console:
    """A table in a file or a pipe is as wide as it needs to be."""
    console = Console()
    return console if console.is_terminal else Console(width=10_000)
