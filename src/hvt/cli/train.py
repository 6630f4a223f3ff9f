"""`hvt train`: a recipe, any field of it by a flag, and resumed runs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..config import HVTConfig
from ..training.recipe import Recipe, list_recipes, load_recipe, recipe_text
from ..training.run import check_arguments, train
from .flags import add_command, add_fields, add_flag, add_shared, keywords_of
from .output import emit, print_json

_EXAMPLES = """\
hvt train digits                                       one minute on two cores
hvt train cifar100-cpu --root DATA --download          real images, seven minutes on two cores
hvt train cifar100 --model hvt_s_4 --root DATA         the paper's recipe, on a GPU
hvt train finetune --init best.safetensors --data IMAGES
hvt train folder --data IMAGES                         your own images, from scratch
hvt train cifar100-cpu --model plan.json --root DATA   what hvt plan --save plan.json chose
hvt train --resume runs/digits-hvt_ti_2                resume a run
hvt train --resume runs/digits-hvt_ti_2 --epochs 80    make it longer
hvt train cifar100-cpu --root DATA --processes 2       two processes on two cores
torchrun --nproc-per-node 8 -m hvt train imagenet --model hvt_s_1 --root IMAGENET
"""


def register(commands: Any) -> None:
    parser = add_command(commands, "train", run, "train a model with a recipe", _EXAMPLES)
    parser.add_argument("recipe", nargs="?", help=f"{', '.join(list_recipes())} or a .toml file")
    add_flag(parser, "--resume", "resume the run in this folder", metavar="RUN")
    add_shared(parser, "--allow-changed-data")
    group = parser.add_argument_group("fields of the recipe (defaults: DeiT's)")
    add_fields(group, Recipe, skip=("overrides",))
    add_fields(parser.add_argument_group("fields of the model"), HVTConfig, skip=("num_classes",))

    parser = add_command(
        commands, "recipes", run_recipes, "list the recipes, or print one",
        "hvt recipes\nhvt recipes digits > mine.toml && hvt train mine.toml",
    )  # fmt: skip
    parser.add_argument("recipe", nargs="?", help="the recipe to print")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Train a model with a recipe, or resume a run."""
    asked = keywords_of(train, args)
    fields = keywords_of(Recipe, args) | keywords_of(HVTConfig, args)
    _, recipe = check_arguments(**asked, values=fields)
    if recipe.processes not in (None, 1) and "WORLD_SIZE" not in os.environ:
        from ..training.launch import launch

        return launch(recipe, args.argv)
    train(**asked, **fields)
    return 0


def run_recipes(args: argparse.Namespace) -> None:
    """List the recipes of hvt train, or print one as a file to start your own from."""
    if args.recipe is not None:
        if args.json:
            print_json(load_recipe(args.recipe).to_dict())
        else:
            print(recipe_text(args.recipe), end="")
        return
    texts = {name: recipe_text(name) for name in list_recipes()}
    # The first line of a recipe is its command, the second says what it is for.
    rows = [
        {"name": name, "command": first, "about": second}
        for name, text in texts.items()
        for first, second in [[line.lstrip("# ") for line in text.splitlines()[:2]]]
    ]
    emit(rows, {"command": "{command}", "about": "{about}"}, json=args.json)
