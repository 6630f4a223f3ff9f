"""Sample images of some of ImageNet's classes, which `samples.py` writes."""

from __future__ import annotations

import math

import numpy as np
from painting import (
    Array,
    Colour,
    Painter,
    X,
    Y,
    between,
    ellipse,
    lit,
    paint,
    polygon,
    rounded,
    sky,
    soft,
    waves,
)  # fmt: skip


def meadow(rng: np.random.Generator, *colours: Colour) -> Array:
    """Grass out of focus."""
    image = sky(*colours)
    blur = waves(rng, 9) + 0.6 * waves(rng, 22, 0.6)
    return image * (1 + 0.12 * blur[..., None])


def sphere(cx: float, cy: float, r: float) -> tuple[Array, Array, Array, Array]:
    """A ball's mask, and where on the unit ball each of its pixels lies: x, y and z."""
    x, y = (X - cx) / r, (Y - cy) / r
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))
    return ellipse(cx, cy, r, r), x, y, z


def turned(
    x: Array, y: Array, z: Array, about_x: float, about_z: float
) -> tuple[Array, Array, Array]:
    a, b = math.radians(about_x), math.radians(about_z)
    x, y = x * math.cos(b) - y * math.sin(b), x * math.sin(b) + y * math.cos(b)
    y, z = y * math.cos(a) - z * math.sin(a), y * math.sin(a) + z * math.cos(a)
    return x, y, z


def shade(x: Array, y: Array, z: Array) -> Array:
    """Light from the upper left: 0.35 to 1."""
    return 0.35 + 0.65 * np.clip(-0.45 * x - 0.55 * y + 0.7 * z, 0, 1)


def granny_smith(rng: np.random.Generator) -> Array:
    image = lit(46, 40, 90, (255, 255, 255), (250, 250, 248), (230, 230, 228))
    paint(image, soft(ellipse(53, 89, 30, 4), 3), (112, 116, 104), 0.7)
    half = [(62, 22), (77, 25), (88, 39), (88, 57), (80, 75), (67, 87), (56, 89)]
    body = rounded([(50, 27), *half, (50, 87), *((100 - x, y) for x, y in reversed(half))])
    paint(
        image, body, lit(38, 40, 66, (196, 226, 90), (146, 196, 44), (100, 156, 24), (48, 92, 10))
    )
    dots = np.clip(waves(rng, 90) - 1.5, 0, 1) * body
    paint(image, dots, (232, 244, 180), 0.9)
    paint(image, soft(ellipse(62, 44, 13, 18, -20), 7) * body, (206, 226, 110), 0.5)
    paint(image, soft(ellipse(50, 27, 14, 4), 2) * body, (70, 96, 14), 0.9)
    paint(image, soft(ellipse(30, 41, 5, 10, 24), 2.2), (255, 255, 246), 0.9)
    paint(image, rounded([(49, 29), (48, 19), (52, 9), (56, 10), (53, 19), (52, 29)]), (96, 72, 36))
    return image


def daisy(rng: np.random.Generator) -> Array:
    image = meadow(rng, (66, 112, 44), (48, 92, 34), (34, 74, 28))
    paint(image, rounded([(48, 55), (52, 55), (56, 100), (50, 100)]), (92, 138, 56))
    for ring, far in enumerate((40, 36)):
        for k in range(17):
            turn = k * 360 / 17 + 10 * ring + rng.normal() * 2.5
            cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
            long = far * (1 + 0.05 * rng.normal())
            along = [(0.2, 0.35), (0.6, 0.95), (0.88, 0.9), (1.0, 0.25)]
            outline = [(long * a, 5.2 * w) for a, w in along]
            outline += [(long * a, -5.2 * w) for a, w in reversed(along)]
            petal = rounded([(50 + a * cos - w * sin, 47 + a * sin + w * cos) for a, w in outline])
            colours = between(
                np.hypot(X - 50, Y - 47) / long, (186, 194, 190), (240, 242, 244), (255, 255, 255)
            )
            paint(image, soft(petal, 0.7), (140, 150, 150), 0.55)
            paint(image, petal, colours)
    heart = ellipse(50, 47, 12.5, 12)
    paint(image, soft(ellipse(51, 49, 13, 12.5), 1.6), (120, 110, 80), 0.8)
    paint(image, heart, lit(46, 42, 20, (255, 226, 70), (246, 190, 20), (196, 124, 4)))
    for k in range(140):
        r, a = 11.6 * math.sqrt(k / 140), k * 2.39996
        bud = ellipse(50 + r * math.cos(a), 47 + r * math.sin(a), 0.7, 0.7)
        paint(image, bud, (255, 240, 130) if k % 3 else (190, 116, 0), 0.75)
    return image


