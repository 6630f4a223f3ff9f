"""Images that a service would rather not get: damaged, giant, of strange kinds, or none."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

Kind = Callable[[random.Random], bytes]
GOOD = ("animated", "rotated", "cmyk", "sixteen_bit", "wrong_exif")
"""The kinds that are strange and yet images, which must be answered."""

SVG = (
    b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="64" height="64">'
    b'<image href="file:///etc/passwd"/><rect width="64" height="64" fill="red"/></svg>'
)
OTHERS = (
    SVG,
    b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF",
    b"<!doctype html><html><img src=x onerror=alert(1)></html>",
    b"GIF89a",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"RIFF\x10\x00\x00\x00WEBPVP8 ",
)


def hostile(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """So many images of all kinds in turn, by the name of their kind."""
    stream = random.Random(seed)
    kinds = list(KINDS)
    for place in range(count):
        name = kinds[place % len(kinds)]
        yield name, KINDS[name](stream)


def drawn(stream: random.Random, size: tuple[int, int] | None = None) -> Image.Image:
    """Some colours, not all alike."""
    width, height = size or (stream.randint(8, 48), stream.randint(8, 48))
    noise = np.random.default_rng(stream.getrandbits(32))
    return Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _any(stream: random.Random) -> bytes:
    form = stream.choice(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"))
    return encoded(drawn(stream), form)


def _truncated(stream: random.Random) -> bytes:
    content = _any(stream)
    return content[: stream.randrange(1, len(content))]


def _flipped(stream: random.Random) -> bytes:
    content = bytearray(_any(stream))
    for _ in range(stream.randint(1, 30)):
        content[stream.randrange(len(content))] = stream.randrange(256)
    return bytes(content)


def _noise(stream: random.Random) -> bytes:
    return stream.randbytes(stream.randint(1, 500))


def png(width: int, height: int, data: bytes = b"", colour: int = 2, more: bytes = b"") -> bytes:
    """A PNG file of any size that one likes to claim."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + header + more + pixels + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _giant(stream: random.Random) -> bytes:
    large = stream.randint(9_000, 65_000)
    if stream.random() < 0.4:
        return png(large, large)
    if stream.random() < 0.4:  # a strip of which resizing would make a giant
        return encoded(Image.new("L", (1, 200_000)), "PNG")
    content = bytearray(encoded(drawn(stream), "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", large, large)
    return bytes(content)


def repeated_scans(times: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """A progressive JPEG that claims a size, with its last scan so many times."""
    content = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG", progressive=True))
    place = content.index(b"\xff\xc2") + 5
    content[place : place + 4] = struct.pack(">HH", size[1], size[0])
    last = content.rindex(b"\xff\xda")
    return bytes(content[:last] + content[last:-2] * times + content[-2:])


def slow_ppm(comments: int) -> bytes:
    """Of 2 × 2 pixels, among comments that Pillow cuts out one by one: quadratic in their number.

    3,000,000 are a minute or so.
    """
    return b"P3\n2 2\n255\n" + b"#\n" * comments + b"1 " * 12


def tags_of_copies(tags: int, size: int) -> bytes:
    """A TIFF directory, as TIFF and EXIF have it, of tags that share their bytes in the file."""
    start = 8 + 2 + 12 * tags + 4
    entries = b"".join(struct.pack("<HHLL", 40_000 + i, 1, size, start) for i in range(tags))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries + bytes(4 + size)


def _animated(stream: random.Random) -> bytes:
    frames = [drawn(stream, (20, 20)) for _ in range(4)]
    form = stream.choice(("GIF", "WEBP", "PNG"))
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


def _rotated(stream: random.Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = stream.randint(1, 8)
    return encoded(drawn(stream), stream.choice(("JPEG", "PNG", "WEBP")), exif=exif)


def _wrong_exif(stream: random.Random) -> bytes:
    return encoded(drawn(stream), "JPEG", exif=b"Exif\x00\x00MM\x00*" + stream.randbytes(40))


def _cmyk(stream: random.Random) -> bytes:
    return encoded(drawn(stream).convert("CMYK"), stream.choice(("JPEG", "TIFF")))


def _sixteen_bit(stream: random.Random) -> bytes:
    noise = np.random.default_rng(stream.getrandbits(32))
    values = noise.integers(0, 65536, (12, 17), dtype=np.uint16)
    return encoded(Image.fromarray(values), stream.choice(("PNG", "TIFF")))


KINDS: dict[str, Kind] = {
    "truncated": _truncated,
    "wrong_type": lambda stream: stream.choice(OTHERS),
    "giant": _giant,
    "animated": _animated,
    "rotated": _rotated,
    "cmyk": _cmyk,
    "sixteen_bit": _sixteen_bit,
    "svg": lambda stream: SVG,
    "flipped": _flipped,
    "noise": _noise,
    "wrong_exif": _wrong_exif,
    "scans": lambda stream: repeated_scans(stream.randint(600, 2000)),
    "copies": lambda stream: tags_of_copies(stream.randint(100, 500), 100_000),
}
