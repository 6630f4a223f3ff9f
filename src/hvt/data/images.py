"""How a file becomes an image in red, green and blue, or in grey."""

from __future__ import annotations

import copy
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import HVTError
from ..files import encodable

if TYPE_CHECKING:
    from typing_extensions import Self

# The formats that are opened, the common ones first. Pillow knows more: rare ones, some decoded by
# a program or not at all, and PostScript, which is executed.
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "JPEG2000",
    "DDS", "DIB", "ICO", "PCX", "PSD", "QOI", "SGI", "TGA",
)  # fmt: skip

_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
# Where Pillow looks for the orientation of a JPEG; to look takes as long as to decode a small one.
_ORIENTED = frozenset(("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"))


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
    file: str | Path | bytes | BinaryIO, in_chans: int = 3, *, name: str | None = None
) -> Image.Image:
    """The image in a file, or of its bytes, upright, as 8-bit RGB (3 channels) or grey (1 channel).

    Transparent parts show white. Of an animation it is the first frame. `name` is what an error
    calls a file that has no path. What is damaged, or larger than Pillow's limit
    (`PIL.Image.MAX_IMAGE_PIXELS`), is an `UnreadableImageError`.
    """
    mode_of(in_chans)  # a wrong number is the caller's mistake, not the image's
    try:
        content = _content(file)
        if not content:
            raise ValueError("the file is empty")
        with Image.open(io.BytesIO(content), formats=image_formats()) as image:
            return finish(image, in_chans)
    except Exception as error:  # damaged files raise all sorts: struct.error, SyntaxError, …
        path = name or (file if isinstance(file, str | Path) else getattr(file, "name", None))
        raise UnreadableImageError.of(path or "the file", why(error)) from error


def _content(file: str | Path | bytes | BinaryIO) -> bytes:
    if isinstance(file, bytes):
        return file
    if isinstance(file, str | Path):
        return Path(file).read_bytes()
    if file.seekable():
        file.seek(0)  # as Pillow does: a file that was just written is at its end
    return file.read()


def finish(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """An opened image read to its end: upright, as 8-bit RGB or grey."""
    image.load()
    if 0 in image.size:
        raise ValueError("it has no pixels")
    if image.format != "JPEG" or not _ORIENTED.isdisjoint(image.info):
        try:
            ImageOps.exif_transpose(image, in_place=True)
        except MemoryError:
            raise
        except Exception:  # damaged EXIF says nothing about the pixels
            pass
    return to_channels(image, in_chans)


class IndexedImages:
    """Images with random access, each read when it is asked for, and their labels."""

    def __init__(self, items: np.ndarray, labels: Sequence[int], in_chans: int) -> None:
        # One array, not a million Python objects: what worker processes only read they share, and
        # an object is written to whenever it is read (its reference count).
        self.items, self.labels, self.in_chans = items, list(labels), in_chans

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        raise NotImplementedError

    def subset(self, indices: Sequence[int]) -> Self:
        some = copy.copy(self)
        some.items = self.items[list(indices)]
        some.labels = [self.labels[index] for index in indices]
        return some

    def relabel(self, mapping: Sequence[int]) -> Self:
        other = copy.copy(self)
        other.labels = [mapping[label] for label in self.labels]
        return other


class FileImages(IndexedImages):
    """Images in files; `UnreadableImageError` for one that cannot be read."""

    def __init__(
        self, paths: Sequence[str | Path], labels: Sequence[int], in_chans: int = 3
    ) -> None:
        names = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        super().__init__(names, labels, in_chans)

    @property
    def names(self) -> list[str]:
        """The paths as text: of a million files ten times faster than `paths`."""
        return list(map(os.fsdecode, self.items.tolist()))

    @property
    def paths(self) -> list[Path]:
        return list(map(Path, self.names))

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(bytes(self.items[index])))

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.path(index), self.in_chans), self.labels[index]


def mode_of(in_chans: int) -> str:
    """Pillow's name of the mode with this many channels."""
    modes = {1: "L", 3: "RGB"}
    if in_chans not in modes:
        raise HVTError(f"in_chans={in_chans} is not supported: use 3 or 1")
    return modes[in_chans]


def to_channels(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """An image of any mode as 8-bit RGB or grey; transparent parts show white."""
    mode = mode_of(in_chans)
    if image.mode in _16_BIT or image.mode in ("I", "F"):
        return Image.fromarray(_to_8_bit(image)).convert(mode)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white.convert(mode)
    if image.mode == "LAB":  # Pillow knows the way from it to RGB only
        image = image.convert("RGB")
    return image.convert(mode)


def _to_8_bit(image: Image.Image) -> np.ndarray:
    """A greyscale image of more than 8 bits, in the range of its format or else in its own."""
    values = np.array(image, dtype=np.float64)
    np.nan_to_num(values, copy=False, posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    # Older Pillow opens 16-bit PNG as 32-bit, and PGM is scaled to 16 bits in all versions.
    if image.mode in _16_BIT or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values /= 257  # 65535 → 255
    elif low >= 0 and high <= 1 and image.mode == "F":
        values *= 255
    elif low >= 0 and high > 255 and high <= 65535:
        values /= 257
    elif low < 0 or high > 65535:
        values -= low
        values *= 255 / (high - low) if high > low else 0.0
    return np.rint(values, out=values).astype(np.uint8)


def why(error: Exception) -> str:
    """Why an image cannot be read, without the path and in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "its content is not in an image format"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, Image.DecompressionBombError):
        return "it has more pixels than the limit (PIL.Image.MAX_IMAGE_PIXELS) allows"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()).rstrip(".")
    return text or type(error).__name__
