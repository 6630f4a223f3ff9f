"""What a command may name as its model: a checkpoint, or a model that has no weights yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HVTError
from ..zoo import DEFAULT, MODELS
from .output import note

if TYPE_CHECKING:
    from ..model import HVT


def check_pretrained(word: str | None, pretrained: bool) -> None:
    """Raise an error for `--pretrained` where a file has the weights."""
    if pretrained and word not in MODELS:
        raise HVTError(
            f"{word or DEFAULT} has its own weights: leave --pretrained out, or name a model"
        )


def open_weights(word: str, pretrained: bool) -> HVT:
    """The model of a checkpoint, a config or a name; new weights are told on stderr."""
    from ..model import HVT
    from ..resolve import build, resolve

    source = resolve(word)
    if source.kind == "timm":
        raise HVTError(f"{word} is a timm model: name one from hvt models, or a checkpoint")
    model = build(source, pretrained).eval()
    assert isinstance(model, HVT)
    if source.kind != "checkpoint" and not pretrained:
        note(f"{word}: untrained weights (--pretrained downloads published ones)")
    if source.kind == "model" and Path(word).exists():
        note(f"{word} is the model of that name: write ./{word} for the file")
    return model
