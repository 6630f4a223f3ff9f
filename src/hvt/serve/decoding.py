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

from ..data.images import finish, image_formats, mode_of, why

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
sys.path[:] = json.loads(sys.argv[1])
from hvt.serve.decoding import main
main(*map(float, sys.argv[2:]))
"""


class ImageTooLargeError(ValueError):
    """An image above a limit."""


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

    Light work has so many pixels at most, before and after resizing. Raises `ImageTooLargeError`
    above a limit, and whatever Pillow does for what is damaged.
    """
    name = next((_LIGHT[magic] for magic in _LIGHT if content.startswith(magic)), None)
    if name is None or len(content) > _LIGHT_BYTES:
        return None
    with Image.open(io.BytesIO(content), formats=(name,)) as image:
        scans = content.count(b"\xff\xda") if name == "JPEG" else 1
        if _checked_pixels(image, limits) > min(pixels, _LIGHT_WORK // max(1, scans)):
            return None
        image.load()
        exif = image.info.get("exif") or image.info.get("Raw profile type exif") or b""
        return None if len(exif) > _LIGHT_EXIF else finish(image, limits.in_chans)


def decode_heavy(content: bytes, limits: Limits) -> Image.Image:
    """The image, decoded in a process of its own that is killed after `limits.seconds`."""
    if not any(Image.OPEN[name][1](content[:16]) for name in known_formats()):  # type: ignore[misc]
        raise UnidentifiedImageError
    command = [sys.executable, "-I", "-c", _MAIN, json.dumps(sys.path), *map(str, limits)]
    try:
        done = subprocess.run(
            command,
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.seconds,
            start_new_session=True,  # Ctrl-C is for the service, which answers what it accepted
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy would start more threads
        )
    except subprocess.TimeoutExpired as error:
        raise ImageTooLargeError(
            f"decoding it takes more than the {limits.seconds:g} seconds allowed"
        ) from error
    if done.returncode or b"\n" not in done.stdout:  # a crash, or no memory left in the machine
        raise ImageTooLargeError("the process that decoded it was killed by the system")
    end = done.stdout.index(b"\n")
    reply = json.loads(done.stdout[:end])
    if "error" in reply:
        raise _ERRORS[reply["error"]](reply["reason"])
    pixels = memoryview(done.stdout)[end + 1 :]
    return Image.frombuffer(mode_of(limits.in_chans), reply["size"], pixels)  # type: ignore[arg-type]


_ERRORS = {415: UnidentifiedImageError, 413: ImageTooLargeError, 422: ValueError}


def error_status(error: Exception) -> int:
    """The HTTP status for an image that cannot be decoded."""
    if isinstance(error, UnidentifiedImageError):
        return 415
    if isinstance(error, ImageTooLargeError | MemoryError | Image.DecompressionBombError):
        return 413
    return 422


def main(in_chans: float, pixels: float, side: float, seconds: float) -> None:
    """What the process does: an image from standard input to pixels on standard output."""
    warnings.simplefilter("ignore")
    if hasattr(signal, "alarm"):  # should nobody be left to kill it
        signal.alarm(math.ceil(seconds) + 5)
    _limit_memory(BASE_BYTES + BYTES_PER_PIXEL * int(pixels))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the pixels
    limits = Limits(int(in_chans), int(pixels), int(side), seconds)
    try:
        content = io.BytesIO(sys.stdin.buffer.read())
        with Image.open(content, formats=known_formats()) as opened:
            _checked_pixels(opened, limits)
            image = finish(opened, limits.in_chans)
        output.write(json.dumps({"size": image.size}).encode() + b"\n" + image.tobytes())
    except Exception as error:  # damaged files raise all sorts
        reply = {"error": error_status(error), "reason": why(error)}
        output.write(json.dumps(reply).encode() + b"\n")
    output.close()


def _limit_memory(size: int) -> None:
    """Of what this process may still allocate; only Linux keeps to it."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def _checked_pixels(image: Image.Image, limits: Limits) -> int:
    """The pixels of an opened image, or of what it is resized to, which are not above the limit."""
    short, long = sorted(image.size)
    resized = limits.side**2 * long // max(1, short)
    if short * long > limits.pixels:
        raise ImageTooLargeError(
            f"it has {image.width} × {image.height} pixels, more than the {limits.pixels} allowed"
        )
    if resized > limits.pixels:
        raise ImageTooLargeError(
            f"it has {image.width} × {image.height} pixels, too long a strip: resized to a "
            f"shorter side of {limits.side} it would have more than the {limits.pixels} allowed"
        )
    return max(short * long, resized)


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow decodes."""
    return tuple(name for name in FORMATS if name in image_formats())
