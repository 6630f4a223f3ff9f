"""`hvt predict` and `hvt embed`: the classes of images, and their features."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HVTError
from ..zoo import DEFAULT
from .flags import Parser, add_command, add_flag, add_shared
from .output import Columns, Row, emit, note

if TYPE_CHECKING:
    from ..deploy.predict import Prediction
    from ..model import HVT


_EMBED_EXAMPLES = """\
hvt embed IMAGES features.npz           names and features, for search, clustering, duplicates
hvt embed model.onnx 'photos/*.jpg' features.csv
hvt embed --list files.txt PARTS        a folder of parts; a restart skips existing ones
torchrun --nproc-per-node 2 -m hvt embed 'shards/*.tar' PARTS --format parquet
"""


def register(commands: Any) -> None:
    parser = add_command(
        commands, "predict", run_predict, "classify images",
        "hvt predict cat.jpg\nhvt predict model.safetensors IMAGES --csv\n"
        "hvt predict model.safetensors 'holiday/*.jpg' --top 1 --json",
    )  # fmt: skip
    parser.add_argument("others", nargs="*", metavar="[MODEL] IMAGE…",
                        help="images to classify, optionally after a checkpoint, an ONNX file or "
                        "a built-in model")  # fmt: skip
    add_flag(parser, "--output", "a .csv, .jsonl or .parquet file, or a folder for parts")
    _add_parts(parser, "csv")
    add_flag(parser, "--top", "classes to show per image", int, 5, ge=1)
    budget = parser.add_mutually_exclusive_group()
    add_shared(budget, "--gflops")
    text = "for an elastic checkpoint: the largest setting within so many ms per image"
    add_flag(budget, "--ms", text, float, gt=0)
    add_shared(parser, "--batch-size", "--device")
    add_shared(parser.add_mutually_exclusive_group(), "--csv", "--json")
    parser = add_command(
        commands, "embed", run_embed, "write one feature vector per image", _EMBED_EXAMPLES
    )
    parser.add_argument("others", nargs="*", metavar="[MODEL] IMAGE… OUTPUT",
                        help="images, folders, globs or tar files; then a .npz, .npy, .csv or "
                        ".parquet file, or a folder for parts")  # fmt: skip
    _add_parts(parser, "npz")
    add_shared(parser, "--batch-size", "--device")


def _add_parts(parser: Parser, default: str) -> None:
    """The flags of many images and of results in files."""
    add_flag(parser, "--list", "a file with a path per line; - for stdin", metavar="FILE")
    add_flag(parser, "--format", "format of the parts in a folder", str, default)
    add_flag(parser, "--part-size", "images per part", int, 10_000, ge=1)


def run_predict(args: argparse.Namespace) -> int:
    """Print the top classes of images: files, folders or globs.

    The default is the built-in ImageNet model; cifar100 is the other built-in model.
    """
    from ..deploy.parts import many_images
    from ..deploy.predict import Predictor

    checkpoint, inputs = _split_model("predict", args.others, args.list)
    images: Iterable[Any] = many_images(inputs, args.list)
    model: str | HVT | None = checkpoint
    if args.ms is not None:
        from ..deploy.elastic import within_ms

        name, model, took = within_ms(checkpoint or DEFAULT, args.ms, args.device)
        note(f"setting {name}: {took:.1f} ms per image")
    predictor = Predictor(model, args.device, args.top, args.batch_size, gflops=args.gflops)
    if args.output:
        key = f"{predictor.digest} {args.top}"
        formats = ("csv", "jsonl", "parquet")
        return _write(args, args.output, images, predictor, _csv_rows, key, formats)
    failed: list[str] = []
    predictions = _noting(predictor.stream(images), failed)
    if args.csv:
        emit((row for one in predictions for row in _csv_rows(one)), {}, csv=True)
    else:
        columns: Columns = {"image": "{source}", "classes": _classes}
        emit((one.to_dict() for one in predictions), columns, json=args.json)
    return 1 if failed else 0


def run_embed(args: argparse.Namespace) -> int:
    """Write the features before the classifier, one vector per image, with the image names.

    A folder as OUTPUT gets parts, so that memory does not grow with the number of images, and a
    restart skips existing parts; under torchrun or Slurm each process writes its own.
    The default model is the built-in one.
    """
    from ..deploy.embed import Embedder, Embedding
    from ..deploy.parts import many_images

    if len(args.others) < (1 if args.list else 2):
        raise HVTError("name images and an output: hvt embed IMAGES features.npz")
    *words, output = args.others
    checkpoint, inputs = _split_model("embed", words, args.list)
    embedder = Embedder(checkpoint, args.device, args.batch_size)

    def rows(one: Embedding) -> list[dict[str, Any]]:
        row = {"source": one.source, "embedding": one.vector}
        return [] if one.vector is None else [row]

    images = many_images(inputs, args.list)
    formats = ("npz", "npy", "csv", "parquet")
    return _write(args, output, images, embedder, rows, embedder.digest, formats)


def _noting(results: Iterable[Any], failed: list[str]) -> Iterator[Any]:
    """The results, those with an error also noted."""
    for one in results:
        if one.error is not None:
            failed.append(f"{one.source}: {one.error}")
        yield one


def _write(
    args: argparse.Namespace,
    output: str,
    images: Iterable[Any],
    model: Any,
    rows: Callable[[Any], Iterable[dict[str, Any]]],
    key: str,
    formats: tuple[str, ...],
) -> int:
    """Write the rows of results, with a progress bar on a terminal, and say what failed."""
    from rich.console import Console
    from rich.progress import Progress

    from ..deploy.parts import write_results

    failed: list[str] = []

    def rows_of(images: Iterable[Any]) -> Iterator[dict[str, Any]]:
        return (row for one in _noting(model.stream(images), failed) for row in rows(one))

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        shown = bar.track(images, description="images")
        total = write_results(
            Path(output), shown, rows_of, key,
            formats=formats, part_format=args.format, part_size=args.part_size,
        )  # fmt: skip
    for line in failed[:10]:
        note(f"cannot be read: {line}")
    note(f"{output}: {total:,} images" + (f", {len(failed):,} unreadable" if failed else ""))
    return 1 if failed else 0


def _split_model(
    command: str, words: list[str], listed: str | None
) -> tuple[str | None, list[str]]:
    """The model, if the first word is one, and the images."""
    from ..resolve import is_checkpoint

    checkpoint, inputs = (
        (words[0], words[1:]) if words and is_checkpoint(words[0]) else (None, words)
    )
    if not inputs and listed is None:
        hint = f" (./{checkpoint} is the folder)" if Path(str(checkpoint)).is_dir() else ""
        raise HVTError(f"no image is given: use hvt {command} [MODEL] IMAGE{hint}")
    if (swapped := next(filter(is_checkpoint, inputs), None)) is not None:
        first = [word for word in words if word != swapped]
        raise HVTError(
            f"{swapped} is a model, and the model comes first: use hvt {command} {swapped} "
            f"{' '.join(first)}"
        )
    return checkpoint, inputs


def _csv_rows(prediction: Prediction) -> Iterator[dict[str, Any]]:
    """A row for each of the top classes, or one with the error."""
    # A path that is not UTF-8 could not be printed as it is.
    source = str(prediction.source).encode(errors="backslashreplace").decode()
    if prediction.error is not None:
        fields = ("rank", "label", "name", "probability")
        yield {"source": source, **dict.fromkeys(fields), "error": prediction.error}
    for rank, score in enumerate(prediction.top, 1):
        row = {"source": source, "rank": rank, "label": score.label, "name": score.name}
        yield row | {"probability": round(score.probability, 6), "error": None}


def _classes(row: Row) -> str:
    """The top classes, or the error, of an image in the table."""
    from ..deploy.runtime import NOT_FINITE

    if row["error"] is not None:
        return row["error"] if row["error"] == NOT_FINITE else f"cannot be read: {row['error']}"
    return "  ".join(f"{one['name']} {100 * one['probability']:.0f} %" for one in row["top"])
