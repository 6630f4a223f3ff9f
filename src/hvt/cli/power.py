"""`hvt power`: search which tokens a DeiT does not need, and retrain it without them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..errors import HVTError
from ..training.recipe import Recipe, list_recipes, load_recipe
from .flags import add_command, add_fields, add_flag, add_group, add_shared, keywords_of

_SEARCH = """\
hvt power search runs/digits-deit_ti/best.safetensors --recipe digits --gflops 0.004
hvt power search deit_s.pth --data imagenet --root IMAGENET --gflops 2.7 --output s.safetensors
"""
_RETRAIN = """\
hvt power retrain best_power.safetensors --recipe digits --epochs 10
hvt power retrain s.safetensors --data imagenet --root IMAGENET --lr 2e-4
hvt train --resume runs/power-best_power               resume a run
"""
_EPOCHS = 5  # of a search
# Not used by a search.
_UNUSED = ("overrides", "model", "init", "output", "ema", "eval_every", "checkpoint_minutes",
           "tensorboard", "processes")  # fmt: skip


def register(commands: Any) -> None:
    steps = add_group(
        commands, "power", "drop a DeiT's least attended tokens (PoWER)", _SEARCH + _RETRAIN,
        "Apply PoWER to a trained DeiT: search how many tokens each block keeps for a budget of\n"
        "GFLOPs, then retrain with the others dropped. See docs/power.md.",
    )  # fmt: skip
    parser = add_command(steps, "search", run_search, "find a retention for a budget", _SEARCH)
    parser.add_argument("checkpoint", help="a trained DeiT in any format that hvt.load reads")
    add_flag(parser, "--gflops", "budget: MACs per image in 10⁹", float, required=True)
    add_flag(parser, "--r-lr", "learning rate of the retention scores r", float, gt=0, le=1)
    parser.add_argument(
        "--output",
        dest="file",
        metavar="FILE",
        help="file to write (default: CHECKPOINT_power.safetensors)",
    )
    add_shared(parser, "--match-by-order")
    _add_recipe(parser, skip=_UNUSED, epochs=_EPOCHS)

    parser = add_command(steps, "retrain", run_retrain, "retrain a searched model", _RETRAIN)
    parser.add_argument("checkpoint", help="output of hvt power search")
    _add_recipe(parser, skip=("overrides", "model", "init", "processes"))
    add_fields(parser.add_argument_group("fields of the model"), HVTConfig, skip=("num_classes",))


def _add_recipe(parser: Any, skip: tuple[str, ...], **values: Any) -> None:
    parser.add_argument(
        "--recipe",
        default="power",
        help=f"recipe: {', '.join(list_recipes())} or a .toml file (default: power); "
        "the architecture is always the checkpoint's",
    )
    group = parser.add_argument_group("fields of the recipe (defaults: the recipe power's)")
    add_fields(group, Recipe, skip=skip, shown=load_recipe("power").replace({}, **values))


def run_search(args: argparse.Namespace) -> None:
    """Train with soft extraction until the kept tokens cost the budget.

    Writes a checkpoint with that retention and the searched weights.
    """
    from ..power.search import search

    checkpoint = Path(args.checkpoint)
    output = args.file or checkpoint.parent / f"{checkpoint.stem}_power.safetensors"
    recipe = _recipe(args, {}, epochs=_EPOCHS)
    search(recipe, args.gflops, r_lr=args.r_lr, match_by_order=args.match_by_order, output=output)


def run_retrain(args: argparse.Namespace) -> None:
    """Retrain a checkpoint with a retention, with the other tokens dropped.

    This is `hvt train` with --init and the checkpoint's architecture; `hvt train --resume`
    resumes it.
    """
    from ..checkpoint.save_load import read
    from ..training.engine import train

    overrides = keywords_of(HVTConfig, args)
    if read(args.checkpoint).config.retention is None and overrides.get("retention") is None:
        raise HVTError(
            f"{args.checkpoint} has no retention: make one with hvt power search, "
            "or name it with --retention"
        )
    train(_recipe(args, overrides), name="power")


def _recipe(args: argparse.Namespace, overrides: dict[str, Any], **defaults: Any) -> Recipe:
    """The recipe with its flags, and the checkpoint's architecture in place of its own."""
    values = defaults | keywords_of(Recipe, args)
    recipe = dataclasses.replace(load_recipe(args.recipe), model=None, overrides={})
    return recipe.replace(overrides, **values, init=args.checkpoint)
