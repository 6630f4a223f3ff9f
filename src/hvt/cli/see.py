"""`hvt see`: what happens inside a model, as images."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import HVTError
from .flags import Parser, add_number
from .weights import add_pretrained

_MODELS = """\
A model is a name of hvt models, any name of timm's (timm:resnet50, or resnet50), or a
checkpoint in any format that hvt.load reads; the default is the built-in model, imagenet. A named
model has random weights, which the title says; --pretrained fetches the published ones."""


def register(commands: Any) -> None:
    """Add the commands of this group."""
    group = commands.add_parser(
        "see",
        help="draw feature maps, kept tokens and costs",
        description="What happens inside a model, as PNG or SVG.",
        epilog=(
            "examples:\n  hvt see features hvt_s_1 timm:resnet50 IMAGE\n"
            "  hvt see tokens hvt_s_4 IMAGE\n  hvt see cost deit_s hvt_s_1 hvt_s_4"
        ),
    )
    group.set_defaults(run=lambda _: group.print_help(), parser=group)
    kinds = group.add_subparsers(metavar="KIND", parser_class=Parser)

    parser = kinds.add_parser(
        "features",
        help="feature maps, stage by stage",
        description=(
            "The feature maps of an image, a row for each model, as in the paper's Figure 3:\n"
            "at each place, the channels that vary most over the image. A pooled sequence is\n"
            "stretched back to its first length and laid out on the grid of patches.\n\n" + _MODELS
        ),
        epilog=(
            "examples:\n  hvt see features deit_s hvt_s_1 timm:resnet50 IMAGE --pretrained\n"
            "  hvt see features runs/digits-hvt_ti_2/best.safetensors IMAGE --channels 16"
        ),
    )
    add_number(parser, "--channels", "channels to show at each place", 9, ge=1)
    _add_common(parser, run_features, "MODEL… IMAGE", "IMAGE-features.png")

    parser = kinds.add_parser(
        "tokens",
        help="which patches the tokens come from",
        description=(
            "Which patches the pooled tokens come from, stage by stage, over the image.\n"
            "Max pooling takes its maximum channel by channel, so one token has its channels from\n"
            "several patches. Each channel of each token that is left is traced back through all\n"
            "stages to its patch, and a patch's colour is its share of them: at 1 it gave as much\n"
            "as if all gave equally, at 0 nothing of it was kept. PoWER keeps whole tokens.\n"
            "Average pooling and ToMe average tokens: the patches of one have its average colour\n"
            "and a line around them.\n\n" + _MODELS
        ),
        epilog=(
            "examples:\n  hvt see tokens hvt_s_4 IMAGE\n"
            "  hvt see tokens model.safetensors IMAGE --output kept.png"
        ),
    )
    _add_common(parser, run_tokens, "MODEL IMAGE", "IMAGE-tokens.png")

    parser = kinds.add_parser(
        "cost",
        help="tokens and MACs, block by block",
        description=(
            "Tokens into, and MACs of, each block, a column for each model. A model is a name of\n"
            "hvt models, a .json config or a checkpoint; the default is the built-in model."
        ),
        epilog="examples:\n  hvt see cost deit_s hvt_s_1 hvt_s_4\n  hvt see cost model.safetensors",
    )
    _add_common(parser, run_cost, "MODEL", "cost.png")


def _add_common(parser: Parser, run: Callable[..., None], words: str, output: str) -> None:
    with_image = words.endswith("IMAGE")
    then = ", then the image" if with_image else ""
    parser.add_argument(
        "others",
        nargs="+" if with_image else "*",
        default=[],
        metavar=words,
        help=f"the models (default: the built-in one){then}",
    )
    if with_image:
        add_pretrained(parser)
        add_number(parser, "--seed", "seed of random weights", 0, ge=0, le=2**63 - 1)
    parser.add_argument(
        "--output", metavar="PNG|SVG", help=f"the file to write (default: {output})"
    )
    add_number(parser, "--dpi", "pixels per inch, from 40 to 600", 110, ge=40, le=600)
    parser.set_defaults(run=run, parser=parser)


def run_features(args: argparse.Namespace) -> None:
    from ..see import FeatureView, draw_features, feature_maps, open_model

    models, path = _models_and_image(args)
    output = _output(args, f"{Path(path).stem}-features.png", path)
    views = []
    for name in models:
        subject = open_model(name, args.pretrained, args.seed)
        image = subject.prepare(path)
        maps = feature_maps(subject.model, image)
        views.append(FeatureView(subject.title, subject.shown(image), maps))
    draw_features(output, views, args.channels, args.dpi)
    print(output)


def run_tokens(args: argparse.Namespace) -> None:
    from ..see import draw_tokens, open_model, token_sources

    models, path = _models_and_image(args)
    if len(models) > 1:
        raise HVTError(f"{args.others[1]!r} is one model too many: use hvt see tokens MODEL IMAGE")
    output = _output(args, f"{Path(path).stem}-tokens.png", path)
    subject = open_model(models[0], args.pretrained, args.seed)
    image = subject.prepare(path)
    sources = token_sources(subject.model, image)
    step = -(-len(sources) // 5)  # PoWER may drop tokens in every block: five places are enough
    shown = sources[::-1][::step][::-1]
    draw_tokens(output, subject.title, subject.shown(image), shown, args.dpi)
    print(output)


def run_cost(args: argparse.Namespace) -> None:
    from ..see import draw_costs, open_price

    output = _output(args, "cost.png")
    draw_costs(output, [open_price(name) for name in args.others or [None]], args.dpi)
    print(output)


def _models_and_image(args: argparse.Namespace) -> tuple[list[str | None], str]:
    """The models and the image, which is the last word."""
    import timm

    from ..data.images import read_image
    from ..resolve import TIMM, is_checkpoint, resolve

    *models, path = args.others
    is_model = is_checkpoint(path) or timm.is_model(path.removeprefix(TIMM))
    if is_model and not os.path.isfile(path):  # noqa: PTH113 - as for any name
        words = " ".join(args.others)
        raise HVTError(f"no image is given: use {args.parser.prog} {words} IMAGE")
    if args.pretrained and all(resolve(n).kind == "checkpoint" for n in models or [None]):
        which = " and ".join(models) or "the built-in model"
        raise HVTError(f"{which} has its own weights: leave --pretrained out, or name a model")
    read_image(path)  # an unreadable one raises an error before any weights are fetched
    return models or [None], path


def _output(args: argparse.Namespace, default: str, image: str | None = None) -> Path:
    """Where to write; raises an error before the work if that cannot be right."""
    from ..plot import figure_path

    path = figure_path(args.output or default)
    if image is not None and path.resolve() == Path(image).resolve():
        raise HVTError(f"{path} is the image itself: name another file with --output")
    return path
