"""`hvt train`: a recipe, any field of it by a flag, and runs that go on."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config import HVTConfig
from ..errors import HVTError
from ..training.recipe import Recipe, list_recipes, load_recipe
from .flags import add_fields, given_fields

_EXAMPLES = """\
examples:
  hvt train digits                                       one minute on two cores
  hvt train cifar100-cpu --root DATA --download          real pictures, seven minutes on two cores
  hvt train cifar100 --model hvt_s_4 --root DATA         the paper's recipe, on a GPU
  hvt train finetune --init best.safetensors --data PICTURES
  hvt train --resume runs/digits-hvt_ti_2                go on with a run
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
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    add_fields(parser.add_argument_group("fields of the recipe"), Recipe, skip=("overrides",))
    add_fields(parser.add_argument_group("fields of the model"), HVTConfig, skip=("num_classes",))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    # Training pulls in a good deal; `hvt models` should not wait for it.
    from ..training.engine import Interrupted, resume, train

    values, overrides = given_fields(args, Recipe), given_fields(args, HVTConfig)
    try:
        if args.resume:
            if args.recipe or values or overrides:
                raise HVTError("--resume goes on with the run's own recipe: give it alone")
            resume(args.resume)
        elif args.recipe:
            recipe = load_recipe(args.recipe).replace(overrides, **values)
            train(recipe, name=args.recipe.removesuffix(".toml").rsplit("/", 1)[-1])
        else:
            raise HVTError(f"no recipe is named: use one of {', '.join(list_recipes())}")
    except Interrupted as stopped:
        print(f"hvt: {stopped}", file=sys.stderr)
        return 130
    return 0
