"""`hvt see`: what happens inside a model, as images."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..errors import HVTError
from ..plot import figure_path
from .flags import Parser, add_command, add_flag, add_group, add_shared

_FEATURES = """\
hvt see features deit_s hvt_s_1 timm:resnet50 IMAGE --pretrained
hvt see features runs/digits-hvt_ti_2/best.safetensors IMAGE --channels 16
"""
_TOKENS = """\
hvt see tokens hvt_s_4 IMAGE
hvt see tokens model.safetensors IMAGE --output kept.png
"""
_COST = "hvt see cost deit_s hvt_s_1 hvt_s_4"


def register(commands: Any) -> None:
    about = "Draw what happens inside a model, as PNG or SVG."
    text, examples = "draw feature maps, kept tokens and costs", _FEATURES + _TOKENS + _COST
    kinds = add_group(commands, "see", text, examples, about)
    text = "feature maps, stage by stage"
    parser = add_command(kinds, "features", run_features, text, _FEATURES)
    add_flag(parser, "--channels", "channels to show at each place", int, 9, ge=1)
    _add_common(parser, "MODEL… IMAGE", "IMAGE-features.png")
    text = "which patches the tokens come from"
    parser = add_command(kinds, "tokens", run_tokens, text, _TOKENS)
    _add_common(parser, "MODEL IMAGE", "IMAGE-tokens.png")
    parser = add_command(kinds, "cost", run_cost, "tokens and MACs, block by block", _COST)
    _add_common(parser, "MODEL", "cost.png")


def _add_common(parser: Parser, words: str, output: str) -> None:
    with_image = words.endswith("IMAGE")
    then = ", then the image" if with_image else ""
    parser.add_argument(
        "others",
        nargs="+" if with_image else "*",
        default=[],
        metavar=words,
        help=f"models of hvt or timm, or checkpoints (default: the built-in one){then}",
    )
    if with_image:
        add_shared(parser, "--pretrained")
        add_flag(parser, "--seed", "seed of random weights", int, 0, ge=0, le=2**63 - 1)
    add_flag(parser, "--output", f"the file to write (default: {output})", metavar="PNG|SVG")
    add_flag(parser, "--dpi", "pixels per inch", int, 110, ge=40, le=600)


def run_features(args: argparse.Namespace) -> None:
    """Draw the feature maps of an image, a row for each model, as in the paper's Figure 3.

    Shows the channels that vary most over the image. A pooled sequence is stretched back to its
    first length and laid out on the patch grid. Without --pretrained, a named model has random
    weights, as the title says.
    """
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
    """Draw which patches the pooled tokens come from, stage by stage, over the image.

    Max pooling takes the maximum of each channel, so the channels of a token come from several
    patches. Each channel is traced back through all stages to its patch, and a patch's colour is
    its share of them, relative to an even share: 1 is average, 0 means that nothing was kept. PoWER
    keeps whole tokens. With average pooling and ToMe, the patches of a token have their average
    colour and an outline.
    """
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
    """Draw the tokens into, and MACs of, each block, a column for each model."""
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
    path = figure_path(args.output or default)
    if image is not None and path.resolve() == Path(image).resolve():
        raise HVTError(f"{path} is the image itself: name another file with --output")
    return path
