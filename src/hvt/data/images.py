"""How a file becomes an image in red, green and blue, or in grey."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from ..errors import HVTError
from ..files import encodable, open_regular
from .bounds import FORMATS, Bounds, ImageTooLargeError, check_bounds, light_format
from .decoder import bands, decode_apart

_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
_PREFIX = 16  # bytes by which Pillow tells formats apart
_MAX_STREAM = 1_000_000_000  # bytes of what is not a regular file, and may have no end
# Where Pillow looks for the orientation of a JPEG; to look takes as long as to decode a small one.
_TURNED = frozenset(("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"))
_MAX_EXIF = 65_536  # bytes; the tags of more could each claim all of it, in a copy of their own


class UnreadableImageError(HVTError):
    """A file that should be an image and is not; `path` and `reason` are the message's parts.

    Made from one message, so that it crosses the border of a process.
    """

    path: str = ""
    reason: str = ""

    @classmethod
    def of(cls, path: str | Path, reason: str) -> UnreadableImageError:
        name = encodable(path)
        broken = cls(f"{name} cannot be read as an image: {reason}")
        broken.path, broken.reason = name, reason
        return broken


@functools.cache
def image_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow decodes, the common ones first."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def image_extensions() -> frozenset[str]:
    """The endings, `.jpg` among them, of files that are taken for images."""
    formats = set(image_formats())
    return frozenset(ext for ext, name in Image.registered_extensions().items() if name in formats)


def read_image(
    file: str | Path | BinaryIO, in_chans: int = 3, *, name: str | None = None
) -> Image.Image:
    """The image in a file, upright, as 8-bit RGB (3 channels) or grey (1 channel).

    Transparent parts show white. Of an animation it is the first frame. `name` is what an error
    calls a file that has no path.
    """
    return read_with_mode(file, in_chans, name=name)[0]


def read_with_mode(
    file: str | Path | BinaryIO, in_chans: int = 3, *, name: str | None = None
) -> tuple[Image.Image, str]:
    """The image in a file as `read_image` gives it, and Pillow's mode of what lies there."""
    mode_of(in_chans)  # a wrong number is the caller's mistake, not the image's
    try:
        # What Pillow names by its path it would name twice in a message, so it gets a stream.
        if isinstance(file, str | Path):
            with open_regular(file) as stream:
                return _read(stream, in_chans, os.path.abspath(file))  # noqa: PTH100 - as a str
        return _read(file, in_chans, None)
    except Exception as error:  # damaged files raise all sorts: struct.error, SyntaxError, …
        path = name or (file if isinstance(file, str | Path) else getattr(file, "name", None))
        raise UnreadableImageError.of(path or "the file", why(error)) from error


def _read(stream: BinaryIO, in_chans: int, path: str | None) -> tuple[Image.Image, str]:
    with contextlib.suppress(AttributeError, OSError):  # a pipe has no beginning to go back to
        stream.seek(0)
    content = stream.read(_PREFIX)
    if not content:
        raise ValueError("the file is empty")
    if path is not None:
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            if light_format(content, status.st_size) is None:
                _check_format(content, Bounds())
                return decode_apart(path, in_chans, Bounds())
            return decode(content + stream.read(status.st_size), in_chans)
    content += stream.read(_MAX_STREAM)
    if len(content) > _MAX_STREAM:
        raise ImageTooLargeError(f"it has more than {_MAX_STREAM} bytes")
    return decode(content, in_chans)


# Bounds are plain data without a state.
def decode(
    content: bytes,
    in_chans: int = 3,
    bounds: Bounds = Bounds(),  # noqa: B008
) -> tuple[Image.Image, str]:
    """The image of a file's content within bounds, and its mode there.

    It raises `ImageTooLargeError` above a bound, `UnidentifiedImageError` for what is not an image,
    and whatever Pillow does for what is damaged.
    """
    image = open_light(content, bounds)
    if image is not None:
        with contextlib.suppress(Heavy):
            return finish(image, in_chans)
    _check_format(content, bounds)
    return decode_apart(content, in_chans, bounds)


def open_light(content: bytes, bounds: Bounds) -> Image.Image | None:
    """An image of which the header was read; None if a process of its own should decode it."""
    name = light_format(content, len(content))
    if name is None or name not in bounds.formats:
        return None
    file = io.BytesIO(content)
    image = Image.open(file, formats=(name,))
    return image if check_bounds(image, file, bounds) else None


