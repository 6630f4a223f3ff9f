"""How much work an image may be, known before a pixel of it is decoded."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, BinaryIO

MOST_PIXELS = 178_956_970  # Pillow itself refuses what is larger

# What people send. The other formats that Pillow reads are rare, and each is code to attack.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")

MAX_SCANS = 500
MAX_WORK = 2_500_000_000
"""Pixels × scans of a JPEG, each some 1 to 4 nanoseconds. Encoders write 1 to 20 scans; a file
may repeat its last one every 20 bytes, and each repetition goes over all pixels again."""

LIGHT_BYTES, LIGHT_PIXELS, LIGHT_WORK = 2_000_000, 16_000_000, 128_000_000
SMALL_BYTES, SMALL_PIXELS = 65_536, 65_536
# Beginning of a file → its format, and the bytes and pixels up to which its decoding takes a
# second or so at worst. For the first three that is what libraries need for so many pixels, and
# Pillow for a header of so many empty segments; parts of the others are loops in Python.
_LIGHT = {
    b"\xff\xd8\xff": ("JPEG", LIGHT_BYTES, LIGHT_PIXELS),
    b"\x89PNG\r\n\x1a\n": ("PNG", LIGHT_BYTES, LIGHT_PIXELS),
    b"RIFF": ("WEBP", LIGHT_BYTES, LIGHT_PIXELS),
    b"GIF8": ("GIF", SMALL_BYTES, SMALL_PIXELS),
    b"BM": ("BMP", SMALL_BYTES, SMALL_PIXELS),
}

# A marker that is neither stuffing (FF 00), fill (FF FF) nor a restart (FF D0 to D7).
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_SCAN = re.compile(rb"\xff\xda")  # three times as fast as bytes.count
_FEW = 4
_MAX_SEGMENTS = 10_000


class ImageTooLargeError(ValueError):
    """An image above a bound."""


@dataclass(frozen=True)
class Bounds:
    """What an image may be and take."""

    pixels: int = MOST_PIXELS
    seconds: float = 60.0
    """For decoding, where that happens in a process of its own."""
    side: int = 0
    """What the shorter side will be resized to, if known: of a long strip that is a giant, too."""
    formats: tuple[str, ...] = FORMATS


def light_format(content: bytes, size: int) -> str | None:
    """The format of a file, by its first bytes, if so few bytes of it are harmless to open."""
    for beginning, (name, most, _) in _LIGHT.items():
        if content.startswith(beginning):
            return name if size <= most else None
    return None


def check_bounds(image: Any, file: BinaryIO, bounds: Bounds) -> bool:
    """Refuse an opened image that is above the bounds; whether its decoding is light work."""
    width, height = image.size
    if width * height > bounds.pixels:
        raise ImageTooLargeError(
            f"it has {width} × {height} pixels, more than the {bounds.pixels} allowed"
        )
    check_strip(width, height, bounds)
    scans = 1
    if image.format in ("JPEG", "MPO"):
        file.seek(0)
        scans = jpeg_scans(file.read())
        if scans > MAX_SCANS:
            raise ImageTooLargeError(f"it has more than the {MAX_SCANS} scans that a JPEG may have")
        if scans * width * height > MAX_WORK:
            raise ImageTooLargeError(
                f"it has {width} × {height} pixels in {scans} scans: too much work"
            )
    most = next((most for name, _, most in _LIGHT.values() if name == image.format), LIGHT_PIXELS)
    return width * height <= most and scans * width * height <= LIGHT_WORK


def check_strip(width: int, height: int, bounds: Bounds) -> None:
    """Refuse an image that resizing would make a giant."""
    if bounds.side**2 * max(width, height) > bounds.pixels * max(1, min(width, height)):
        raise ImageTooLargeError(
            f"it has {width} × {height} pixels, too long a strip: resized to a shorter side of "
            f"{bounds.side} it would have more than the {bounds.pixels} pixels allowed"
        )


def jpeg_scans(content: bytes) -> int:
    """The scans of a JPEG as libjpeg counts them, or too many where it is not worth counting."""
    scans = sum(1 for _ in itertools.islice(_SCAN.finditer(content), _FEW + 1))
    if scans <= _FEW:  # those in thumbnails and other images within the file are among them
        return scans
    scans = place = 0
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(content, place)
        if marker is None or content[marker.end() - 1] == 0xD9:  # the end of the image
            return scans
        place = marker.end()
        code = content[place - 1]
        scans += code == 0xDA
        if code >= 0xC0 and code != 0xD8:  # a segment, which begins with its length
            place += max(2, int.from_bytes(content[place : place + 2], "big"))
    return MAX_SCANS + 1
