"""RandAugment's operations on many small pictures at once, each with its own strength.

Pictures are planar uint8 arrays (N, C, H, W). The arithmetic is PIL's, to the bit for the colour
operations, so that a recipe tuned with timm keeps its meaning. Everything is numpy: one thread, no
float sum over pictures, so a picture's result cannot depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Rule = TypeVar("Rule")
Pictures = NDArray[np.uint8]  # (N, C, H, W)
Tables = NDArray[np.uint8]  # (N, C or 1, 256): what becomes of each grey level
Codes = NDArray[np.intp]  # (N,): places in OPS
Arguments = NDArray[np.float64]  # (N,)
Fill = tuple[int, ...]  # a grey level per channel

# In the order of timm's list, which names them with and without "Increasing".
OPS = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
CODE = {name: code for code, name in enumerate(OPS)}
NOTHING = -1

_LEVELS = np.arange(256, dtype=np.float32)
_WHOLE = np.uint64(1 << 13)


def apply(pictures: Pictures, codes: Codes, arguments: Arguments, fill: Fill) -> None:
    """Change each picture in place by the operation of its code (`NOTHING` leaves it).

    `fill` is the colour that geometric operations put where there was no picture. Operations of
    one family share one pass: look-up in a table, affine sampling, blending with another picture.
    """
    for members, family in _FAMILIES:
        chosen = np.flatnonzero(members[codes])
        if len(chosen):
            pictures[chosen] = family(pictures[chosen], codes[chosen], arguments[chosen], fill)


def _of_each(codes: Codes, rules: dict[str, Rule]) -> list[tuple[Rule, NDArray[np.intp]]]:
    """Each operation of a family that occurs, with the pictures it is for."""
    members = [(rule, np.flatnonzero(codes == CODE[name])) for name, rule in rules.items()]
    return [(rule, which) for rule, which in members if len(which)]


def _blend(base: NDArray[Any], other: NDArray[Any], factor: Arguments) -> NDArray[np.uint8]:
    """`base + factor (other − base)`, cut off (not rounded) to a grey level, as PIL does."""
    weight = factor.astype(np.float32).reshape(-1, *(1,) * (other.ndim - 1))
    start = base.astype(np.float32)
    mixed = start + weight * (other.astype(np.float32) - start)
    return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def _grey(pictures: Pictures) -> Pictures:
    """The luma of PIL's mode L: (N, C, H, W) → (N, 1, H, W)."""
    if pictures.shape[1] == 1:
        return pictures
    red, green, blue = (pictures[:, c : c + 1].astype(np.uint32) for c in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


# ── through a table of grey levels ──────────────────────────────────────────────────────────────


def _auto_contrast(pictures: Pictures, _: Arguments) -> Tables:
    low = pictures.min(axis=(2, 3), keepdims=True)[..., 0].astype(np.float64)  # (N, C, 1)
    high = pictures.max(axis=(2, 3), keepdims=True)[..., 0].astype(np.float64)
    flat = high == low
    scale = 255.0 / np.where(flat, 255.0, high - low)
    stretched = np.arange(256) * scale + np.where(flat, 0.0, -low * scale)
    return np.clip(stretched, 0, 255).astype(np.uint8)


def _equalize(pictures: Pictures, _: Arguments) -> Tables:
    planes = pictures.shape[0] * pictures.shape[1]
    values = pictures.reshape(planes, -1)
    at = values + 256 * np.arange(planes)[:, None]
    count = np.bincount(at.ravel(), minlength=256 * planes).reshape(planes, 256)
    brightest = np.take_along_axis(count, values.max(axis=1)[:, None].astype(np.intp), axis=1)
    step = (values.shape[1] - brightest) // 255  # 0 also when there is but one level
    below = np.cumsum(count, axis=1) - count
    table = np.minimum((step // 2 + below) // np.maximum(step, 1), 255)
    table = np.where(step == 0, np.arange(256), table)
    return table.astype(np.uint8).reshape(*pictures.shape[:2], 256)


def _invert(pictures: Pictures, _: Arguments) -> Tables:
    return np.broadcast_to(255 - np.arange(256, dtype=np.uint8), (len(pictures), 1, 256))


def _posterize(_: Pictures, bits: Arguments) -> Tables:
    dropped = (8 - np.clip(bits, 0, 8)).astype(np.int64)[:, None, None]
    return ((np.arange(256) >> dropped) << dropped).astype(np.uint8)


def _solarize(_: Pictures, threshold: Arguments) -> Tables:
    level = np.arange(256)
    kept = level < threshold[:, None, None]
    return np.where(kept, level, 255 - level).astype(np.uint8)


def _solarize_add(_: Pictures, added: Arguments) -> Tables:
    level = np.arange(256)
    raised = np.minimum(255, level + added[:, None, None])
    return np.where(level < 128, raised, level).astype(np.uint8)


def _contrast(pictures: Pictures, factor: Arguments) -> Tables:
    grey = _grey(pictures)[:, 0]
    total = grey.sum(axis=(1, 2), dtype=np.int64)
    pixels = grey.shape[1] * grey.shape[2]
    mean = (2 * total + pixels) // (2 * pixels)  # rounded half up, in whole numbers
    return _blend(mean[:, None, None], _LEVELS[None, None], factor)


def _brightness(_: Pictures, factor: Arguments) -> Tables:
    return _blend(np.zeros((1, 1, 1)), _LEVELS[None, None], factor)


_TABLES: dict[str, Callable[[Pictures, Arguments], Tables]] = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Contrast": _contrast,
    "Brightness": _brightness,
}


def _look_up(pictures: Pictures, codes: Codes, arguments: Arguments, _: Fill) -> Pictures:
    planes = pictures.shape[0] * pictures.shape[1]
    tables = np.empty((*pictures.shape[:2], 256), np.uint8)
    for table, which in _of_each(codes, _TABLES):
        tables[which] = table(pictures[which], arguments[which])
    at = pictures.reshape(planes, -1) + 256 * np.arange(planes)[:, None]
    return tables.reshape(-1).take(at).reshape(pictures.shape)


# ── by sampling elsewhere in the picture ────────────────────────────────────────────────────────
#
# A matrix (a, b, c, d, e, f) takes the value at (x, y) from (ax + by + c, dx + ey + f), in pixels
# from the upper left corner, a pixel's centre being at a half.


def _rotate(degrees: Arguments, width: int, height: int) -> NDArray[np.float64]:
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    x, y = width / 2, height / 2
    return np.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], axis=1)


