"""A few images for trying a model out: real ones, or drawn where there are none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HVTError
from .images import UnreadableImageError
from .sources import open_parts


def sample_images(
    name: str | Path,
    transform: Any,
    count: int,
    *,
    root: str | Path | None = None,
    in_chans: int = 3,
) -> Tensor:
    """Images spread evenly over a source's training part, `(n, C, H, W)` with n at most `count`.

    Those that cannot be read are left out. What is chosen with them has not seen the validation
    part; it is taken where there is no other.
    """
    parts = open_parts(name, root=root, in_chans=in_chans)
    dataset = parts.val if parts.train is None else parts.train
    assert dataset is not None
    chosen: list[Tensor] = []
    for index in evenly(len(dataset), count):
        with contextlib.suppress(UnreadableImageError):
            chosen.append(transform(dataset[index][0]))
    if not chosen:
        raise HVTError(f"{name} has no readable image to try the model on")
    return torch.stack(chosen)


def evenly(total: int, count: int) -> list[int]:
    """The middles of `count` equal parts, for folders are in order of class; all if these are."""
    count = min(count, total)
    return [(2 * part + 1) * total // (2 * count) for part in range(count)]


def drawn_images(count: int, channels: int, size: tuple[int, int]) -> Tensor:
    """Clouds with detail at every scale, the same each time: `(count, C, H, W)`, normalised."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(count, channels, *size)
    cells = 2
    while cells <= min(size):
        coarse = torch.randn(count, channels, cells, cells, generator=generator)
        images += F.interpolate(coarse, size, mode="bilinear", align_corners=False)
        cells *= 2
    return images / images.std(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
