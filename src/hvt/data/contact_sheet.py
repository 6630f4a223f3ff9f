"""Images side by side with a caption each, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..files import atomic_write
from ..terminal import printable
from .images import UnreadableImageError, read_image

SIDE, LINE = 160, 14


def thumbnail(path: str | Path, side: int = SIDE) -> Image.Image:
    """An image within a square of `side` pixels; grey where it cannot be read."""
    try:
        image = read_image(Path(path), 3)
    except UnreadableImageError:
        return Image.new("RGB", (side, side), "lightgrey")
    return ImageOps.pad(image, (side, side), color="white")


def draw_contact_sheet(
    output: Path, images: Sequence[tuple[str | Path, Sequence[str]]], columns: int = 6
) -> None:
    """Write a PNG of images, each with its lines of text."""
    lines = max((len(caption) for _, caption in images), default=0)
    height = SIDE + LINE * lines + 8
    rows = max(1, -(-len(images) // columns))
    sheet = Image.new("RGB", (columns * (SIDE + 8), rows * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(LINE - 3)
    for number, (path, caption) in enumerate(images):
        left, top = number % columns * (SIDE + 8) + 4, number // columns * height + 4
        sheet.paste(thumbnail(path), (left, top))
        for place, text in enumerate(caption):
            shown = printable(text)
            while shown and font.getlength(shown) > SIDE:
                shown = shown[:-2] + "…" if len(shown) > 2 else ""
            draw.text((left, top + SIDE + LINE * place), shown, "black", font)
    with atomic_write(output) as temporary:
        sheet.save(temporary, "PNG")
