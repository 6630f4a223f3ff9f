"""`hvt fit`: a classifier of your own images."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..terminal import printable
from ..training.recipe import Recipe, load_recipe
from .flags import add_command, add_fields, add_flag, add_shared, keywords_of
from .output import emit, new_console, print_json

_EXAMPLES = """\
hvt fit IMAGES                          one folder per class; writes runs/fit-IMAGES
hvt fit IMAGES --output RUN             RUN/model.safetensors, RUN/report.html
hvt fit IMAGES --minutes 10             then fine-tune all blocks; the same command resumes
hvt predict RUN/model.safetensors NEW_IMAGES
"""


def register(commands: Any) -> None:
    text = "fit a classifier to your own images, in a minute or ten"
    parser = add_command(commands, "fit", run, text, _EXAMPLES)
    parser.add_argument("data", metavar="IMAGES", help="a folder with one folder per class")
    add_flag(parser, "--size", "image size in pixels", int, ge=16)
    add_shared(parser, "--json")
    group = parser.add_argument_group("fields of the recipe finetune (hvt recipes finetune)")
    add_fields(group, Recipe, skip=("overrides", "data"), shown=load_recipe("finetune"))


def run(args: argparse.Namespace) -> int:
    """Fit a linear head, and the last MLP, to the embeddings of a trained model.

    Every image is embedded once. With --minutes, all blocks are then fine-tuned with the recipe
    finetune. The best model on the validation images is kept. Writes an ordinary checkpoint
    and a report. IMAGES contains one folder per class, or train and val with such folders; without
    val, a fifth of each class is held out.
    """
    fields = keywords_of(Recipe, args)
    if fields.get("processes", 1) != 1 and "WORLD_SIZE" not in os.environ:
        from ..training.launch import launch

        return launch(load_recipe("finetune").replace(**fields), args.argv)
    from ..fitting.run import fit

    console = new_console(stderr=args.json)
    fitted = fit(**fields, size=args.size, console=console)
    if os.environ.get("RANK", "0") != "0":  # torchrun's: one process prints
        return 0
    report = fitted.report
    if args.json:
        print_json(report.to_dict() | {"path": str(fitted.path)})
        return 0
    emit(report.per_class, {"class": "{name}", "images": "{images:d}", "top-1 %": "{top1:.1f}"})
    low, high = report.interval
    print(
        f"top-1 {report.top1:.1f} % ({low:.1f} to {high:.1f}) on {report.val_images} validation "
        f"images, {report.method}, in {report.seconds:.0f} s\n{printable(str(fitted.path))}\n"
        f"{printable(str(fitted.folder / 'report.html'))}"
    )
    return 0
