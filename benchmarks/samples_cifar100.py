"""Sample images of some of CIFAR-100's classes, which `samples.py` writes."""

from __future__ import annotations

import math

import numpy as np
from painting import (
    Array,
    Painter,
    X,
    Y,
    between,
    ellipse,
    lit,
    paint,
    polygon,
    ridge,
    rounded,
    sky,
    soft,
    waves,
)  # fmt: skip


def apple(rng: np.random.Generator) -> Array:
    image = lit(46, 40, 90, (255, 255, 255), (250, 250, 248), (232, 232, 228))
    paint(image, soft(ellipse(53, 89, 30, 4), 3), (120, 112, 108), 0.7)
    half = [(62, 22), (77, 25), (88, 39), (88, 57), (80, 75), (67, 87), (56, 89)]
    body = rounded([(50, 27), *half, (50, 87), *((100 - x, y) for x, y in reversed(half))])
    paint(image, body, lit(38, 40, 66, (226, 64, 48), (196, 28, 34), (150, 12, 26), (88, 4, 18)))
    blush = soft(ellipse(62, 40, 15, 19, -20), 7) * body
    paint(image, blush, (226, 190, 84), 0.75)
    streaks = np.clip(waves(rng, 16, 0.25) - 0.2, 0, 1) * body
    paint(image, streaks, (170, 20, 30), 0.3)
    paint(image, soft(ellipse(50, 27, 14, 4), 2) * body, (112, 84, 24), 0.9)
    paint(image, soft(ellipse(30, 41, 5, 10, 24), 2.4), (255, 232, 224), 0.7)
    stem = rounded([(49, 29), (48, 19), (52, 9), (56, 10), (53, 19), (52, 29)])
    paint(image, stem, (88, 58, 32))
    return image


def sunflower(rng: np.random.Generator) -> Array:
    image = sky((86, 150, 214), (150, 196, 232), (178, 206, 190))
    paint(image, soft(polygon([(0, 76), (100, 70), (100, 100), (0, 100)]), 5), (74, 116, 50))
    paint(image, rounded([(47, 60), (53, 60), (55, 100), (46, 100)]), (72, 124, 44))
    for side in (-1, 1):
        leaf = rounded([(50, 92), (50 + 16 * side, 80), (50 + 38 * side, 84), (50 + 22 * side, 94)])
        paint(image, leaf, between((Y - 78) / 18, (110, 164, 62), (52, 100, 36)))
    for ring, (length, wide, dark, bright) in enumerate(
        [(40, 6.6, (222, 150, 10), (248, 190, 24)), (34, 6.0, (246, 186, 16), (255, 222, 60))]
    ):
        for k in range(20):
            turn = k * 18 + 9 * ring + rng.normal() * 2
            cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
            far = length * (1 + 0.05 * rng.normal())
            along = [(0.28, 0.5), (0.62, 1.0), (0.85, 0.62), (1.0, 0.0)]
            outline = [(far * a, wide * w) for a, w in along]
            outline += [(far * a, -wide * w) for a, w in reversed(along[:-1])]
            petal = rounded([(50 + a * cos - w * sin, 46 + a * sin + w * cos) for a, w in outline])
            colours = between(np.hypot(X - 50, Y - 46) / far, (196, 110, 4), dark, bright)
            paint(image, petal, colours)
    heart = ellipse(50, 46, 17, 17)
    paint(image, soft(heart, 1.6), (120, 64, 8), 0.9)
    paint(image, heart, lit(48, 43, 20, (60, 36, 18), (92, 54, 20), (54, 28, 8)))
    for k in range(150):  # seeds, on a golden spiral
        r, a = 16 * math.sqrt(k / 150), k * 2.39996
        seed = ellipse(50 + r * math.cos(a), 46 + r * math.sin(a), 0.8, 0.8)
        paint(image, seed, (160, 104, 40) if k % 3 else (36, 20, 8), 0.8)
    return image


def rocket(rng: np.random.Generator) -> Array:
    image = sky((30, 78, 152), (76, 132, 198), (150, 190, 222))
    for cx, cy, r in [(20, 96, 14), (36, 97, 16), (64, 97, 16), (82, 96, 14), (50, 94, 14)]:
        smoke = lit(cx - 4, cy - 8, 24, (255, 250, 240), (226, 220, 216), (176, 172, 178))
        paint(image, soft(ellipse(cx, cy, r, r * 0.7), 2), smoke)
    paint(image, soft(ellipse(50, 86, 12, 14), 5), (255, 190, 90), 0.7)
    for wide, tip, colour in [
        (8, 99, (255, 170, 50)),
        (5.5, 94, (255, 226, 120)),
        (3, 87, (255, 255, 235)),
    ]:
        edge = [(wide, 74), (wide * 0.8, 84)]
        flame = rounded(
            [*((50 + x, y) for x, y in edge), (50, tip), *((50 - x, y) for x, y in edge[::-1])]
        )
        paint(image, soft(flame, 0.9), colour, 0.95)
    metal = ((198, 204, 214), (255, 255, 255), (236, 238, 242), (140, 146, 160))
    for side in (-1, 1):  # boosters, and fins behind the body
        x = 50 + 12 * side
        booster = rounded([(x, 36), (x + 3, 43), (x + 3, 74), (x - 3, 74), (x - 3, 43)])
        paint(image, booster, between((X - x + 3) / 6, *metal))
        fin = polygon([(50 + 14 * side, 62), (50 + 21 * side, 78), (50 + 14 * side, 75)])
        paint(image, fin, (176, 44, 38) if side < 0 else (132, 28, 28))
    body = polygon([(42.5, 22), (57.5, 22), (57.5, 75), (42.5, 75)])
    paint(image, body, between((X - 42.5) / 15, *metal))
    nose = rounded([(42.5, 23), (44, 14), (50, 2), (56, 14), (57.5, 23), (50, 24)])
    paint(image, nose, between((X - 42.5) / 15, (196, 60, 50), (226, 84, 70), (140, 30, 30)))
    for y in (34, 60):
        band = polygon([(40, y), (60, y), (60, y + 3), (40, y + 3)])
        paint(image, body * band, (44, 48, 60), 0.9)
    paint(image, ellipse(50, 46, 4.2, 4.2), (60, 68, 84))
    paint(image, ellipse(50, 46, 3.1, 3.1), lit(48.5, 44.5, 6, (190, 226, 248), (58, 110, 168)))
    return image


