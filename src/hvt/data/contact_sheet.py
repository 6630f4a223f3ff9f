"""Images side by side with a caption each, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..files import atomic_write
from ..terminal import printable
from .images import FileImages, UnreadableImageError, read_image

SIDE, LINE = 160, 14


def thumbnail(image: Path | Image.Image) -> Image.Image:
    """An image, or a file of one, in a square; grey where it cannot be read."""
    try:
        opened = read_image(image, 3) if isinstance(image, Path) else image.convert("RGB")
    except UnreadableImageError:
        return Image.new("RGB", (SIDE, SIDE), "lightgrey")
    return ImageOps.pad(opened, (SIDE, SIDE), color="white")


def draw_worst(output: Path, images: Any, worst: Sequence[Any], names: Sequence[str]) -> None:
    """Write a PNG of the images of a data set that a `Score` lists as `worst`."""
    if not worst:
        return
    shown = []
    for one in worst:
        caption = [f"{names[one.label]} → {names[one.predicted]}", f"loss {one.loss:.2f}"]
        if isinstance(images, FileImages):
            caption.append(images.path(one.place).name)
        shown.append((images[one.place][0], caption))
    draw_contact_sheet(output, shown)


def draw_contact_sheet(
    output: Path, images: Sequence[tuple[Path | Image.Image, Sequence[str]]], columns: int = 6
) -> None:
    """Write a PNG of images, each with its lines of text."""
    lines = max((len(caption) for _, caption in images), default=0)
    height = SIDE + LINE * lines + 8
    rows = max(1, -(-len(images) // columns))
    sheet = Image.new("RGB", (columns * (SIDE + 8), rows * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(LINE - 3)
    for number, (image, caption) in enumerate(images):
        left, top = number % columns * (SIDE + 8) + 4, number // columns * height + 4
        sheet.paste(thumbnail(image), (left, top))
        for place, text in enumerate(caption):
            shown = printable(text)
            while shown and font.getlength(shown) > SIDE:
                shown = shown[:-2] + "…" if len(shown) > 2 else ""
            draw.text((left, top + SIDE + LINE * place), shown, "black", font)
    with atomic_write(output) as temporary:
        sheet.save(temporary, "PNG")