def traffic_light(rng: np.random.Generator) -> Array:
    image = sky((92, 150, 214), (150, 192, 232), (206, 224, 240))
    veil = np.clip(waves(rng, 8, 2) * 0.6, 0, 1)
    paint(image, veil, (250, 252, 255), 0.6)
    paint(
        image,
        polygon([(46, 84), (54, 84), (54, 100), (46, 100)]),
        between((X - 46) / 8, (120, 124, 122), (70, 74, 72), (36, 38, 38)),
    )
    case = rounded(
        [(33, 8), (50, 5), (67, 8), (68, 46), (67, 86), (50, 89), (33, 86), (32, 46)], 16
    )
    paint(image, case, between((X - 32) / 36, (62, 66, 64), (40, 42, 42), (20, 22, 22)))
    lamps = [
        (22, ((255, 236, 210), (255, 92, 64), (236, 24, 20), (150, 4, 8))),
        (47, ((120, 100, 50), (92, 70, 20), (60, 44, 10), (36, 26, 6))),
        (72, ((50, 100, 76), (22, 66, 46), (12, 44, 30), (8, 28, 20))),
    ]
    for y, colours in lamps:
        paint(image, soft(ellipse(50, y, 12.5, 12.5), 0.8), (8, 8, 8))
        paint(image, ellipse(50, y, 10.6, 10.6), lit(47, y - 3, 13, *colours))
        hood = rounded(
            [
                (38, y),
                (39, y - 11),
                (50, y - 14.5),
                (61, y - 11),
                (62, y),
                (59, y - 7),
                (50, y - 10.5),
                (41, y - 7),
            ]
        )
        paint(image, hood, (18, 20, 20))
    paint(image, soft(ellipse(50, 22, 15, 15), 5), (255, 90, 60), 0.3)
    return image


def jack_o_lantern(rng: np.random.Generator) -> Array:
    image = lit(50, 60, 90, (70, 36, 14), (30, 16, 10), (8, 6, 8))
    paint(
        image,
        polygon([(0, 84), (100, 84), (100, 100), (0, 100)]),
        between((Y - 84) / 16, (70, 40, 18), (26, 14, 8)),
    )
    paint(image, soft(ellipse(50, 89, 42, 5), 3), (6, 4, 4), 0.8)
    for k in (-3, 3, -2, 2, -1, 1, 0):
        cx = 50 + 10.4 * k
        rib = ellipse(cx, 56, 15 - abs(k) * 1.2, 34 - 2.4 * k * k / 3)
        light = lit(cx - 2, 44, 40, (255, 158, 44), (232, 112, 16), (176, 70, 6), (92, 30, 2))
        paint(image, soft(rib, 0.6), (96, 34, 2), 0.8)
        paint(image, ellipse(cx, 56, 13.6 - abs(k) * 1.2, 33.4 - 2.4 * k * k / 3), light)
    paint(
        image,
        rounded([(45, 26), (46, 14), (40, 7), (48, 6), (54, 14), (56, 26)]),
        between((X - 42) / 14, (126, 140, 60), (70, 84, 30)),
    )
    eye = [(-9, 7), (0, -9), (9, 7)]
    holes = [
        [(33 + x, 47 + y) for x, y in eye],
        [(67 + x, 47 + y) for x, y in eye],
        [(46, 62), (50, 55), (54, 62)],
    ]
    mouth = [(20, 62), (30, 68), (35, 64), (39, 70), (46, 71), (46, 66), (54, 66), (54, 71),
             (61, 70), (65, 64), (70, 68), (80, 62),
             (75, 76), (66, 82), (62, 77), (57, 83), (43, 83), (38, 77), (34, 82),
             (25, 76)]  # fmt: skip
    for hole in (*holes, mouth):
        paint(image, soft(polygon(hole), 1.8), (255, 150, 30), 0.6)
        paint(image, polygon(hole), (120, 50, 4))
        inner = [(x * 0.97 + 50 * 0.03, y * 0.97 + 60 * 0.03) for x, y in hole]
        paint(
            image,
            polygon(inner),
            lit(50, 70, 40, (255, 250, 190), (255, 220, 90), (255, 170, 30)),
        )
    return image


