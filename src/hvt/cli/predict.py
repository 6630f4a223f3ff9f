"""`hvt predict`: the classes of images."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HVTError
from .flags import add_command, add_flag, add_shared
from .output import Columns, Row, emit

if TYPE_CHECKING:
    from ..deploy.predict import Prediction


def register(commands: Any) -> None:
    parser = add_command(
        commands, "predict", run_predict, "classify images",
        "hvt predict cat.jpg\nhvt predict model.safetensors IMAGES --csv\n"
        "hvt predict model.safetensors 'holiday/*.jpg' --top 1 --json",
    )  # fmt: skip
    parser.add_argument(
        "first",
        metavar="MODEL|IMAGE",
        help="a checkpoint, an ONNX file or a built-in model, if not the default; or an image",
    )
    parser.add_argument("others", nargs="*", metavar="IMAGE", help="images to classify")
    add_flag(parser, "--top", "classes to show for each image", int, 5, ge=1)
    add_shared(parser, "--batch-size", "--device")
    add_shared(parser.add_mutually_exclusive_group(), "--csv", "--json")


def run_predict(args: argparse.Namespace) -> int:
    """Print the most probable classes of images: files, folders or globs.

    The default is the built-in model for ImageNet's 1,000 classes; cifar100 is the other built-in
    one.
    """
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
    failed: list[str | None] = []

    def predictions() -> Iterator[Prediction]:
        for prediction in predictor.stream(images):
            if prediction.error is not None:
                failed.append(prediction.source)
            yield prediction

    if args.csv:
        emit((row for one in predictions() for row in _csv_rows(one)), {}, csv=True)
    else:
        columns: Columns = {"image": "{source}", "classes": _classes}
        emit((one.to_dict() for one in predictions()), columns, json=args.json)
    return 1 if failed else 0


def _csv_rows(prediction: Prediction) -> Iterator[dict[str, Any]]:
    """A row for each of the top classes, or one with the error."""
    # A path that is not UTF-8 could not be printed as it is.
    source = str(prediction.source).encode(errors="backslashreplace").decode()
    if prediction.error is not None:
        fields = ("rank", "label", "name", "probability")
        yield {"source": source, **dict.fromkeys(fields), "error": prediction.error}
    for rank, score in enumerate(prediction.top, 1):
        row = {"source": source, "rank": rank, "label": score.label, "name": score.name}
        yield row | {"probability": f"{score.probability:.6f}", "error": None}


def _classes(row: Row) -> str:
    """The top classes, or the error, of an image in the table."""
    from ..deploy.runtime import NOT_FINITE

    if row["error"] is not None:
        return row["error"] if row["error"] == NOT_FINITE else f"cannot be read: {row['error']}"
    return "  ".join(f"{one['name']} {100 * one['probability']:.0f} %" for one in row["top"])
