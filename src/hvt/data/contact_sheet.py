"""Images side by side with a caption each, as one file."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..files import atomic_write
from ..terminal import printable
from .images import FileImages, UnreadableImageError, read_image

SIDE, LINE, COLUMNS = 160, 14, 6


def thumbnail(image: Path | Image.Image) -> Image.Image:
    """An image, or a file of one, in a square; grey where it cannot be read."""
    try:
        opened = read_image(image, 3) if isinstance(image, Path) else image.convert("RGB")
    except UnreadableImageError:
        return Image.new("RGB", (SIDE, SIDE), "lightgrey")
    return ImageOps.pad(opened, (SIDE, SIDE), color="white")


def thumbnail_url(path: Path) -> str:
    """The thumbnail of a file as the address of an image in a page."""
    buffer = io.BytesIO()
    thumbnail(path).save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def draw_worst(output: Path, images: Any, worst: Sequence[Any], names: Sequence[str]) -> None:
    """Write a PNG of the images of a data set that a `Score` lists as `worst`."""
    shown = []
    for one in worst:
        caption = [f"{names[one.label]} → {names[one.predicted]}", f"loss {one.loss:.2f}"]
        if isinstance(images, FileImages):
            caption.append(images.path(one.place).name)
        shown.append((images[one.place][0], caption))
    draw_contact_sheet(output, shown)


def draw_contact_sheet(
    output: Path, images: Sequence[tuple[Path | Image.Image, Sequence[str]]]
) -> None:
    """Write a PNG of images, each with its lines of text; without images, remove it."""
    if not images:
        output.unlink(missing_ok=True)
        return
    lines = max(len(caption) for _, caption in images)
    height = SIDE + LINE * lines + 8
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (SIDE + 8), rows * height), "white")
    draw, (font, arrow) = ImageDraw.Draw(sheet), _font()
    for number, (image, caption) in enumerate(images):
        left, top = number % COLUMNS * (SIDE + 8) + 4, number // COLUMNS * height + 4
        sheet.paste(thumbnail(image), (left, top))
        for place, text in enumerate(caption):
            shown = printable(text).replace("→", arrow)
            while shown and font.getlength(shown) > SIDE:
                shown = shown[:-2] + "…" if len(shown) > 2 else ""
            draw.text((left, top + SIDE + LINE * place), shown, "black", font)
    with atomic_write(output) as temporary:
        sheet.save(temporary, "PNG")


def _font() -> tuple[Any, str]:
    """matplotlib's font; without it, Pillow's, which has no arrow and only Latin letters."""
    with contextlib.suppress(ImportError):
        import matplotlib

        path = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
        return ImageFont.truetype(path, LINE - 3), "→"
    return ImageFont.load_default(LINE - 3), "->"