def sea(rng: np.random.Generator) -> Array:
    image = sky((92, 152, 214), (164, 202, 236), (226, 236, 244), to=46)
    for cy, wide in [(14, 3.0), (26, 4.0), (36, 5.0)]:
        veil = np.clip(waves(rng, 30, wide) * np.exp(-(((Y - cy) / 6) ** 2)), 0, 1)
        paint(image, veil, (255, 255, 255), 0.6)
    water = polygon([(0, 46), (100, 46), (100, 100), (0, 100)])
    paint(image, water, between((Y - 46) / 54, (58, 118, 170), (26, 92, 148), (10, 62, 112)))
    depth = np.clip((Y - 46) / 54, 0, 1)
    swell = np.sin((2.2 + 24 * depth**0.6) * 2 + waves(rng, 12, 3) * 1.1)
    image += (water * swell * (4 + 12 * depth))[..., None] * np.array([0.7, 1.0, 1.0])
    crest = water * np.clip(waves(rng, 70, 4) - 1.1, 0, 1) * (0.4 + depth)
    paint(image, np.clip(crest, 0, 1), (232, 244, 250), 0.75)
    return image


def mountain(rng: np.random.Generator) -> Array:
    image = sky((84, 142, 206), (150, 192, 230), (214, 230, 242), to=70)
    far = ridge(rng, 66, 14, [(12, 44), (88, 40)])
    paint(image, far, between((Y - 40) / 30, (120, 142, 172), (150, 170, 192)))
    peak = ridge(rng, 82, 16, [(52, 14), (30, 38), (72, 34)])
    paint(image, peak, between((Y - 14) / 64, (112, 116, 130), (84, 92, 104), (70, 84, 78)))
    # The sun stands on the left: each slope has a bright side and a dark one.
    folds = waves(rng, 34, 0.5) + 0.6 * waves(rng, 90, 0.6)
    bright = np.clip((52 - X + 3 * folds) / 5, 0, 1)
    paint(image, peak * bright, (150, 154, 164), 0.7)
    paint(image, peak * np.clip(folds - 0.4, 0, 1), (58, 64, 78), 0.55)
    snow = peak * np.clip((40 + 9 * folds - np.abs(X - 52) * 0.3 - Y) / 4, 0, 1)
    paint(image, snow, (170, 188, 216))
    paint(image, snow * bright, (248, 250, 254))
    hills = ridge(rng, 86, 6, [(20, 74), (84, 72)])
    paint(image, hills, between((Y - 72) / 28, (62, 92, 62), (40, 68, 42)))
    paint(image, hills * np.clip(waves(rng, 60, 0.6), 0, 1), (26, 50, 32), 0.6)
    return image


def clock(rng: np.random.Generator) -> Array:
    image = lit(40, 30, 110, (250, 248, 244), (236, 232, 224), (212, 206, 196))
    paint(image, soft(ellipse(54, 54, 42, 42), 3), (110, 100, 92), 0.6)
    paint(
        image, ellipse(50, 50, 42, 42), lit(30, 26, 90, (92, 96, 108), (40, 42, 50), (18, 18, 22))
    )
    paint(
        image,
        ellipse(50, 50, 37, 37),
        lit(44, 42, 60, (255, 255, 255), (250, 249, 245), (226, 224, 218)),
    )
    for hour in range(12):
        a = hour * math.pi / 6
        large = hour % 3 == 0
        inner, wide = (27, 1.5) if large else (30, 0.9)
        cos, sin = math.sin(a), -math.cos(a)
        outline = [(r, w) for r, w in ((inner, -wide), (34, -wide), (34, wide), (inner, wide))]
        mark = polygon([(50 + r * cos - w * sin, 50 + r * sin + w * cos) for r, w in outline])
        paint(image, mark, (24, 24, 28))
    for degrees, far, wide, colour in [
        (305, 20, 2.0, (20, 20, 24)),
        (60, 29, 1.5, (20, 20, 24)),
        (190, 31, 0.6, (206, 38, 34)),
    ]:
        a = math.radians(degrees)
        cos, sin = math.sin(a), -math.cos(a)
        outline = [(-5, -wide), (far, -wide * 0.5), (far, wide * 0.5), (-5, wide)]
        hand = polygon([(50 + r * cos - w * sin, 50 + r * sin + w * cos) for r, w in outline])
        paint(image, hand, colour)
    paint(image, ellipse(50, 50, 2.6, 2.6), (30, 30, 34))
    return image


IMAGES: dict[str, Painter] = {
    "apple": apple,
    "sunflower": sunflower,
    "rocket": rocket,
    "clock": clock,
    "mountain": mountain,
    "sea": sea,
}
