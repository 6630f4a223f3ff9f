"""Images from strangers: what they cost is bounded before a pixel of them is decoded."""

from __future__ import annotations

import functools

from PIL import Image, UnidentifiedImageError

from ..data.images import image_formats, why
from .bounds import FORMATS, Bounds, ImageTooLargeError
from .decoder import Heavy, decode, finish_light, open_light
from .refusals import RequestError, TooLarge, UnprocessableImage, WrongType


def open_safely(content: bytes, bounds: Bounds, what: str) -> Image.Image | None:
    """An image of which the header was read and nothing decoded; a refusal calls it `what`.

    None if it is not to be decoded here.
    """
    try:
        return open_light(content, bounds)
    except Exception as error:  # damaged headers raise all sorts
        raise _refusal(error, what) from error


def finish_safely(image: Image.Image, in_chans: int, what: str) -> Image.Image:
    """What an opened image shows, as `hvt predict` sees it."""
    try:
        return finish_light(image, in_chans)
    except Heavy:
        raise
    except Exception as error:
        raise _refusal(error, what) from error


def read_safely(content: bytes, in_chans: int, bounds: Bounds, what: str) -> Image.Image:
    """The same from its bytes, in this thread or in a process that it waits for."""
    if not content:
        raise UnprocessableImage(f"{what} is empty")
    try:
        return decode(content, in_chans, bounds)
    except Exception as error:
        raise _refusal(error, what) from error


def _refusal(error: Exception, what: str) -> RequestError:
    if isinstance(error, UnidentifiedImageError):
        return WrongType(f"{what} is not in a known format: use {', '.join(known_formats())}")
    if isinstance(error, ImageTooLargeError | MemoryError | Image.DecompressionBombError):
        return TooLarge(f"{what} is too much: {why(error)}")
    return UnprocessableImage(f"{what} is damaged: {why(error)}")


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow decodes."""
    return tuple(name for name in FORMATS if name in image_formats())