def _one(column: int) -> Callable[[Arguments, int, int], NDArray[np.float64]]:
    """A matrix that is the identity but for one entry; shifts are shares of the side."""

    def matrix(argument: Arguments, width: int, height: int) -> NDArray[np.float64]:
        entries = np.tile([1.0, 0, 0, 0, 1.0, 0], (len(argument), 1))
        entries[:, column] = argument * {2: width, 5: height}.get(column, 1)
        return entries

    return matrix


_MATRICES: dict[str, Callable[[Arguments, int, int], NDArray[np.float64]]] = {
    "Rotate": _rotate,
    "ShearX": _one(1),
    "ShearY": _one(3),
    "TranslateXRel": _one(2),
    "TranslateYRel": _one(5),
}


def _transform(pictures: Pictures, codes: Codes, arguments: Arguments, fill: Fill) -> Pictures:
    """Bilinear sampling; outside the picture lies `fill`, with a hard edge, as in PIL."""
    number, channels, height, width = pictures.shape
    matrices = np.empty((number, 6))
    for matrix, which in _of_each(codes, _MATRICES):
        matrices[which] = matrix(arguments[which], width, height)
    a, b, c, d, e, f = matrices.astype(np.float32).T[..., None, None]
    across = np.arange(width, dtype=np.float32) + np.float32(0.5)
    down = np.arange(height, dtype=np.float32)[:, None] + np.float32(0.5)
    x = a * across + (b * down + c)  # (N, H, W)
    y = d * across + (e * down + f)
    outside = (x < 0) | (x >= width) | (y < 0) | (y >= height)
    # Beyond the outermost centres the nearest pixel counts alone.
    x = np.clip(x - np.float32(0.5), 0, width - 1)
    y = np.clip(y - np.float32(0.5), 0, height - 1)
    left, top = x.astype(np.int32), y.astype(np.int32)

    # A pixel is one word of three 21-bit lanes, so that its channels are fetched and weighted
    # together: a lane holds 255 times the whole weight, which is 2¹³. Weights are cut off, not
    # rounded: then all four are at least 0, and no lane borrows from the next.
    x, y = (x - left) * np.float32(_WHOLE), (y - top) * np.float32(_WHOLE)
    lower_right = (x * y * np.float32(1 / _WHOLE)).astype(np.uint64)
    right, lower = x.astype(np.uint64), y.astype(np.uint64)
    at = (top * width + left + height * width * np.arange(number)[:, None, None]).astype(np.intp)
    beside, below = left < width - 1, np.where(top < height - 1, width, 0)
    words = pictures[:, 0].astype(np.uint64)
    for channel in range(1, channels):
        words |= pictures[:, channel].astype(np.uint64) << np.uint64(21 * channel)
    words = words.reshape(-1)
    mixed = words.take(at) * (_WHOLE - right - lower + lower_right)
    mixed += words.take(at + beside) * (right - lower_right)
    at += below
    mixed += words.take(at) * (lower - lower_right)
    mixed += words.take(at + beside) * lower_right

    sampled = np.empty_like(pictures)
    for channel in range(channels):
        lane = (mixed >> np.uint64(21 * channel + 13)).astype(np.uint8)  # cut off, as in PIL
        sampled[:, channel] = np.where(outside, np.uint8(fill[channel]), lane)
    return sampled


# ── by blending with another picture ────────────────────────────────────────────────────────────


def _smooth(pictures: Pictures) -> Pictures:
    """PIL's SMOOTH: the 3×3 mean with the centre counted five times; the border stays."""
    x = pictures.astype(np.uint16)
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[:, :, 1:-1, 1:-1]
    smooth = pictures.copy()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26  # total / 13, rounded
    return smooth


_BLENDS: dict[str, Callable[[Pictures], Pictures]] = {"Color": _grey, "Sharpness": _smooth}


def _blend_with(pictures: Pictures, codes: Codes, factors: Arguments, _: Fill) -> Pictures:
    blended = np.empty_like(pictures)
    for other, which in _of_each(codes, _BLENDS):
        blended[which] = _blend(other(pictures[which]), pictures[which], factors[which])
    return blended


def _codes(rules: dict[str, Any]) -> NDArray[np.bool_]:
    """For each code, whether it is of this family; the last place answers for `NOTHING`."""
    return np.array([name in rules for name in (*OPS, None)])


_FAMILIES = (
    (_codes(_TABLES), _look_up),
    (_codes(_MATRICES), _transform),
    (_codes(_BLENDS), _blend_with),
)
