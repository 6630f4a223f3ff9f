"""`hvt eval` and `hvt predict`: how good a checkpoint is, and what it says of pictures."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import HVTError


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint on pictures",
        description="Top-1, top-5, loss and speed of a checkpoint, per class and as a confusion.",
        epilog=(
            "examples:\n  hvt eval runs/digits-hvt_ti_4/best.safetensors --data digits\n"
            "  hvt eval model.safetensors --data PICTURES --confusion confusion.png --json"
        ),
    )
    parser.add_argument("checkpoint", help="a checkpoint, in any form that hvt.load reads")
    parser.add_argument("--data", required=True, help="digits, cifar100, imagenet or a folder")
    parser.add_argument("--root", help="folder that has the named data set in it")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    parser.add_argument("--skip-broken", action="store_true", help="pass over unreadable pictures")
    parser.add_argument("--confusion", metavar="PNG", help="draw the confusion of classes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_eval, parser=parser)

    parser = commands.add_parser(
        "predict",
        help="say what is in pictures",
        description=(
            "The likeliest classes of pictures: files, folders or globs. The first argument may be "
            "a checkpoint; without one, the built-in model answers, which knows CIFAR-100's classes."
        ),
        epilog=(
            "examples:\n  hvt predict cat.jpg\n  hvt predict model.safetensors PICTURES --csv\n"
            "  hvt predict model.safetensors 'holiday/*.jpg' --top 1 --json"
        ),
    )
    parser.add_argument("inputs", nargs="+", metavar="[CHECKPOINT] PICTURE", help="what to look at")
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="classes to name (default: 5)"
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--device", default=None, help="cpu, cuda … (default: what there is)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.set_defaults(run=run_predict, parser=parser)


def run_eval(args: argparse.Namespace) -> int:
    from ..data.loader import EvalBatches
    from ..data.sources import ArrayPictures, open_eval
    from ..evaluate import draw_confusion, evaluate
    from ..train import distributed
    from ..train.pipeline import SMALL, as_files, eval_transform
    from ..weights import load

    team, device = distributed.join(args.device)
    try:
        model = load(args.checkpoint, device)
        data = open_eval(args.data, root=args.root, in_chans=model.config.in_chans)
        if data.class_names and len(data.class_names) != model.num_classes:
            raise HVTError(
                f"{args.checkpoint} knows {model.num_classes} classes, "
                f"{args.data} has {len(data.class_names)}"
            )
        small = isinstance(data.val, ArrayPictures) and model.config.image[0] <= SMALL
        batches = EvalBatches(
            data.val if small else as_files(data.val),
            eval_transform(model, arrays=small),
            batch_size=args.batch_size,
            rank=team.rank,
            size=team.size,
            workers=args.workers,
            skip_broken=args.skip_broken,
        )
        score = evaluate(model, batches, model.num_classes, device, team)
    finally:
        distributed.leave()
    if not team.leads:
        return 0
    names = data.class_names or model.class_names or tuple(map(str, range(model.num_classes)))
    if args.confusion:
        draw_confusion(Path(args.confusion), score, names)
    if args.json:
        described = {"checkpoint": args.checkpoint, "data": args.data, **score.to_dict()}
        described["per_class"] = dict(zip(names, score.per_class, strict=True))
        print(json.dumps(described, indent=2))
        return 0
    console = Console()
    console.print(
        f"top-1 {score.top1:.2f} %   top-5 {score.top5:.2f} %   loss {score.loss:.4f}   "
        f"{score.pictures} pictures   {score.images_per_second:.0f} images/s on {device}",
        highlight=False,
        soft_wrap=True,
    )
    if score.skipped:
        console.print(f"{score.skipped} unreadable pictures were passed over")
    known = [(t, n) for t, n in zip(score.per_class, names, strict=True) if t is not None]
    ranked = sorted(known, key=lambda pair: pair[0])
    shown = ranked if len(ranked) <= 20 else [*ranked[:5], *ranked[-5:]]
    title = None if shown is ranked else f"the 5 hardest and 5 easiest of {len(ranked)} classes"
    table = Table("class", title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("top-1", justify="right")
    for top1, name in shown:
        table.add_row(name, f"{top1:.1f} %")
    console.print(table)
    return 0


def run_predict(args: argparse.Namespace) -> int:
    from ..predict import Predictor, find_pictures, is_checkpoint

    inputs, checkpoint = list(args.inputs), None
    if is_checkpoint(inputs[0]):
        checkpoint = inputs.pop(0)
        if not inputs:
            raise HVTError(f"no picture is named: use hvt predict {checkpoint} PICTURE")
    pictures = find_pictures(inputs)
    predictor = Predictor(checkpoint, args.device, args.top, args.batch_size)
    answers = predictor.stream(pictures)
    broken = 0
    if args.json:
        listed = list(answers)
        broken = sum(a.error is not None for a in listed)
        print(json.dumps([a.to_dict() for a in listed], indent=2))
    elif args.csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(["source", "rank", "class", "probability", "error"])
        for answer in answers:
            broken += answer.error is not None
            if answer.error:
                writer.writerow([answer.source, "", "", "", answer.error])
            pairs = zip(answer.classes, answer.probabilities, strict=True)
            for rank, (name, probability) in enumerate(pairs, 1):
                writer.writerow([answer.source, rank, name, f"{probability:.4f}", ""])
    else:
        table = Table("picture", "", box=None, header_style="bold")
        for answer in answers:
            broken += answer.error is not None
            pairs = zip(answer.classes, answer.probabilities, strict=True)
            said = "  ".join(f"{name} {100 * p:.0f} %" for name, p in pairs)
            table.add_row(answer.source, answer.error or said)
        Console().print(table)
    return 1 if broken else 0
