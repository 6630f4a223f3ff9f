"""`hvt predict`: what a checkpoint says of images."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..errors import HVTError
from ..terminal import printable
from .flags import add_batch_and_device, converter
from .output import new_console

if TYPE_CHECKING:
    from ..deploy.predict import Answer


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "predict",
        help="say what is in images",
        description=(
            "The likeliest classes of images: files, folders or globs, by a checkpoint's model\n"
            "or an exported one. Without either it is the built-in model, which knows\n"
            "ImageNet's 1,000 classes; cifar100 is the other one's name."
        ),
        epilog=(
            "examples:\n  hvt predict cat.jpg\n  hvt predict model.safetensors IMAGES --csv\n"
            "  hvt predict model.safetensors 'holiday/*.jpg' --top 1 --json"
        ),
    )
    parser.add_argument(
        "first",
        metavar="MODEL|IMAGE",
        help="a checkpoint, an exported file or a built-in model, if not the default; or an image",
    )
    parser.add_argument("others", nargs="*", metavar="IMAGE", help="what to look at")
    parser.add_argument(
        "--top",
        type=converter("top", int, ge=1),
        default=5,
        metavar="N",
        help="classes to name (default: 5)",
    )
    add_batch_and_device(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.set_defaults(run=run_predict, parser=parser)


def run_predict(args: argparse.Namespace) -> int:
    from ..deploy.inputs import find_images
    from ..deploy.predict import Predictor
    from ..resolve import is_checkpoint

    inputs, checkpoint = [args.first, *args.others], None
    if is_checkpoint(inputs[0]):
        checkpoint = inputs.pop(0)
        if not inputs:
            hint = f" (./{checkpoint} is the folder)" if Path(checkpoint).is_dir() else ""
            raise HVTError(f"no image is given: use hvt predict {checkpoint} IMAGE{hint}")
    elif (swapped := next(filter(is_checkpoint, inputs), None)) is not None:
        first = [word for word in inputs if word != swapped]
        raise HVTError(
            f"{swapped} is a model, and the model comes first: use hvt predict {swapped} "
            f"{' '.join(first)}"
        )
    images = find_images(inputs)
    predictor = Predictor(checkpoint, args.device, args.top, args.batch_size)
    show = _print_json if args.json else _print_csv if args.csv else _print_table
    return 1 if show(predictor.stream(images)) else 0


def _print_json(answers: Iterable[Answer]) -> int:
    """Print answers and count the images without one, as the other two do."""
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
    from ..deploy.runtime import NOT_FINITE

    broken = 0
    table = Table("image", "what it shows", box=None, header_style="bold")
    for answer in answers:
        shows = "  ".join(f"{guess.name} {100 * guess.probability:.0f} %" for guess in answer.top)
        if answer.error is not None:
            broken += 1
            shows = answer.error
            if shows != NOT_FINITE:
                shows = f"cannot be read: {shows}"
        # Text, not str: brackets in a file's name are not markup.
        source = Text(printable(str(answer.source)), overflow="fold")
        table.add_row(source, Text(printable(shows), overflow="fold"))
    new_console().print(table)
    return broken
