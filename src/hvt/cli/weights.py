"""What a command may name as its model: a checkpoint, or a model that has no weights yet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HVTError
from ..zoo import DEFAULT, MODELS

if TYPE_CHECKING:
    from ..model import HVT


def add_pretrained(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pretrained", action="store_true", help="fetch the published weights of a model's name"
    )


def open_weights(word: str, pretrained: bool) -> HVT:
    """The model of a checkpoint or of a name; of a name's new weights a line on stderr tells."""
    from ..checkpoint.save_load import load

    return named_model(word, pretrained) if word in MODELS else load(word).float()


def check_pretrained(word: str | None, pretrained: bool) -> None:
    """Refuse `--pretrained` where the weights are those of a file."""
    if pretrained and word not in MODELS:
        raise HVTError(
            f"{word or DEFAULT} has its own weights: leave --pretrained out, or name a model"
        )


def named_model(name: str, pretrained: bool) -> HVT:
    """A model of `hvt models`: published weights, or new ones, the same each time."""
    import torch

    from ..registry import create_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model(name, pretrained).eval()
    if not pretrained:
        print(
            f"{name}: new weights, which know nothing yet (--pretrained fetches published ones)",
            file=sys.stderr,
        )
    if Path(name).exists():
        print(f"{name} is the model of that name: write ./{name} for the file", file=sys.stderr)
    return model
