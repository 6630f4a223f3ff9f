"""`hvt export`: a checkpoint as ONNX, as ONNX in int8, or as a `torch.export` program."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import HVTError
from ..zoo import DEFAULT
from .flags import converter
from .output import new_console
from .weights import add_pretrained, check_pretrained, open_weights

if TYPE_CHECKING:
    from ..deploy.export import Comparison

IMAGES = 64  # that the two are compared on; int8 is calibrated on as many others


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "export",
        help="write a model that runs without this package",
        description=(
            "Write a checkpoint as ONNX, as ONNX in int8, or as a torch.export program, and\n"
            "compare the file with the PyTorch model: logits, likeliest class, size and speed.\n"
            "A file that does not agree is not written. hvt predict, hvt eval and hvt bench take\n"
            "the file as they take the checkpoint."
        ),
        epilog=(
            "examples:\n  hvt export imagenet.onnx                  the built-in model\n"
            "  hvt export model.safetensors model.onnx --data IMAGES\n"
            "  hvt export model.safetensors small.onnx --int8 --data cifar100 --root data\n"
            "  hvt export model.safetensors model.pt2 --to torch"
        ),
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="[MODEL] OUT",
        help="what to write: a checkpoint in any form that hvt.load reads, a built-in one or a "
        f"model's name (default: the built-in {DEFAULT}); and the file: OUT.onnx, or OUT.pt2",
    )
    add_pretrained(parser)
    parser.add_argument(
        "--to", choices=("onnx", "torch"), help="the format (default: by the file's ending)"
    )
    parser.add_argument(
        "--int8",
        action="store_true",
        help="weights and activations in 8 bits (ONNX only; needs --data)",
    )
    parser.add_argument(
        "--data",
        help=f"images to compare on, {IMAGES} of the training part: digits, cifar100, "
        "imagenet or a folder; int8 takes as many others to calibrate on",
    )
    parser.add_argument(
        "--max-error",
        type=converter("max_error", float),
        metavar="ERROR",
        help="the relative error of the logits above which an int8 file is not written "
        "(default: 0.1)",
    )
    parser.add_argument("--root", help="folder that has the named data set in it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_export, parser=parser)


def run_export(args: argparse.Namespace) -> None:
    if len(args.words) > 2:
        raise HVTError(f"{args.words[2]!r} is one argument too many: use hvt export MODEL OUT")
    source, name = args.words if len(args.words) == 2 else (DEFAULT, args.words[0])
    out = Path(name)
    form = args.to or ("torch" if out.suffix.lower() == ".pt2" else "onnx")
    if args.int8 and form == "torch":
        raise HVTError("--int8 is for ONNX: leave it out, or name a file that ends in .onnx")
    form = "int8" if args.int8 else form
    if args.max_error is not None and not args.int8:
        raise HVTError("--max-error is for --int8: float32 has a fixed tolerance")
    if args.max_error is not None and not args.max_error > 0:
        raise HVTError(f"--max-error={args.max_error:g} must be above 0, such as 0.1")
    if args.int8 and not args.data:
        raise HVTError("--int8 is calibrated on images: name some with --data")
    check_pretrained(source, args.pretrained)

    from ..bench.exported import compare_speed
    from ..data.evaluation import eval_transform
    from ..data.sample import sample_images
    from ..deploy.export import MAX_ERROR, check_name, export

    max_error = MAX_ERROR if args.max_error is None else args.max_error
    check_name(out, form)
    model = open_weights(source, args.pretrained)
    images = None
    if args.data:
        transform, channels = eval_transform(model), model.config.in_chans
        count = 2 * IMAGES if args.int8 else IMAGES
        images = sample_images(args.data, transform, count, root=args.root, in_chans=channels)
    comparison = export(model, out, form, images, max_error)
    speed = compare_speed(model, out, form)
    if args.json:
        described = {"checkpoint": source, "out": name, **comparison.to_dict(), **speed}
        print(json.dumps(described, indent=2))
        return
    new_console().print(_table(comparison, speed))
    for line in _remarks(comparison):
        print(line)


def _table(comparison: Comparison, speed: dict[str, float]) -> Table:
    table = Table("", box=None, header_style="bold")
    for heading in ("MB", "images/s", "same top-1", "largest difference", "relative error"):
        table.add_column(heading, justify="right")
    table.add_row(
        "PyTorch", f"{comparison.torch_bytes / 1e6:.1f}", f"{speed['torch_images_per_second']:.1f}"
    )
    names = {"onnx": "ONNX", "int8": "ONNX, int8", "torch": "torch.export"}
    table.add_row(
        names[comparison.form],
        f"{comparison.bytes / 1e6:.1f}",
        f"{speed['images_per_second']:.1f}",
        f"{comparison.agreement:.1f} %",
        f"{comparison.difference:.1e}",
        f"{comparison.relative_error:.1e}",
    )
    return table


def _remarks(comparison: Comparison) -> list[str]:
    from ..deploy.export import BATCH

    kind = "real" if comparison.real else "drawn"
    lines = [f"on {comparison.images} {kind} images; speed at batch {BATCH} on the CPU"]
    if not comparison.real:
        lines.append("name real ones with --data: drawn images tell little of the answers")
    if comparison.kept:
        lines.append(f"in float32 for accuracy's sake: {', '.join(comparison.kept)}")
    return lines
