"""Augmentation of a whole batch of small pictures at once, from one 64-bit key per picture.

timm augments picture by picture with PIL, which for 32×32 pictures costs more than the model. Here
the batch is one array. What happens to a picture follows from its key alone: not from the batch
around it, the number of processes or any global random state.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from ..errors import HVTError
from . import ops
from .ops import CODE, NOTHING, OPS, Pictures

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]

# ── random numbers that are a function of a key ─────────────────────────────────────────────────

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1

# One stream of numbers per decision, so that switching one off leaves the others as they were.
_CROP, _FLIP, _RAND_AUGMENT, _JITTER, _ERASE, _BOX, _NOISE = range(7)


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


def _bits(keys: Keys, counters: Keys, stream: int) -> Keys:
    """SplitMix64's word number `counters` of a key's stream; shapes broadcast."""
    keys = keys.astype(np.uint64, copy=False)  # signed ones would make floats
    return _mix(_mix(keys + _words(stream + 1) * _GAMMA) + (counters + np.uint64(1)) * _GAMMA)


def uniform(keys: Keys, count: int, stream: int = 0) -> Floats:
    """`count` numbers in [0, 1) for each key: (B,) → (B, count)."""
    words = _bits(keys[:, None], np.arange(count, dtype=np.uint64), stream)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@functools.cache
def _normal_table() -> NDArray[np.float32]:
    """The quantiles of the normal distribution: 16 random bits in, a normal number out."""
    return torch.special.ndtri((torch.arange(65536).double() + 0.5) / 65536).float().numpy()


# ── what to do ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RandAugment:
    """What timm's string `rand-m9-mstd0.5-inc1` says; the defaults are timm's."""

    magnitude: int = 10
    std: float = 0.0
    limit: int = 10
    layers: int = 2
    probability: float = 0.5
    increasing: bool = False

    @classmethod
    def parse(cls, text: str) -> RandAugment:
        """Read timm's string; a part that would be ignored or is not known is refused."""
        kind, *parts = text.split("-")
        if kind != "rand":
            raise HVTError(f"rand_augment {text!r}: it must begin with 'rand-', not {kind!r}.")
        values: dict[str, Any] = {}
        for part in parts:
            match = re.fullmatch(r"(mstd|p)(\d+(?:\.\d*)?)|(mmax|inc|m|n)(\d+)", part)
            if match is None:
                raise HVTError(
                    f"rand_augment {text!r}: the part {part!r} is not understood here; known are "
                    "m9, mstd0.5, mmax10, n2, p0.5 and inc1, as in rand-m9-mstd0.5-inc1."
                )
            if match[1]:
                values[match[1]] = float(match[2])
            else:
                values[match[3]] = int(match[4])
        if not 0 <= values.get("p", 0.5) <= 1:
            raise HVTError(f"rand_augment {text!r}: p must be from 0 to 1.")
        std = values.get("mstd", 0.0)
        return cls(
            magnitude=values.get("m", 10),
            std=float("inf") if std > 100 else std,
            limit=values.get("mmax", 10) or 10,
            layers=values.get("n", 2),
            probability=values.get("p", 0.5),
            increasing=bool(values.get("inc", 0)),
        )

    def levels(self, numbers: Floats) -> Floats:
        """Magnitudes around the one asked for, from uniform numbers, within 0 … limit."""
        if np.isinf(self.std):
            drawn = self.magnitude * numbers
        else:
            normal = _normal_table()[(numbers * 65536).astype(np.intp)]
            drawn = self.magnitude + self.std * normal.astype(np.float64)
        return np.clip(drawn, 0, self.limit)

    def arguments(self, codes: NDArray[np.intp], levels: Floats, negate: NDArray[Any]) -> Floats:
        """timm's level → argument rules for each operation; `negate` turns a signed one round."""
        share = levels / 10.0
        sign = np.where(negate, -1.0, 1.0)
        bits = np.trunc(share * 4)
        threshold = np.minimum(256, np.trunc(share * 256))
        if self.increasing:
            bits, threshold = 4 - bits, 256 - threshold
            factor = np.maximum(0.1, 1 + sign * share * 0.9)
        else:
            factor = share * 1.8 + 0.1
        rules = {
            "Rotate": sign * share * 30,
            "Posterize": bits,
            "Solarize": threshold,
            "SolarizeAdd": np.minimum(128, np.trunc(share * 110)),
            **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), factor),
            **dict.fromkeys(("ShearX", "ShearY"), sign * share * 0.3),
            **dict.fromkeys(("TranslateXRel", "TranslateYRel"), sign * share * 0.45),
        }
        # Codes in the order of OPS; NOTHING (-1) falls on the row of zeros at the end.
        rows = [*(rules.get(name, np.zeros_like(share)) for name in OPS), np.zeros_like(share)]
        return np.stack(rows)[codes, np.arange(len(codes))]


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Augmentation:
    """How training pictures are varied, in the order of the fields."""

    size: int = dataclasses.field(
        metadata={"help": "side of the result in pixels; others are resized after augmentation"}
    )
    padding: int = _field(4, "pixels put around the picture before a crop of its own size")
    padding_mode: str = _field("zero", "what the padding is: zero or reflect")
    flip: float = _field(0.5, "probability of a horizontal flip")
    rand_augment: str = _field("", "timm's RandAugment, e.g. rand-m9-mstd0.5-inc1; '' is off")
    color_jitter: float = _field(
        0.0, "brightness, contrast and saturation, each ± this; as in timm only without RandAugment"
    )
    erase: float = _field(0.0, "probability of replacing a rectangle by normal noise")
    mean: tuple[float, ...] = _field(IMAGENET_DEFAULT_MEAN, "subtracted from each channel in 0 … 1")
    std: tuple[float, ...] = _field(IMAGENET_DEFAULT_STD, "each channel is then divided by this")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise HVTError(f"size must be 1 or more, not {self.size}.")
        if self.padding < 0:
            raise HVTError(f"padding must be 0 or more, not {self.padding}.")
        if self.padding_mode not in ("zero", "reflect"):
            raise HVTError(f"padding_mode must be zero or reflect, not {self.padding_mode!r}.")
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise HVTError(f"{name} must be from 0 to 1, not {getattr(self, name)}.")
        if not self.color_jitter >= 0:
            raise HVTError(f"color_jitter must be 0 or more, not {self.color_jitter}.")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise HVTError(
                f"mean and std must both have 1 or 3 values, not {self.mean} and {self.std}."
            )
        if not all(value > 0 for value in self.std):
            raise HVTError(f"std must be positive, not {self.std}.")
        if self.rand_augment:
            RandAugment.parse(self.rand_augment)