def soccer_ball(rng: np.random.Generator) -> Array:
    image = meadow(rng, (70, 130, 50), (78, 146, 52), (64, 128, 42))
    blades = waves(rng, 128, 0.3)
    image *= 1 + 0.07 * blades[..., None]
    paint(image, soft(ellipse(56, 87, 34, 7), 3), (16, 44, 12), 0.8)
    ball, x, y, z = sphere(50, 49, 40)
    a, b, c = turned(x, y, z, 24, 14)
    golden = (1 + math.sqrt(5)) / 2
    corners = [(s, t * golden, 0.0) for s in (-1, 1) for t in (-1, 1)]  # of an icosahedron
    points = np.array([np.roll(corner, k) for corner in corners for k in range(3)])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    near = np.sort(np.stack([p[0] * a + p[1] * b + p[2] * c for p in points]), axis=0)
    light = shade(x, y, z)[..., None]
    paint(image, ball, light * np.array([250, 250, 250]))
    # Around each corner a pentagon; the seams of the white hexagons run between two corners, where
    # the nearest two are equally far.
    seams = (near[-1] - near[-2] < 0.02) & (near[-1] < 0.95)
    paint(image, soft(seams * ball, 0.2), (90, 90, 94), 0.9)
    paint(image, soft((near[-1] > 0.945) * ball, 0.25), light * 34)
    paint(image, soft(ellipse(35, 31, 8, 5, -40), 3), (255, 255, 255), 0.6)
    return image


def volcano(rng: np.random.Generator) -> Array:
    image = sky((40, 30, 58), (104, 56, 66), (214, 112, 62), (240, 158, 84))
    for cx, cy, r in [
        (50, 26, 9),
        (44, 18, 11),
        (57, 14, 12),
        (48, 6, 15),
        (62, 2, 15),
        (36, 4, 12),
    ]:
        smoke = lit(cx - 3, cy + 8, 24, (196, 96, 60), (104, 76, 78), (56, 48, 58))
        paint(image, soft(ellipse(cx, cy, r, r * 0.8), 2.4), smoke, 0.9)
    cone = polygon(
        [
            (0, 92),
            (22, 72),
            (38, 46),
            (43, 37),
            (57, 37),
            (62, 46),
            (80, 72),
            (100, 90),
            (100, 100),
            (0, 100),
        ]
    )
    folds = waves(rng, 40, 0.35) + 0.6 * waves(rng, 90, 0.5)
    paint(image, cone, between((X + 2 * folds) / 100, (78, 52, 48), (52, 38, 40), (26, 20, 26)))
    paint(image, cone * np.clip(folds - 0.3, 0, 1), (18, 12, 16), 0.5)
    fountain = rounded([(43, 38), (38, 26), (46, 14), (50, 6), (55, 15), (63, 27), (57, 38)])
    paint(image, soft(fountain, 3), (255, 96, 20), 0.85)
    paint(
        image,
        soft(rounded([(46, 38), (45, 26), (50, 14), (55, 26), (54, 38)]), 1.2),
        (255, 220, 110),
        0.95,
    )
    for _ in range(70):
        a, far = rng.normal() * 0.5, rng.uniform(8, 30)
        x, y = 50 + far * math.sin(a) * 1.3, 34 - far * math.cos(a)
        paint(image, ellipse(x, y, 0.5, 0.9), (255, 190, 80), 0.9)
    flows = (
        [(47, 38), (52, 38), (48, 52), (51, 66), (44, 84), (40, 100), (34, 100), (40, 82), (45, 66),
         (44, 52)],
        [(53, 38), (57, 38), (62, 54), (70, 70), (74, 88), (71, 88), (65, 70), (58, 54)],
    )  # fmt: skip
    for path in flows:
        flow = rounded(path)
        paint(image, soft(flow, 1.8), (255, 70, 10), 0.8)
        paint(
            image,
            soft(flow, 0.4) * cone,
            between((Y - 38) / 60, (255, 226, 120), (255, 130, 24), (214, 50, 10)),
        )
    return image


IMAGES: dict[str, Painter] = {
    "daisy": daisy,
    "Granny Smith": granny_smith,
    "jack-o'-lantern": jack_o_lantern,
    "soccer ball": soccer_ball,
    "traffic light": traffic_light,
    "volcano": volcano,
}
