"""`hvt search`: train many models within a budget, and find the most accurate."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from ..config import FIELDS, HVTConfig
from ..planning.space import KEPT, SEARCHED
from ..training.recipe import Recipe, list_recipes
from .flags import add_command, add_fields, add_flag, add_shared, keywords_of

_EXAMPLES = """\
hvt search digits --gflops 0.005 --trials 20 --epochs 9
hvt search cifar100-cpu --root DATA --gflops 0.02 --trials 40 --epochs 1 --threads 1
hvt search cifar100-cpu --root DATA --gflops 0.02 --trials 40 --epochs 1 --threads 1
                                   the same in a second terminal: both share the study
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
    text = "find the most accurate models within a budget"
    parser = add_command(commands, "search", run, text, _EXAMPLES)
    parser.add_argument(
        "recipe",
        help=f"{', '.join(list_recipes())} or a .toml file; its epochs are the longest rung",
    )
    add_flag(parser, "--gflops", "maximum MACs per image in 10⁹", float, required=True)
    add_flag(parser, "--trials", "trials of the study", int, 40, ge=1)
    add_flag(parser, "--heartbeat", "seconds between heartbeats", int, 30, ge=1)
    add_flag(parser, "--promising", "first trials, taken from the best of hvt plan", int, 8, ge=0)
    add_flag(parser, "--rungs", "training lengths; 1 trains every trial to the end", int, 3, ge=1)
    parser.add_argument(
        "--configs", nargs="+", default=(), metavar="FILE",
        help="configs to try first (.json, as from hvt plan --save)",
    )  # fmt: skip
    add_flag(parser, "--study", "the study's name (default: the recipe's)", metavar="NAME")
    text = "Optuna's storage (default: study.db in the output)"
    add_flag(parser, "--storage", text, metavar="URL")
    text = "folder for the results (default: runs/search-STUDY)"
    add_flag(parser, "--output", text, metavar="FOLDER")
    text = "evaluate on this share of the training images (default: the recipe's, or 0.1)"
    add_flag(parser, "--holdout", text, float, argparse.SUPPRESS)
    add_shared(parser, "--allow-changed-data", "--json")
    group = parser.add_argument_group("fields of the recipe (defaults: DeiT's)")
    add_fields(group, Recipe, skip=_NOT_SEARCHES)
    skipped = [name for name in FIELDS if name not in (*SEARCHED, *KEPT) or name == "num_classes"]
    add_fields(parser.add_argument_group("fields to fix"), HVTConfig, skip=skipped)


def run(args: argparse.Namespace) -> int:
    """Search the space of hvt plan with Optuna and real trainings.

    Short ones for all trials, longer ones for the best third (successive halving). Trials are
    evaluated on held-out training images. An existing study is resumed. See docs/search.md.
    """
    from ..searching.run import search
    from ..training.interrupt import Interrupted

    options = keywords_of(Recipe, args) | keywords_of(HVTConfig, args)
    try:
        result = search(quiet=args.json, **options | keywords_of(search, args))
    except (Interrupted, KeyboardInterrupt):  # within a training, or between two
        print("hvt: stopped; the same command resumes the study", file=sys.stderr)
        return 130
    if args.json:
        print((result.folder / "trials.json").read_text(), end="")
        return 0
    command = shlex.join(["hvt", "train", args.recipe, "--model", str(result.folder / "best.json")])
    print(
        f"results in {result.folder}: best {result.top1:.2f} % on held-out images; train it on "
        f"the same data with {command}"
    )
    return 0
