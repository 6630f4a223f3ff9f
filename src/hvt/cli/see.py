"""`hvt see`: what happens inside a model, as images."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..errors import HVTError
from .flags import Parser, converter

_MODELS = """\
A model is a name of hvt models, any name of timm's (timm:resnet50, or resnet50), or a
checkpoint in any form that hvt.load reads. Without one it is the built-in model, imagenet. A named
model has random weights, which the title says; --pretrained fetches the published ones."""


def register(commands: Any) -> None:
    """Add the commands of this group."""
    group = commands.add_parser(
        "see",
        help="draw feature maps, kept tokens and costs",
        description="What happens inside a model, as PNG images.",
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
    parser.add_argument(
        "others",
        nargs="+",
        metavar="MODEL… IMAGE",
        help="the models (default: the built-in one), then the image",
    )
    parser.add_argument(
        "--channels",
        type=converter("channels", int, ge=1),
        default=9,
        metavar="N",
        help="channels to show at each place (default: 9)",
    )
    _add_weights(parser)
    _add_output(parser, "IMAGE-features.png")
    parser.set_defaults(run=run_features, parser=parser)

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
    parser.add_argument(
        "others",
        nargs="+",
        metavar="MODEL IMAGE",
        help="the models (default: the built-in one), then the image",
    )
    _add_weights(parser)
    _add_output(parser, "IMAGE-tokens.png")
    parser.set_defaults(run=run_tokens, parser=parser)

    parser = kinds.add_parser(
        "cost",
        help="tokens and multiply-adds, block by block",
        description=(
            "Tokens into, and multiply-adds of, each block, a column for each model.\n"
            "A model is a name of hvt models or a checkpoint. Without one it is the built-in model."
        ),
        epilog="examples:\n  hvt see cost deit_s hvt_s_1 hvt_s_4\n  hvt see cost model.safetensors",
    )
    parser.add_argument(
        "others",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="the models (default: the built-in one)",
    )
    _add_output(parser, "cost.png")
    parser.set_defaults(run=run_cost, parser=parser)


def _add_weights(parser: Parser) -> None:
    parser.add_argument(
        "--pretrained", action="store_true", help="fetch the published weights of named models"
    )
    parser.add_argument(
        "--seed",
        type=converter("seed", int),
        default=0,
        metavar="N",
        help="where random weights start (default: 0)",
    )


def _add_output(parser: Parser, default: str) -> None:
    parser.add_argument(
        "--output", metavar="FILE.png", help=f"the file to write (default: {default})"
    )
    parser.add_argument(
        "--dpi",
        type=converter("dpi", int, ge=40, le=600),
        default=110,
        metavar="N",
        help="pixels per inch, from 40 to 600; more for print (default: 110)",
    )


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
    """The last word is the image; an image that is not there may be a model's name."""
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
    read_image(path)  # a broken one is refused before any weights are fetched
    return models or [None], path


def _output(args: argparse.Namespace, default: str, image: str | None = None) -> Path:
    """Where to write, refused before the work where it cannot be right."""
    from ..plot import png_path

    path = png_path(args.output or default)
    if image is not None and path.resolve() == Path(image).resolve():
        raise HVTError(f"{path} is the image itself: name another file with --output")
    return path
