"""Pictures from strangers: their size is known before a pixel of them is decoded."""

from __future__ import annotations

import functools
import io

from PIL import Image, UnidentifiedImageError

from ..data.pictures import finish, picture_formats, why
from .refusals import TooLarge, Unusable, WrongType

# What people send. The other formats that Pillow reads are rare, and each is code to attack.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")


def open_safely(content: bytes, max_pixels: int, side: int, what: str) -> Image.Image:
    """A picture of which the header was read and nothing decoded; a refusal calls it `what`.

    `side` is what the shorter side will be resized to: of a long strip that is a giant, too.
    """
    if not content:
        raise Unusable(f"{what} is empty")
    try:
        image = Image.open(io.BytesIO(content), formats=known_formats())
    except UnidentifiedImageError as error:
        known = ", ".join(known_formats())
        raise WrongType(f"{what} is in no known format: use {known}") from error
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{what} has more than the {max_pixels} pixels allowed") from error
    except Exception as error:  # damaged headers raise all sorts
        raise Unusable(f"{what} is damaged: {why(error)}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise TooLarge(f"{what} has {width} × {height} pixels, more than the {max_pixels} allowed")
    if side**2 * max(width, height) > max_pixels * min(width, height):
        raise TooLarge(
            f"{what} has {width} × {height} pixels, too long a strip: resized to a shorter side "
            f"of {side} it would have more than the {max_pixels} pixels allowed"
        )
    return image


def decode(image: Image.Image, in_chans: int, what: str) -> Image.Image:
    """What an opened picture shows, as `hvt predict` sees it."""
    try:
        with image:
            return finish(image, in_chans)
    except Exception as error:
        raise Unusable(f"{what} is damaged: {why(error)}") from error


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow decodes."""
    return tuple(name for name in FORMATS if name in picture_formats())
