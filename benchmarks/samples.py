"""Paint the page's sample images, `src/hvt/serve/static/sample-*.jpg`.

    python benchmarks/samples.py [--out FOLDER] [--check]

Each shows a class of a built-in model. All of it is computed here, so the images belong to the
project as its code does. `--check` writes nothing and says what the models see in them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import samples_cifar100
import samples_imagenet
from painting import Painter
from PIL import Image

QUALITY = 88

BY_MODEL: dict[str, dict[str, Painter]] = {
    "imagenet": samples_imagenet.IMAGES,
    "cifar100": samples_cifar100.IMAGES,
}
IMAGES = {name: painter for images in BY_MODEL.values() for name, painter in images.items()}


def sample(name: str) -> Image.Image:
    """One of the images, always the same."""
    values = IMAGES[name](np.random.default_rng(7))
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def file_name(name: str) -> str:
    """`Granny Smith` → `sample-granny-smith.jpg`."""
    words = "".join(letter if letter.isalpha() else " " for letter in name.lower()).split()
    return f"sample-{'-'.join(words)}.jpg"


def main() -> None:
    default = Path(__file__).parents[1] / "src/hvt/serve/static"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--check", action="store_true", help="only say what the models see")
    args = parser.parse_args()
    if args.check:
        from hvt import Predictor

        for model, images in BY_MODEL.items():
            predictor = Predictor(model, top=3)
            for name in images:
                answer = predictor(sample(name))
                print(f"{name:16}", ", ".join(f"{g.name} {g.probability:.0%}" for g in answer.top))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for name in IMAGES:
        path = args.out / file_name(name)
        sample(name).save(path, quality=QUALITY, optimize=True)
        print(f"{path} ({path.stat().st_size / 1e3:.1f} kB)")


if __name__ == "__main__":
    main()