def _check_format(content: bytes, bounds: Bounds) -> None:
    """Refuse what Pillow cannot know by its first bytes, before a process is troubled with it."""
    for name in image_formats():
        accept = Image.OPEN[name][1]
        if name in bounds.formats and (accept is None or accept(content[:_PREFIX])):
            return
    raise UnidentifiedImageError


def decode_here(file: BinaryIO, in_chans: int, bounds: Bounds) -> tuple[Image.Image, str]:
    """The same as `decode`, in this process, however long that takes."""
    with Image.open(file, formats=[f for f in image_formats() if f in bounds.formats]) as image:
        check_bounds(image, file, bounds)
        return finish(image, in_chans, most_exif=None)


class Heavy(Exception):
    """What came to light only while an image was decoded."""


def finish(
    image: Image.Image, in_chans: int = 3, most_exif: int | None = _MAX_EXIF
) -> tuple[Image.Image, str]:
    """An opened image read to its end: upright, as 8-bit RGB or grey; and its mode before."""
    source_mode = image.mode
    with image:
        image.load()
        if 0 in image.size:
            raise ValueError("it has no pixels")
        exif = len(image.info.get("exif") or image.info.get("Raw profile type exif") or b"")
        if most_exif is not None and exif > most_exif:
            raise Heavy
        if image.format != "JPEG" or not _TURNED.isdisjoint(image.info):
            try:
                ImageOps.exif_transpose(image, in_place=True)
            except MemoryError:
                raise
            except Exception:  # damaged EXIF says nothing about the pixels
                pass
        return to_channels(image, in_chans), source_mode


def mode_of(in_chans: int) -> str:
    """Pillow's name of the mode with this many channels."""
    modes = {1: "L", 3: "RGB"}
    if in_chans not in modes:
        raise HVTError(f"in_chans={in_chans} is not understood: images have 3 channels or 1")
    return modes[in_chans]


def to_channels(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """An image of any mode as 8-bit RGB or grey; transparent parts show white."""
    mode = mode_of(in_chans)
    if image.mode in _16_BIT or image.mode in ("I", "F"):
        to_8_bit = _to_8_bit(image)
        return _by_bands(image, mode, lambda band: Image.fromarray(to_8_bit(band)).convert(mode))
    if image.has_transparency_data:
        return _by_bands(image, mode, lambda band: _on_white(band).convert(mode))
    if image.mode == "LAB":  # the one mode that convert() does not know the way from
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    return image.convert(mode)


def _by_bands(
    image: Image.Image, mode: str, convert: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    """A large image converted a part at a time: what lies between would be larger than it."""
    width, height = image.size
    parts = bands(width, height)
    if len(parts) == 1:
        return convert(image)
    result = Image.new(mode, image.size)
    for top, rows in parts:
        result.paste(convert(image.crop((0, top, width, top + rows))), (0, top))
    return result


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _to_8_bit(image: Image.Image) -> Callable[[Image.Image], np.ndarray]:
    """What makes 8 bits of the parts of a greyscale image with more."""

    def values(band: Image.Image) -> np.ndarray:
        return np.nan_to_num(np.asarray(band, dtype=np.float64), posinf=0.0, neginf=0.0)

    def rounded(values: np.ndarray) -> np.ndarray:
        return np.rint(values).astype(np.uint8)

    # Older Pillow opens 16-bit PNG as 32-bit, and PGM is scaled to 16 bits in all versions.
    if image.mode in _16_BIT or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return lambda band: rounded(values(band) / 257)  # 65535 → 255
    width, height = image.size
    parts = [(0, top, width, top + rows) for top, rows in bands(width, height)]
    ranges = [(part.min(), part.max()) for part in (values(image.crop(box)) for box in parts)]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if low >= 0 and high <= 1 and image.mode == "F":
        return lambda band: rounded(values(band) * 255)
    if low >= 0 and high <= 255:
        return lambda band: rounded(values(band))
    if low >= 0 and high <= 65535:
        return lambda band: rounded(values(band) / 257)
    # No range that a format defines: the image's own.
    factor = 255 / (high - low) if high > low else 0.0
    return lambda band: rounded((values(band) - low) * factor)


def why(error: Exception) -> str:
    """Why an image cannot be read, without the path and in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "its content is not in an image format"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()).rstrip(".")
    return text or type(error).__name__
