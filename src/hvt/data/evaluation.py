"""Preprocessing for evaluation and prediction: no augmentation, DeiT's resizing."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from PIL import Image
from timm.data import create_transform
from torch.utils.data import Subset

from .augment import INTERPOLATIONS, normalise
from .images import UnreadableImageError
from .loader import EvalBatches
from .sources import ArrayImages

SMALL = 64
"""Images up to this side get padded random crops instead of resized crops."""

_MAX_RESIZED = 178_956_970  # pixels: Pillow opens no more


def eval_transform(model: Any, arrays: bool = False, normalize: bool = True) -> Any:
    """How a model of ours or timm's sees an image: DeiT resizes to 256/224 of the input and crops.

    With `arrays` it takes small images, a batch at once, without a crop; the interpolation is one
    of `INTERPOLATIONS`. Without `normalize` it gives the image's bytes. A strip that resizing would
    make a giant is an `UnreadableImageError`.
    """
    cfg = model.pretrained_cfg
    channels, height, _ = cfg["input_size"]
    mean, std = (per_channel(cfg[name], channels) for name in ("mean", "std"))
    interpolation = cfg["interpolation"]
    if arrays:
        return functools.partial(
            normalise, mean=mean, std=std, size=height, interpolation=interpolation
        )
    transform = create_transform(
        cfg["input_size"],
        is_training=False,
        interpolation=interpolation,
        mean=mean,
        std=std,
        crop_pct=cfg["crop_pct"],
        crop_mode=cfg["crop_mode"],
        normalize=normalize,
    )
    transform.transforms.insert(0, RejectStrips(resized_side(model)))
    return transform


def resized_side(model: Any) -> int:
    """What the shorter side of an image is resized to, of which the model sees the middle.

    0 where images are brought to the model's own shape.
    """
    cfg = model.pretrained_cfg
    centre = cfg["crop_mode"] == "center"
    return math.ceil(max(cfg["input_size"][1:]) / cfg["crop_pct"]) if centre else 0


@dataclass
class RejectStrips:
    """The first step of an evaluation transform, which leaves all other images unchanged."""

    side: int

    def __call__(self, image: Image.Image) -> Image.Image:
        short, long = sorted(image.size)
        if self.side**2 * long > _MAX_RESIZED * max(1, short):
            raise UnreadableImageError.of(
                "the image",
                f"its {image.width} × {image.height} pixels are too elongated to resize the "
                f"shorter side to {self.side}",
            )
        return image


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Grey images have the colours' average."""
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def eval_batches(model: Any, dataset: Any, batch_size: int = 64, **options: Any) -> EvalBatches:
    """A data set as a model is evaluated on it; small square arrays do without PIL."""
    height, width = model.config.image
    small = isinstance(dataset, ArrayImages) and height == width <= SMALL
    small &= model.pretrained_cfg["interpolation"] in INTERPOLATIONS
    images = dataset if small else as_files(dataset)
    transform = eval_transform(model, arrays=small)
    return EvalBatches(images, transform, batch_size=batch_size, **options)


def as_files(dataset: Any) -> Any:
    """Any data set as one that is read image by image, for inputs much larger than its images."""
    return Subset(dataset, range(len(dataset))) if isinstance(dataset, ArrayImages) else dataset
