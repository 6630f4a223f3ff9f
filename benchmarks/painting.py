"""Tools to paint with: shapes, light and noise, for the page's sample images.

A mask is `(SIDE, SIDE)` from 0 to 1, an image is `(SIDE, SIDE, 3)` from 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SIDE = 256
FINE = 3  # shapes are drawn this many times larger, and averaged

Array = NDArray[np.float64]
Colour = tuple[int, int, int]
Points = Sequence[tuple[float, float]]
Painter = Callable[[np.random.Generator], Array]

# Lengths are hundredths of the image's side, from its upper left.
X, Y = np.meshgrid((np.arange(SIDE) + 0.5) * 100 / SIDE, (np.arange(SIDE) + 0.5) * 100 / SIDE)


def polygon(points: Points) -> Array:
    large = Image.new("L", (SIDE * FINE, SIDE * FINE))
    scale = SIDE * FINE / 100
    ImageDraw.Draw(large).polygon([(x * scale, y * scale) for x, y in points], fill=255)
    return np.asarray(large.reduce(FINE), dtype=np.float64) / 255


def rounded(points: Points, steps: int = 12) -> Array:
    """A closed curve through the points (Catmull-Rom)."""
    path, count = [], len(points)
    p = np.asarray(points, dtype=np.float64)
    for i in range(count):
        a, b, c, d = (p[(i + k) % count] for k in (-1, 0, 1, 2))
        for t in np.arange(steps) / steps:
            linear, square, cube = c - a, 2 * a - 5 * b + 4 * c - d, 3 * b - a - 3 * c + d
            x, y = b + 0.5 * t * (linear + t * (square + t * cube))
            path.append((float(x), float(y)))
    return polygon(path)


def ellipse(cx: float, cy: float, rx: float, ry: float, turn: float = 0) -> Array:
    """`turn` is in degrees, clockwise."""
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    angles = np.linspace(0, 2 * math.pi, 90, endpoint=False)
    x, y = rx * np.cos(angles), ry * np.sin(angles)
    return polygon(list(zip(cx + x * cos - y * sin, cy + x * sin + y * cos, strict=True)))


def soft(mask: Array, radius: float) -> Array:
    """A blurred mask, for shadows and light."""
    image = Image.fromarray((mask * 255).astype(np.uint8))
    blurred = image.filter(ImageFilter.GaussianBlur(radius * SIDE / 100))
    return np.asarray(blurred, dtype=np.float64) / 255


def paint(image: Array, mask: Array, colour: Colour | Array, strength: float = 1.0) -> None:
    share = (mask * strength)[..., None]
    image += share * (np.asarray(colour, dtype=np.float64) - image)


def between(share: Array, *colours: Colour) -> Array:
    """Colours blended along `share`, from 0 to 1."""
    stops = np.linspace(0, 1, len(colours))
    table = np.asarray(colours, dtype=np.float64)
    return np.stack([np.interp(share, stops, table[:, i]) for i in range(3)], axis=-1)


def sky(*colours: Colour, to: float = 100) -> Array:
    return between(Y / to, *colours)


def lit(cx: float, cy: float, r: float, *colours: Colour) -> Array:
    """Colours from a light at a place outwards, as on a ball."""
    return between(np.hypot(X - cx, Y - cy) / r, *colours)


def waves(rng: np.random.Generator, cells: int, stretch: float = 1) -> Array:
    """Smooth noise around 0; `stretch` makes it wider than high."""
    rows, cols = cells, max(2, round(cells / stretch))
    small = Image.fromarray(rng.normal(size=(rows, cols)).astype(np.float32))
    return np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64)


def ridge(rng: np.random.Generator, base: float, height: float, peaks: Points) -> Array:
    """A mountain range: straight slopes down from its peaks, roughened."""
    x = X[0]
    top = np.full(SIDE, base)
    for px, py in peaks:
        top = np.minimum(top, py + np.abs(x - px) * (base - py) / 34)
    rough = sum(
        np.interp(x, np.linspace(0, 100, n), rng.normal(size=n)) * height / n for n in (12, 30, 70)
    )
    outline = list(zip(x, top + rough, strict=True))
    return polygon([*outline, (100, 100), (0, 100)])
