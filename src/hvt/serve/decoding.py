"""Untrusted bytes to images: their cost is bounded, and what takes too long is given up.

A decoder in C cannot be interrupted, and of most formats nobody can say in advance how long it will
take and how much memory. So light work is done in this process, and all else in a process of its
own, which may use so much of both and is killed when it needs more. That process imports this
module, so nothing here needs torch or FastAPI.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from ..data.images import finish, image_formats, why

# What people send. The other formats that Pillow reads are rare, and each is code to attack.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")

# Of these three, so many bytes and pixels take a library some seconds at worst, and so does Pillow
# for a header of so many empty segments. Parts of other decoders are loops in Python.
_LIGHT = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"RIFF": "WEBP"}
_LIGHT_BYTES, _LIGHT_PIXELS = 8_000_000, 16_000_000
_LIGHT_WORK = 128_000_000
"""Pixels × scans of a JPEG, each some 1 to 4 nanoseconds. Encoders write 1 to 20 scans; a file may
repeat its last one every 20 bytes, and each repetition goes over all pixels again."""
_LIGHT_EXIF = 65_536  # bytes; the tags of more could each claim all of it, in a copy of their own

BYTES_PER_PIXEL = 16
"""What decoding may use; WebP uses the most: two canvases, a copy and the image itself."""
BASE_BYTES = 256_000_000  # for the process itself, its threads and the file

_MAIN = """
import json, sys
sys.path[:], limits = json.loads(sys.argv[1])
from hvt.serve.decoding import Limits, main
main(Limits(*limits))
"""


class DecodeError(Exception):
    """Why there is no image: an HTTP status, and the rest of a sentence that begins with it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason

    @classmethod
    def of(cls, error: Exception) -> DecodeError:
        """For whatever Pillow raises, which is all sorts for damaged files."""
        if isinstance(error, DecodeError):
            return error
        if isinstance(error, UnidentifiedImageError):
            return cls(415, f"is not in a known format: use {', '.join(known_formats())}")
        if isinstance(error, MemoryError | Image.DecompressionBombError):
            return cls(413, f"is too large: {why(error)}")
        return cls(422, f"is damaged: {why(error)}")


class Limits(NamedTuple):
    """What an image may be and use, and the channels it is converted to."""

    in_chans: int
    pixels: int
    side: int
    """What the shorter side will be resized to: of a long strip that is a giant, too."""
    seconds: float
    """For decoding in a process of its own."""


def decode_light(content: bytes, limits: Limits, pixels: int = _LIGHT_PIXELS) -> Image.Image | None:
    """The image, upright, in the model's channels; None if it is not light work.

    Light work has so many pixels at most, before and after resizing.
    """
    name = next((_LIGHT[magic] for magic in _LIGHT if content.startswith(magic)), None)
    if name is None or len(content) > _LIGHT_BYTES:
        return None
    with Image.open(io.BytesIO(content), formats=(name,)) as image:
        scans = content.count(b"\xff\xda") if name == "JPEG" else 1
        if _pixels(image, limits) > min(pixels, _LIGHT_WORK // max(1, scans)):
            return None
        image.load()
        exif = image.info.get("exif") or image.info.get("Raw profile type exif") or b""
        return None if len(exif) > _LIGHT_EXIF else finish(image, limits.in_chans)


def decode_heavy(content: bytes, limits: Limits) -> Image.Image:
    """The image, decoded in a process of its own that is killed after `limits.seconds`."""
    if not any(Image.OPEN[name][1](content[:16]) for name in known_formats()):  # type: ignore[misc]
        raise UnidentifiedImageError
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _MAIN, json.dumps([sys.path, limits])],
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.seconds,
            start_new_session=True,  # Ctrl-C is for the service, which answers what it accepted
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy would start more threads
        )
    except subprocess.TimeoutExpired as error:
        reason = f"decoding it takes more than the {limits.seconds:g} seconds allowed"
        raise DecodeError(413, f"is too large: {reason}") from error
    if done.returncode in (13, 15, 22):
        raise DecodeError(400 + done.returncode, done.stdout.decode())
    if done.returncode:  # a crash, or no memory left in the machine
        raise DecodeError(413, "is too large: the process that decoded it was killed by the system")
    return Image.open(io.BytesIO(done.stdout), formats=("PPM",))


def main(limits: Limits) -> None:
    """What the process does: an image from standard input to PPM on standard output.

    Where there is none, it writes why and exits with the HTTP status less 400.
    """
    warnings.simplefilter("ignore")
    if hasattr(signal, "alarm"):  # should nobody be left to kill it
        signal.alarm(math.ceil(limits.seconds) + 5)
    _limit_memory(BASE_BYTES + BYTES_PER_PIXEL * limits.pixels)
    try:
        content = io.BytesIO(sys.stdin.buffer.read())
        with Image.open(content, formats=known_formats()) as opened:
            _pixels(opened, limits)
            finish(opened, limits.in_chans).save(sys.stdout.buffer, "PPM")
    except Exception as error:
        failed = DecodeError.of(error)
        sys.stdout.buffer.write(failed.reason.encode())
        sys.exit(failed.status - 400)


def _limit_memory(size: int) -> None:
    """Of what this process may still allocate; only Linux keeps to it."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def _pixels(image: Image.Image, limits: Limits) -> int:
    """Those of an opened image, or of what it is resized to; more than allowed are an error."""
    short, long = sorted(image.size)
    pixels = max(short * long, limits.side**2 * long // max(1, short))
    if pixels > limits.pixels:
        raise DecodeError(
            413,
            f"is too large: its {image.width} × {image.height} pixels, or those after resizing to "
            f"a shorter side of {limits.side}, are more than the {limits.pixels} allowed",
        )
    return pixels


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow decodes."""
    return tuple(name for name in FORMATS if name in image_formats())
