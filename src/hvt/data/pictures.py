"""How a file becomes a picture in red, green and blue, or in grey."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from ..errors import HVTError
from ..files import open_regular, printable

# Pillow recognises these and leaves the pixels to another program, or to nobody; PostScript would
# be executed.
_NOT_DECODED = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})
_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")


class BrokenPicture(HVTError):
    """A file that should be a picture and is not; `path` and `reason` are the message's parts.

    Made from one message, so that it crosses the border of a process.
    """

    path: str = ""
    reason: str = ""

    @classmethod
    def of(cls, path: str | Path, reason: str) -> BrokenPicture:
        name = printable(path)
        broken = cls(f"{name} cannot be read as a picture: {reason}")
        broken.path, broken.reason = name, reason
        return broken


@functools.cache
def picture_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that it decodes, the common ones first."""
    Image.init()
    return tuple(name for name in Image.ID if name in Image.OPEN and name not in _NOT_DECODED)


@functools.cache
def picture_extensions() -> frozenset[str]:
    """The endings, `.jpg` among them, of files that are taken for pictures."""
    formats = set(picture_formats())
    return frozenset(ext for ext, name in Image.registered_extensions().items() if name in formats)


def read_picture(
    file: str | Path | BinaryIO, in_chans: int = 3, *, name: str | None = None
) -> Image.Image:
    """The picture in a file, upright, as 8-bit RGB (3 channels) or grey (1 channel).

    Transparent parts show white. Of an animation it is the first frame. `name` is what an error
    calls a file that has no path.
    """
    mode_of(in_chans)  # a wrong number is the caller's mistake, not the picture's
    try:
        # What Pillow names by its path it would name twice in a message, so it gets a stream.
        if isinstance(file, str | Path):
            with open_regular(file) as stream:
                return _read(stream, in_chans)
        return _read(file, in_chans)
    except Exception as error:  # damaged files raise all sorts: struct.error, SyntaxError, …
        path = name or (file if isinstance(file, str | Path) else getattr(file, "name", None))
        raise BrokenPicture.of(path or "the file", why(error)) from error


def mode_of(in_chans: int) -> str:
    """Pillow's name of the mode with this many channels."""
    modes = {1: "L", 3: "RGB"}
    if in_chans not in modes:
        raise HVTError(f"in_chans={in_chans} is not understood: pictures have 3 channels or 1")
    return modes[in_chans]


def to_channels(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """A picture of any mode as 8-bit RGB or grey; transparent parts show white."""
    mode = mode_of(in_chans)
    if image.mode in _16_BIT or image.mode in ("I", "F"):
        return _to_8_bit(image).convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode == "LAB":  # the one mode that convert() does not know the way from
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    return image.convert(mode)


def _read(stream: BinaryIO, in_chans: int) -> Image.Image:
    if not stream.read(1):
        raise ValueError("the file is empty")
    stream.seek(0)
    with Image.open(stream, formats=picture_formats()) as image:
        return finish(image, in_chans)


def finish(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """An opened picture read to its end: upright, as 8-bit RGB or grey."""
    image.load()
    if 0 in image.size:
        raise ValueError("it has no pixels")
    with contextlib.suppress(Exception):  # damaged EXIF says nothing about the pixels
        ImageOps.exif_transpose(image, in_place=True)
    return to_channels(image, in_chans)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Greyscale with more than 8 bits per pixel as 8-bit greyscale."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    # Older Pillow opens 16-bit PNG as 32-bit, and PGM is scaled to 16 bits in all versions.
    if image.mode in _16_BIT or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = values / 257  # 65535 → 255
    elif low >= 0 and high <= 1 and image.mode == "F":
        values = values * 255
    elif low >= 0 and high <= 255:
        pass
    elif low >= 0 and high <= 65535:
        values = values / 257
    else:  # no range that a format defines: the picture's own
        values = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return Image.fromarray(np.rint(values).astype(np.uint8))


def why(error: Exception) -> str:
    """Why a picture cannot be read, without the path and in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "its content is not in a picture format"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()).rstrip(".")
    return text or type(error).__name__
