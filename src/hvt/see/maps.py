"""Feature maps, as in the paper's Figure 3, of our models and of timm's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.models import FeatureHookNet
from torch import Tensor, nn

from ..elastic import replica
from ..errors import HVTError, first_line
from ..features import last_blocks
from ..model import HVT
from ..pooling import as_tokens, to_grid

FEW = 6
"""A model with more levels than this, which are then its blocks, is shown at five of them."""


@dataclass(frozen=True)
class FeatureMap:
    """What a model has at one place."""

    name: str
    """The block, counted from 0, or what timm calls the place."""
    size: str
    """Tokens, or rows × columns."""
    values: Tensor
    """`(D, H, W)`; a pooled sequence is stretched back to the patch grid."""


@torch.inference_mode()
def feature_maps(model: nn.Module, image: Tensor) -> list[FeatureMap]:
    """The feature maps of a prepared image `(C, H, W)`, stage by stage.

    For our models, after the first block and the last of each stage; fewer than three stages are
    divided, so that DeiT, HVT-S-1 and HVT-S-4 are shown at the same depths. For timm's models, at
    every level, or at five depths if each block is a level.
    """
    model = replica(model)
    if isinstance(model, HVT):
        return _ours(model, image[None])
    try:
        return _theirs(model, image[None])
    except Exception as error:  # any of timm's thousand models, each in its own way
        what = type(model).__name__
        raise HVTError(f"{what} gives no feature maps of an image ({first_line(error)})") from error


def five_places(depth: int) -> list[int]:
    """The first block and the ends of the four quarters."""
    return sorted({0, *(-(-depth * quarter // 4) - 1 for quarter in (1, 2, 3, 4))})


def strongest(values: Tensor, count: int) -> Tensor:
    """The channels of `(D, H, W)` that vary most over the image: `(count, H, W)`.

    The variation is measured between the 5th and the 95th percentile, so that a single outlier
    token, which transformers tend to have, does not decide.
    """
    flat = values.flatten(1).float()
    low, high = (flat.quantile(q, dim=1) for q in (0.05, 0.95))
    order = (high - low).argsort(descending=True, stable=True)
    return values[order[:count]]


def _ours(model: HVT, images: Tensor) -> list[FeatureMap]:
    config = model.config
    ends = last_blocks(config)
    places = sorted({0, *ends, *(five_places(config.depth) if len(ends) < 3 else ())})
    if config.kept is not None:  # dropped or merged, tokens have lost their places
        places = [place for place in places if not model.feature_info[place]["sequence"]]
    if not places:
        raise HVTError(
            "the model drops or merges tokens from its first block on, and the rest have no place "
            "in the image: use hvt see tokens"
        )
    maps = model.forward_intermediates(images, places, stop_early=True, intermediates_only=True)
    levels = []
    for place, values in zip(places, maps, strict=True):
        info = model.feature_info[place]
        grid = to_grid(as_tokens(values), config.grid) if info["sequence"] else values
        levels.append(FeatureMap(f"block {place}", f"{info['tokens']} tokens", grid[0]))
    return levels


def _theirs(model: Any, images: Tensor) -> list[FeatureMap]:
    names = [level.get("module", "") for level in model.feature_info]
    if hasattr(model, "forward_intermediates"):
        outputs = model.forward_intermediates(images, intermediates_only=True)
        if len(names) != len(outputs):
            names = [f"level {i}" for i in range(len(outputs))]
    else:  # timm's older models
        outputs = FeatureHookNet(model, tuple(range(len(names))))(images)
    places = range(len(outputs)) if len(outputs) <= FEW else five_places(len(outputs))
    levels = [(names[place].replace("blocks.", "block "), outputs[place]) for place in places]
    return [FeatureMap(name, "{} × {}".format(*y.shape[2:]), y[0]) for name, y in levels]
