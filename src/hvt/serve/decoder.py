"""Processes that decode images and can be given up.

A decoder in C cannot be interrupted, and of most formats nobody can say in advance how long it will
take and how much memory. So what is not light work is done by a process that may take so much of
both, and is ended when it takes more. It imports Pillow and NumPy only, is started when it is first
needed, and is used again.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from ..data.images import finish, image_formats
from .bounds import Bounds, ImageTooLargeError, check_bounds, light_format

BYTES_PER_PIXEL = 16
"""What decoding may take; WebP takes the most: two canvases, a copy and the image itself."""
BASE_BYTES = 256_000_000  # for the process itself, its threads and the file
START = 60.0  # seconds for a process to begin, on a busy machine
BAND = 2**20  # pixels that are sent at a time
_PREFIX = 16  # bytes by which Pillow tells formats apart
_MAX_EXIF = 65_536  # bytes; the tags of more could each claim all of it, in a copy of their own

# Without the package's own __init__, which imports torch.
_MAIN = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[1])
package = sys.modules["hvt"] = types.ModuleType("hvt")
package.__path__ = [sys.argv[2]]
from hvt.serve.decoder_main import main
main(int(sys.argv[3]))
"""
_ERRORS = {"format": UnidentifiedImageError, "too much": ImageTooLargeError, "damaged": ValueError}


class Heavy(Exception):
    """What came to light only while an image was decoded."""


def decode(content: bytes, in_chans: int, bounds: Bounds) -> Image.Image:
    """The image of a file's content within bounds.

    It raises `ImageTooLargeError` above a bound, `UnidentifiedImageError` for what is not an image,
    and whatever Pillow does for what is damaged.
    """
    image = open_light(content, bounds)
    if image is not None:
        with contextlib.suppress(Heavy):
            return finish_light(image, in_chans)
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


def finish_light(image: Image.Image, in_chans: int) -> Image.Image:
    """What an opened image shows; `Heavy` if its metadata is for a process of its own."""
    with image:
        image.load()
        exif = image.info.get("exif") or image.info.get("Raw profile type exif") or b""
        if len(exif) > _MAX_EXIF:
            raise Heavy
        return finish(image, in_chans)


def _check_format(content: bytes, bounds: Bounds) -> None:
    """Refuse what Pillow cannot know by its first bytes, before a process is troubled with it."""
    for name in image_formats():
        accept = Image.OPEN[name][1]
        if name in bounds.formats and (accept is None or accept(content[:_PREFIX])):
            return
    raise UnidentifiedImageError


def decode_apart(content: bytes, in_chans: int, bounds: Bounds) -> Image.Image:
    """An image decoded in a process of its own.

    That process is ended when it has taken more than `bounds.seconds`, or on Linux more than 16
    bytes for each of `bounds.pixels`.
    """
    process = _take(bounds.pixels)
    reply: dict[str, Any] | None = None
    image: Image.Image | None = None
    try:
        with _Deadline(process, bounds.seconds) as deadline, contextlib.suppress(OSError):
            reply = process.ask(content, in_chans, bounds)
            if reply is not None and "error" not in reply:
                image = process.receive(reply)
    except BaseException:  # an interrupt leaves half an answer in the pipe
        process.end()
        raise
    if deadline.passed:
        process.end()
        raise ImageTooLargeError(
            f"decoding it takes more than the {bounds.seconds:g} seconds allowed"
        )
    if reply is not None and "error" in reply:
        _idle[bounds.pixels].append(process)
        raise _ERRORS[reply["error"]](reply["reason"])
    if reply is None or image is None:  # a crash, or no memory was left in the machine
        process.end()
        raise ImageTooLargeError("the process that decoded it was ended by the system")
    _idle[bounds.pixels].append(process)
    return image


def bands(width: int, height: int) -> list[tuple[int, int]]:
    """The first row and the number of rows of each part of an image."""
    rows = max(1, BAND // max(1, width))
    return [(top, min(rows, height - top)) for top in range(0, height, rows)]


class _Process:
    """One process and the two pipes to it; `decoder_main` is the other end."""

    def __init__(self, pixels: int) -> None:
        limit = BASE_BYTES + BYTES_PER_PIXEL * pixels
        path, package = json.dumps([str(place) for place in sys.path]), Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _MAIN, path, str(package), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy would start more threads
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        with _Deadline(self, START):
            ready = self._from.readline()
        if not ready:
            self.end()
            raise OSError("no process could be started to decode it")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, content: bytes, in_chans: int, bounds: Bounds) -> dict[str, Any] | None:
        """What the process says of an image; None if it ended on the way."""
        request = {"bytes": len(content), "in_chans": in_chans, "bounds": vars(bounds)}
        self._to.write(json.dumps(request).encode() + b"\n")
        self._to.write(content)
        self._to.flush()
        line = self._from.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def receive(self, reply: dict[str, Any]) -> Image.Image | None:
        """The pixels that come after a reply; None if the process ended on the way."""
        mode, (width, height) = reply["mode"], reply["size"]
        image = Image.new(mode, (width, height))
        for top, rows in bands(width, height):
            pixels = self._from.read(rows * width * len(mode))
            if len(pixels) < rows * width * len(mode):
                return None
            image.paste(Image.frombytes(mode, (width, rows), pixels), (0, top))
        return image

    def kill(self) -> None:
        """End the process; whoever waits for its answer gets none."""
        self._process.kill()

    def end(self) -> None:
        """End the process and leave nothing of it."""
        self.kill()
        self._process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):  # what could not be sent
                pipe.close()


class _Deadline:
    """Kills a process after so many seconds; `passed` says whether it did."""

    def __init__(self, process: _Process, seconds: float) -> None:
        self._process, self.passed, self._over = process, False, False
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True

    def _kill(self) -> None:
        with self._lock:
            if not self._over:
                self.passed = True
                self._process.kill()

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()


_idle: defaultdict[int, list[_Process]] = defaultdict(list)  # by the pixels they may decode


def _take(pixels: int) -> _Process:
    """A process that waits for work, or a new one."""
    with contextlib.suppress(IndexError):
        while True:
            process = _idle[pixels].pop()
            if process.alive:
                return process
            process.end()
    return _Process(pixels)


@atexit.register
def _end_idle() -> None:
    for processes in _idle.values():
        while processes:
            processes.pop().end()


if hasattr(os, "register_at_fork"):  # a fork of this process must not talk to its decoders
    os.register_at_fork(after_in_child=_idle.clear)
