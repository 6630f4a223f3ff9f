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

from .bounds import Bounds, ImageTooLargeError
from .decoder import bands
from .images import decode_here, why

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
        image, source_mode = _decode(request, content)
    except Exception as error:  # damaged files raise all sorts
        kind = "damaged"
        if isinstance(error, UnidentifiedImageError):
            kind = "format"
        elif isinstance(error, ImageTooLargeError | MemoryError | Image.DecompressionBombError):
            kind = "too much"
        replies.write(json.dumps({"error": kind, "reason": why(error)}).encode() + b"\n")
        return
    reply = {"mode": image.mode, "size": image.size, "source_mode": source_mode}
    replies.write(json.dumps(reply).encode() + b"\n")
    width, height = image.size
    for top, rows in bands(width, height):
        replies.write(image.crop((0, top, width, top + rows)).tobytes())


def _decode(request: dict[str, Any], content: bytes) -> tuple[Image.Image, str]:
    bounds = Bounds(**request["bounds"])
    if request["path"] is None:
        return decode_here(io.BytesIO(content), request["in_chans"], bounds)
    with open(request["path"], "rb") as file:  # noqa: PTH123 - as it was sent
        return decode_here(file, request["in_chans"], bounds)
