"""`hvt train`: a recipe, any field of it by a flag, and resumed runs."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import HVTConfig
from ..training.recipe import Recipe, list_recipes, load_recipe, recipe_text
from ..training.run import train
from .flags import add_fields, given_fields
from .output import add_output_flags, print_json

_EXAMPLES = """\
examples:
  hvt train digits                                       one minute on two cores
  hvt train cifar100-cpu --root DATA --download          real images, seven minutes on two cores
  hvt train cifar100 --model hvt_s_4 --root DATA         the paper's recipe, on a GPU
  hvt train finetune --init best.safetensors --data IMAGES
  hvt train folder --data IMAGES                       your own images, from scratch
  hvt train cifar100-cpu --model plan.json --root DATA   what hvt plan --save plan.json chose
  hvt train --resume runs/digits-hvt_ti_2                resume a run
  hvt train --resume runs/digits-hvt_ti_2 --epochs 80    make it longer
  hvt train cifar100-cpu --root DATA --processes 2       two processes on two cores
  torchrun --nproc-per-node 8 -m hvt train imagenet --model hvt_s_1 --root IMAGENET
"""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description=f"Train a model. Recipes: {', '.join(list_recipes())}, or a .toml file.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("recipe", nargs="?", help="a recipe's name or file")
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this folder")
    parser.add_argument(
        "--allow-changed-data", action="store_true", help="resume although images have changed"
    )
    add_fields(parser.add_argument_group("fields of the recipe"), Recipe, skip=("overrides",))
    add_fields(parser.add_argument_group("fields of the model"), HVTConfig, skip=("num_classes",))
    parser.set_defaults(run=run, parser=parser)

    parser = commands.add_parser(
        "recipes",
        help="list the recipes, or print one",
        description="List the recipes of hvt train, or print one as a file to start your own from.",
        epilog=(
            "examples:\n  hvt recipes\n  hvt recipes digits > mine.toml && hvt train mine.toml"
        ),
    )
    parser.add_argument("recipe", nargs="?", help="the recipe to print")
    add_output_flags(parser, instead_of="text")
    parser.set_defaults(run=run_recipes, parser=parser)


def run(args: argparse.Namespace) -> None:
    values, overrides = given_fields(args, Recipe), given_fields(args, HVTConfig)
    train(
        args.recipe,
        resume=args.resume,
        allow_changed_data=args.allow_changed_data,
        **values,
        **overrides,
    )


def run_recipes(args: argparse.Namespace) -> None:
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
    if args.json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['command']}\n    {row['about']}")