# ── doing it ────────────────────────────────────────────────────────────────────────────────────


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], size: int | None = None
) -> Tensor:
    """uint8 pictures as the model wants them in evaluation: (B, H, W, C) → (B, C, size, size)."""
    return torch.from_numpy(_normalise(_planes(images, len(mean)), mean, std, size))


def _planes(images: Tensor, channels: int) -> Pictures:
    """The pictures as numpy sees them, channels first: (B, H, W, C) → a view (B, C, H, W)."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != channels:
        raise HVTError(
            f"pictures must be uint8 of shape (B, H, W, {channels}), "
            f"not {images.dtype} of {tuple(images.shape)}."
        )
    return images.numpy().transpose(0, 3, 1, 2)


def _normalise(
    pictures: Pictures, mean: tuple[float, ...], std: tuple[float, ...], size: int | None
) -> NDArray[np.float32]:
    if size is not None and pictures.shape[2:] != (size, size):
        pictures = torch.nn.functional.interpolate(
            torch.from_numpy(pictures), size=(size, size), mode="bicubic", antialias=True
        ).numpy()
    # ToTensor and Normalize of torchvision, to the bit.
    result = pictures.astype(np.float32, order="C")
    result /= np.float32(255)
    result -= np.array(mean, np.float32)[:, None, None]
    result /= np.array(std, np.float32)[:, None, None]
    return result


class BatchAugment:
    """Augments batches as an `Augmentation` says: uint8 (B, H, W, C) → float32 (B, C, S, S)."""

    def __init__(self, augmentation: Augmentation) -> None:
        self.augmentation = augmentation
        text = augmentation.rand_augment
        self.policy = RandAugment.parse(text) if text else None
        self.fill = tuple(min(255, round(255 * value)) for value in augmentation.mean)

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        settings = self.augmentation
        if len(images) != len(keys):
            raise HVTError(f"each picture needs a key: {len(images)} pictures, {len(keys)} keys.")
        pictures = self._crop(_planes(images, len(settings.mean)), keys)
        self._flip(pictures, keys)
        if self.policy is not None:
            self._rand_augment(pictures, keys, self.policy)
        elif settings.color_jitter > 0:
            self._jitter(pictures, keys)
        result = _normalise(pictures, settings.mean, settings.std, settings.size)
        self._erase(result, keys)
        return torch.from_numpy(result)

    def _crop(self, pictures: Pictures, keys: Keys) -> Pictures:
        """A window of the picture's own size anywhere in the padded one; always a copy."""
        pad, (number, channels, height, width) = self.augmentation.padding, pictures.shape
        if pad == 0:
            return pictures.copy(order="C")
        if self.augmentation.padding_mode == "zero":
            padded = np.zeros((number, channels, height + 2 * pad, width + 2 * pad), np.uint8)
            padded[:, :, pad : pad + height, pad : pad + width] = pictures
        else:
            if pad >= min(height, width):
                raise HVTError(f"reflect padding of {pad} needs pictures larger than {pad} pixels.")
            padded = np.pad(pictures, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="reflect")
        top, left = (uniform(keys, 2, _CROP) * (2 * pad + 1)).astype(np.intp).T
        windows = sliding_window_view(padded, (height, width), axis=(2, 3))
        # (B, C, 2 pad + 1, 2 pad + 1, H, W) → (B, C, H, W)
        return np.ascontiguousarray(windows.swapaxes(1, 3)[np.arange(number), left, top])

    def _flip(self, pictures: Pictures, keys: Keys) -> None:
        chosen = np.flatnonzero(uniform(keys, 1, _FLIP)[:, 0] < self.augmentation.flip)
        pictures[chosen] = pictures[chosen][..., ::-1]

    def _rand_augment(self, pictures: Pictures, keys: Keys, policy: RandAugment) -> None:
        """timm's RandAugment: some operations per picture, drawn with replacement."""
        numbers = uniform(keys, 4 * policy.layers, _RAND_AUGMENT)
        for layer in range(policy.layers):
            which, whether, level, sign = numbers[:, 4 * layer : 4 * layer + 4].T
            codes = (which * len(OPS)).astype(np.intp)
            codes[whether >= policy.probability] = NOTHING
            arguments = policy.arguments(codes, policy.levels(level), sign >= 0.5)
            ops.apply(pictures, codes, arguments, self.fill)

    def _jitter(self, pictures: Pictures, keys: Keys) -> None:
        """torchvision's ColorJitter without hue: three factors, in an order drawn for each."""
        numbers = uniform(keys, 6, _JITTER)
        reach = self.augmentation.color_jitter
        low = max(0.0, 1 - reach)
        factors = low + (1 + reach - low) * numbers[:, :3]
        codes = np.array([CODE["Brightness"], CODE["Contrast"], CODE["Color"]])
        for turn in np.argsort(numbers[:, 3:], axis=1).T:
            ops.apply(pictures, codes[turn], factors[np.arange(len(turn)), turn], self.fill)

    def _erase(self, result: NDArray[np.float32], keys: Keys) -> None:
        """timm's RandomErasing in pixel mode: noise in a rectangle of 2 … 33 % of the area."""
        height, width = result.shape[2:]
        number, top, left, high, wide = _boxes(keys, self.augmentation.erase, height, width)
        rows, columns = np.arange(height)[:, None], np.arange(width)
        top, left, high, wide = (part[:, None, None] for part in (top, left, high, wide))
        inside = (rows >= top) & (rows < top + high) & (columns >= left) & (columns < left + wide)
        box, pixel = np.nonzero(inside.reshape(-1, height * width))
        words = _bits(keys[number][box], pixel.astype(np.uint64), _NOISE)
        first = number[box] * (result.shape[1] * height * width) + pixel  # in channel 0
        for channel in range(result.shape[1]):  # 16 of the 64 bits each
            noise = _normal_table()[(words >> np.uint64(16 * channel)) & np.uint64(0xFFFF)]
            result.reshape(-1)[first + channel * height * width] = noise


def _boxes(keys: Keys, probability: float, height: int, width: int) -> tuple[NDArray[np.intp], ...]:
    """timm's rectangles to erase: which pictures, and for each top, left, height and width.

    As there, a rectangle that does not fit is drawn again, ten times at most.
    """
    tries = 10
    chosen = np.flatnonzero(uniform(keys, 1, _ERASE)[:, 0] < probability)
    numbers = uniform(keys[chosen], 4 * tries, _BOX).reshape(-1, tries, 4)
    size, shape, down, across = numbers.transpose(2, 0, 1)
    area = (0.02 + (1 / 3 - 0.02) * size) * height * width
    aspect = np.exp(np.log(0.3) * (1 - 2 * shape))  # log-uniform in 0.3 … 1 / 0.3
    high, wide = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (high < height) & (wide < width)
    boxes = np.stack(
        [np.floor(down * (height - high + 1)), np.floor(across * (width - wide + 1)), high, wide]
    )
    first = fits.argmax(axis=1)
    top, left, high, wide = boxes[:, np.arange(len(chosen)), first][:, fits.any(axis=1)]
    edges = (part.astype(np.intp) for part in (top, left, high, wide))
    return (chosen[fits.any(axis=1)], *edges)
