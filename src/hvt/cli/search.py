"""`hvt search`: train many models within a budget, and find the most accurate."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ..config import FIELDS, HVTConfig
from ..planning.space import KEPT, SEARCHED
from ..training.recipe import Recipe, list_recipes
from .flags import add_fields, converter, given_fields

_EXAMPLES = """\
examples:
  hvt search digits --gflops 0.005 --trials 20 --epochs 9
  hvt search cifar100-cpu --root DATA --gflops 0.02 --trials 40 --epochs 1 --threads 1
  hvt search cifar100-cpu --root DATA --gflops 0.02 --trials 40 --epochs 1 --threads 1
                                     the same again, beside it: both work on one study
  hvt search cifar100-cpu --root DATA --gflops 0.02 --storage postgresql://me@host/hvt
  hvt search folder --data PHOTOS --gflops 0.7 --configs mine.json --rungs 1
  hvt train cifar100-cpu --root DATA --model runs/search-cifar100-cpu/best.json
"""

_NOT_SEARCHES = (
    "overrides", "init", "pretrained", "teacher", "distill", "distill_alpha", "distill_tau",
    "processes", "eval_every", "checkpoint_minutes", "tensorboard", "output", "holdout",
)  # fmt: skip
"""Fields of a recipe that a search sets itself or does not use, and two with other defaults."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "search",
        help="find the most accurate models within a budget",
        description=(
            "Optuna over the space of hvt plan, with real trainings: short ones for all trials,\n"
            "longer ones for the best third (successive halving). Trials are evaluated on\n"
            "held-out training images. An existing study is resumed. See docs/scaling.md.\n"
            f"Recipes: {', '.join(list_recipes())}, or a .toml file."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument("recipe", help="a recipe's name or file; its epochs are the longest rung")
    parser.add_argument(
        "--gflops",
        type=converter("gflops", float),
        required=True,
        metavar="X",
        help="maximum MACs per image in 10⁹",
    )
    for flag, default, text in (
        ("--trials", 40, "trials of the whole study (default: 40)"),
        ("--heartbeat", 30, "seconds between heartbeats (default: 30)"),
        ("--promising", 8, "first trials with the best scores by hvt plan (default: 8)"),
        ("--rungs", 3, "lengths of training; 1 trains every trial to the end (default: 3)"),
    ):
        kind = converter(flag[2:], int, ge=0 if flag == "--promising" else 1)
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=text)
    parser.add_argument(
        "--configs", nargs="+", default=(), metavar="FILE",
        help="configs to try before all others (.json, as of hvt plan --save)",
    )  # fmt: skip
    parser.add_argument("--study", metavar="NAME", help="the study's name (default: the recipe's)")
    parser.add_argument(
        "--storage", metavar="URL", help="Optuna's storage (default: study.db in the output folder)"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder of the results (default: runs/search-STUDY)"
    )
    parser.add_argument(
        "--holdout",
        type=converter("holdout", float),
        default=argparse.SUPPRESS,
        metavar="X",
        help="evaluate on this share of the training images (default: the recipe's, or 0.1)",
    )
    parser.add_argument(
        "--allow-changed-data",
        action="store_true",
        help="resume a study though its images have changed",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_fields(parser.add_argument_group("fields of the recipe"), Recipe, skip=_NOT_SEARCHES)
    skipped = [name for name in FIELDS if name not in (*SEARCHED, *KEPT) or name == "num_classes"]
    add_fields(parser.add_argument_group("fields to fix"), HVTConfig, skip=skipped)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    values = given_fields(args, Recipe)
    values.pop("output")

    from ..searching.run import search
    from ..training.interrupt import Interrupted

    names = ("trials", "study", "storage", "output", "heartbeat", "promising", "rungs", "configs",
             "allow_changed_data")  # fmt: skip
    options = {name: getattr(args, name) for name in names}
    fixed = given_fields(args, HVTConfig)
    try:
        result = search(args.recipe, args.gflops, quiet=args.json, **options, **values, **fixed)
    except (Interrupted, KeyboardInterrupt):  # within a training, or between two
        print("hvt: stopped; the same command resumes the study", file=sys.stderr)
        return 130
    if args.json:
        print((result.folder / "trials.json").read_text(), end="")
        return 0
    command = _train_command(args.recipe, values, result.folder)
    print(
        f"{result.folder}/report.html: best {result.top1:.2f} % on held-out images; "
        f"train it with {command}"
    )
    return 0


def _train_command(recipe: str, values: dict[str, Any], folder: Path) -> str:
    """The command that trains the best config on the same images."""
    words = ["hvt", "train", recipe]
    for name in ("data", "root", "seed", "val_fraction", "train_fraction"):
        if values.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(values[name])]
    for name in ("download", "skip_broken"):
        words += [f"--{name.replace('_', '-')}"] * bool(values.get(name))
    return shlex.join([*words, "--model", str(folder / "best.json")])
