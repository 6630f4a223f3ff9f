"""Untrusted images are decoded within limits of time and memory."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hostile import chunk, drawn, encoded, png, repeated_scans, slow_ppm, tags_of_copies
from PIL import Image, UnidentifiedImageError

from hvt.data.images import read_image
from hvt.serve import decoding
from hvt.serve.decoding import DecodeError, Limits, decode_heavy, decode_light

LIMITS = Limits(in_chans=3, pixels=10_000_000, side=256, seconds=60)


def decode(content: bytes, limits: Limits) -> Image.Image:
    return decode_light(content, limits) or decode_heavy(content, limits)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_process_decodes_the_same(form: str) -> None:
    content = encoded(drawn(random.Random(1), (40, 30)), form)
    image = decode_heavy(content, LIMITS)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(read_image(content)))
    light = decode_light(content, LIMITS)
    assert (light is None) == (form not in ("JPEG", "PNG", "WEBP"))
    assert light is None or np.array_equal(light, image)
    if form == "PNG":
        assert decode_heavy(content, LIMITS._replace(in_chans=1)).mode == "L"


@pytest.mark.parametrize(
    ("content", "light"),
    [
        (repeated_scans(300), True),
        (repeated_scans(60, (2000, 2000)), False),  # each scan goes over all pixels again
        (encoded(Image.new("L", (3000, 3000)), "PNG"), True),
        (encoded(Image.new("RGB", (9, 9)), "PNG") + bytes(9_000_000), False),
    ],
    ids=["scans", "pixels x scans", "pixels", "bytes"],
)
def test_what_is_light_work(content: bytes, light: bool) -> None:
    assert (decode_light(content, LIMITS) is not None) == light


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(12_000, 12_000), "12000 × 12000 pixels, .* are more than the 10000000 allowed"),
        (png(1, 500_000), "resizing to a shorter side of 256, are more"),
        (encoded(Image.new("L", (1, 200_000)), "TIFF"), "a shorter side of 256, are more"),
    ],
    ids=["giant", "strip", "heavy strip"],
)
def test_pixels_are_bounded_before_they_are_decoded(content: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(content, LIMITS)


def test_decoding_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(DecodeError, match=r"takes more than the 0.5 seconds allowed"):
        decode(slow_ppm(3_000_000), LIMITS._replace(seconds=0.5))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no limit")
@pytest.mark.parametrize("where", ["TIFF", "EXIF"])
def test_decoding_may_not_use_more_memory_than_its_pixels_need(where: str) -> None:
    content = tags_of_copies(2_000, 500_000)  # 1 GB in copies
    if where == "EXIF":
        content = png(4, 4, bytes(52), more=chunk(b"eXIf", content))
    with pytest.raises(DecodeError, match="it needs more memory than"):
        decode(content, LIMITS._replace(pixels=70_000))


def test_no_process_is_started_for_what_is_not_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.sys, "executable", "/nowhere")
    with pytest.raises(UnidentifiedImageError):
        decode(b"words" * 100, LIMITS)


def test_a_process_does_not_import_torch() -> None:
    """It would take a second for each image."""
    code = "import sys, hvt.serve.decoding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_a_process_that_crashes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MAIN", "raise SystemExit(1)")
    with pytest.raises(DecodeError, match="killed by the system"):
        decode(encoded(Image.new("RGB", (6, 4)), "TIFF"), LIMITS)
