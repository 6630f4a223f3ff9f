"""Augmentation from one 64-bit key per image.

What happens to an image follows from its key only: not from the batch around it, the number of
processes or any global random state. timm augments image by image with PIL, which for 32×32 images
costs more than the model, so their crops and flips are ours: the batch is one array. What else a
recipe may ask for (RandAugment, colour jitter, erasing) is timm's: see `training.pipeline`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from .images import UnreadableImageError

MAX_BROKEN_IN_A_ROW = 100

INTERPOLATIONS = ("bicubic", "bilinear")
"""The resizings that torch has for a batch as Pillow has them for an image."""

Keys = NDArray[np.uint64]
Images = NDArray[np.uint8]  # (B, C, H, W)

# ── random numbers that are a function of a key ─────────────────────────────────────────────────

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1

# One stream of numbers per decision, so that switching one off leaves the others unchanged.
_CROP, _FLIP = range(2)


def _mix(words: Keys) -> Keys:
    """The output function of SplitMix64: every bit of a word depends on every bit before."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _words(number: int) -> Keys:
    return np.array([number & _WORD], np.uint64)  # an array: numpy scalars warn when they wrap


def keys_for(seed: int, epoch: int, positions: NDArray[np.int64]) -> Keys:
    """One key for each position in an epoch of a run; each of the three changes all its bits."""
    run = _mix(_words(seed) + _GAMMA)
    return _mix(_mix(run + _words(epoch)) + np.asarray(positions).astype(np.uint64) * _GAMMA)


def uniform(keys: Keys, count: int, stream: int = 0) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key, of SplitMix64: (B,) → (B, count)."""
    counters = np.arange(1, count + 1, dtype=np.uint64)
    words = _mix(_mix(keys[:, None] + _words(stream + 1) * _GAMMA) + counters * _GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


# ── what becomes of a batch ─────────────────────────────────────────────────────────────────────


def normalise(
    images: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    size: int,
    interpolation: str = "bicubic",
) -> Tensor:
    """uint8 images as the model wants them in evaluation: (B, H, W, C) → (B, C, size, size).

    `interpolation` is one of `INTERPOLATIONS`.
    """
    planes = images.permute(0, 3, 1, 2)
    if planes.shape[2:] != (size, size):
        planes = F.interpolate(planes, (size, size), mode=interpolation, antialias=True)
    # ToTensor and Normalize of torchvision, to the bit.
    result = planes.numpy().astype(np.float32, order="C")
    result /= np.float32(255)
    result -= np.array(mean, np.float32)[:, None, None]
    result /= np.array(std, np.float32)[:, None, None]
    return torch.from_numpy(result)


@dataclass
class BatchAugment:
    """Crops, flips, resizes and normalises batches: uint8 (B, H, W, C) → float32 (B, C, S, S).

    `padding` is the width of the black border around an image that a crop of its own size is taken
    from; `flip` is the fraction of images flipped left to right; `interpolation` is one of
    `INTERPOLATIONS`.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 4
    flip: float = 0.5
    interpolation: str = "bicubic"

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        planes = self._crop(images.numpy().transpose(0, 3, 1, 2), keys)
        self._flip(planes, keys)
        cropped = torch.from_numpy(planes).permute(0, 2, 3, 1)
        return normalise(cropped, self.mean, self.std, self.size, self.interpolation)

    def _crop(self, images: Images, keys: Keys) -> Images:
        """A window of the image's own size anywhere in the padded one; always a copy."""
        pad, (number, channels, height, width) = self.padding, images.shape
        if pad == 0:
            return images.copy(order="C")
        padded = np.zeros((number, channels, height + 2 * pad, width + 2 * pad), np.uint8)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        top, left = (uniform(keys, 2, _CROP) * (2 * pad + 1)).astype(np.intp).T
        windows = sliding_window_view(padded, (height, width), axis=(2, 3))
        # (B, C, 2 pad + 1, 2 pad + 1, H, W) → (B, C, H, W)
        return np.ascontiguousarray(windows.swapaxes(1, 3)[np.arange(number), left, top])

    def _flip(self, images: Images, keys: Keys) -> None:
        chosen = np.flatnonzero(uniform(keys, 1, _FLIP)[:, 0] < self.flip)
        images[chosen] = images[chosen][..., ::-1]


# ── what becomes of single images ───────────────────────────────────────────────────────────────

Item = tuple[Tensor | None, int, int] | UnreadableImageError
"""The image (None where it is passed over), its label, and the broken ones passed over for it.

What cannot be read travels back from a reading process as a value: an exception that crosses
processes brings its traceback.
"""


@dataclass
class SeededDataset:
    """An image by (index, key); without a key its transform has nothing random.

    With `skip_broken`, an unreadable image is left out (None) or, with `substitute`, replaced by
    the next one that can be read.
    """

    dataset: Any
    transform: Any
    skip_broken: bool
    substitute: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int | None]) -> Item:
        index, key = item
        broken = 0
        while True:
            try:
                image, label = self.dataset[index]
                if key is not None:  # timm's transforms draw from all three generators
                    random.seed(key)
                    np.random.seed(key % 2**32)
                    torch.default_generator.manual_seed(key % 2**63)  # ten times faster than all
                return self.transform(image), label, broken
            except UnreadableImageError as error:
                # A transform does not know the image's name.
                named = UnreadableImageError.of(self.dataset.path(index), error.reason)
                broken += 1
                if not self.skip_broken:
                    return named
                if not self.substitute:
                    return None, 0, 1
                if broken == min(MAX_BROKEN_IN_A_ROW, len(self)):
                    return UnreadableImageError(
                        f"{broken} images in a row are unreadable; the last: {named}"
                    )
                index = (index + 1) % len(self)
