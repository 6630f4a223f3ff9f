"""What a process that decodes images does: see `decoder`, its other end."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

from ..data.images import finish, image_formats, why
from .bounds import Bounds, ImageTooLargeError, check_bounds
from .decoder import bands

GRACE = 5  # seconds after which it ends by itself, should nobody be left to do so


def main(memory: int) -> None:
    """Answer requests from standard input until it is closed."""
    warnings.simplefilter("ignore")
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the one who asks
        signal.signal(number, signal.SIG_IGN)
    limit_memory(memory)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the replies
    Image.init()
    replies.write(b"ready\n")
    replies.flush()
    for line in requests:
        request = json.loads(line)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, request["bounds"]["seconds"] + GRACE)
        answer(request, requests.read(request["bytes"]), replies)
        replies.flush()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory(most: int) -> None:
    """Of what this process may still allocate; only Linux keeps to it."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def answer(request: dict[str, Any], content: bytes, replies: BinaryIO) -> None:
    """Decode an image and send it, or the reason why there is none."""
    try:
        image = _decode(content, request["in_chans"], Bounds(**request["bounds"]))
    except Exception as error:  # damaged files raise all sorts
        kind = "damaged"
        if isinstance(error, UnidentifiedImageError):
            kind = "format"
        elif isinstance(error, ImageTooLargeError | MemoryError | Image.DecompressionBombError):
            kind = "too much"
        replies.write(json.dumps({"error": kind, "reason": why(error)}).encode() + b"\n")
        return
    reply = {"mode": image.mode, "size": image.size}
    replies.write(json.dumps(reply).encode() + b"\n")
    width, height = image.size
    for top, rows in bands(width, height):
        replies.write(image.crop((0, top, width, top + rows)).tobytes())


def _decode(content: bytes, in_chans: int, bounds: Bounds) -> Image.Image:
    file = io.BytesIO(content)
    with Image.open(file, formats=[f for f in image_formats() if f in bounds.formats]) as image:
        check_bounds(image, file, bounds)
        return finish(image, in_chans)
