"""Images from untrusted senders are decoded within bounds of time and memory."""

import multiprocessing
import os
import random
import signal
import struct
import sys
import time

import numpy as np
import pytest
from hostile import chunk, drawn, encoded, png, repeated_scans, slow_ppm, tags_of_copies
from PIL import Image, UnidentifiedImageError

from hvt.data.images import read_image
from hvt.serve import decoder
from hvt.serve.bounds import MAX_SCANS, Bounds, ImageTooLargeError, jpeg_scans
from hvt.serve.decoder import decode

RED = Image.new("RGB", (6, 4), "red")


def segment(code: int, data: bytes) -> bytes:
    return bytes([0xFF, code]) + struct.pack(">H", len(data) + 2) + data


def test_scans_are_counted_as_libjpeg_does() -> None:
    image = drawn(random.Random(0), (48, 40))
    plain, many = encoded(image, "JPEG"), encoded(image, "JPEG", progressive=True)
    assert jpeg_scans(plain) == 1
    assert jpeg_scans(many) == 10
    assert jpeg_scans(encoded(image.convert("CMYK"), "JPEG", progressive=True)) == 18
    assert jpeg_scans(encoded(image, "JPEG", progressive=True, restart_marker_blocks=1)) == 10
    # Not those of a thumbnail, nor of what comes after the image.
    assert jpeg_scans(many[:2] + segment(0xE1, many) + many[2:] + 20 * many) == 10
    # Bytes of no meaning and fill bytes may lie between segments.
    last = many.rindex(b"\xff\xda")
    assert jpeg_scans(many[:last] + b"junk\xff\x00\xff\xff" + 2 * many[last:-2] + many[-2:]) == 11
    assert jpeg_scans(repeated_scans(7)) == 16
    # Segments that hide nothing are not walked through without end.
    assert jpeg_scans(many[:2] + segment(0xE3, b"") * 20_000 + many[2:]) > MAX_SCANS


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (repeated_scans(20_000, (6928, 6928)), "more than the 500 scans"),
        (repeated_scans(60, (6928, 6928)), "6928 × 6928 pixels in 69 scans: too much work"),
        (repeated_scans(600), "more than the 500 scans"),
    ],
)
def test_too_many_scans_are_an_error_before_they_are_decoded(content: bytes, reason: str) -> None:
    with pytest.raises(ImageTooLargeError, match=reason):
        decode(content, 3, Bounds())
    with pytest.raises(ImageTooLargeError, match=reason):  # too long to be opened here
        decode(content + bytes(3_000_000), 3, Bounds())


def test_scans_within_reason_are_decoded() -> None:
    assert decode(repeated_scans(300), 3, Bounds()).size == (64, 64)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_process_decodes_the_same(form: str) -> None:
    content = encoded(drawn(random.Random(1), (40, 30)), form)
    apart = decoder.decode_apart(content, 3, Bounds())
    np.testing.assert_array_equal(np.asarray(apart), np.asarray(read_image(content)))
    assert decoder.decode_apart(content, 1, Bounds()).mode == "L"


def test_a_process_that_takes_too_long_is_ended() -> None:
    bounds = Bounds(pixels=1000)  # its own kind of process
    good = encoded(RED, "PPM")
    assert decode(good, 3, bounds).getpixel((0, 0)) == (255, 0, 0)
    (process,) = decoder._idle[1000]
    with pytest.raises(ImageTooLargeError, match=r"takes more than the 0.5 seconds allowed"):
        decode(slow_ppm(400_000), 3, Bounds(pixels=1000, seconds=0.5))
    assert not process.alive
    assert decoder._idle[1000] == []
    assert decode(good, 3, bounds).getpixel((0, 0)) == (255, 0, 0)
    decoder._idle.pop(1000)[0].end()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no limit")
@pytest.mark.parametrize("where", ["TIFF", "EXIF"])
def test_a_process_may_not_take_more_memory_than_its_pixels_need(where: str) -> None:
    content = tags_of_copies(2_000, 500_000)  # 1 GB in copies
    if where == "EXIF":
        content = png(4, 4, bytes(52), more=chunk(b"eXIf", content))
    bounds = Bounds(pixels=1000)
    with pytest.raises(ImageTooLargeError, match="it needs more memory than"):
        decode(content, 3, bounds)
    assert decode(encoded(RED, "TIFF"), 3, bounds).size == (6, 4)
    decoder._idle.pop(1000)[0].end()


def test_what_is_no_image_troubles_no_process() -> None:
    before = {pixels: list(processes) for pixels, processes in decoder._idle.items()}
    with pytest.raises(UnidentifiedImageError):
        decode(b"words" * 100_000, 3, Bounds(pixels=1000, formats=("JPEG", "TIFF")))
    assert decoder._idle.get(1000, []) == before.get(1000, [])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed by SIGKILL")
def test_a_process_that_has_died_is_replaced() -> None:
    content = encoded(RED, "TIFF")
    decode(content, 3, Bounds())
    for process in decoder._idle[Bounds().pixels]:
        os.kill(process._process.pid, signal.SIGKILL)
    while any(process.alive for process in decoder._idle[Bounds().pixels]):
        time.sleep(0.01)
    assert decode(content, 3, Bounds()).size == (6, 4)


def _size_of(content: bytes) -> tuple[int, int]:
    return decode(content, 3, Bounds()).size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_processes_have_their_own() -> None:
    contents = [encoded(Image.new("RGB", (width, 3)), "TIFF") for width in range(1, 20)]
    decode(contents[0], 3, Bounds())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sizes = pool.map(_size_of, contents, chunksize=1)
    assert sizes == [(width, 3) for width in range(1, 20)]
    assert _size_of(contents[0]) == (1, 3)
