"""A file becomes an image whatever its mode, and a damaged one an error that names it."""

import io
from pathlib import Path

import numpy as np
import pytest
from hostile import png
from PIL import Image

from hvt.data.images import (
    UnreadableImageError,
    image_extensions,
    image_formats,
    read_image,
    to_channels,
)
from hvt.errors import HVTError

RED, WHITE = (255, 0, 0), (255, 255, 255)


def solid(mode: str, colour: object, size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new(mode, size, colour)  # type: ignore[arg-type]


def palette(transparency: object = None) -> Image.Image:
    image = solid("P", 1)
    image.putpalette([0, 0, 255, 255, 0, 0])  # 0 is blue, 1 is red
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def grey16(value: int) -> Image.Image:
    return Image.fromarray(np.full((4, 6), value, np.uint16))


@pytest.mark.parametrize(
    ("image", "ending", "expected"),
    [
        (solid("RGB", RED), "png", RED),
        (solid("RGB", RED), "webp", RED),
        (solid("L", 128), "png", (128, 128, 128)),
        (solid("1", 1), "png", WHITE),
        (solid("LA", (0, 0)), "png", WHITE),
        (solid("RGBA", (0, 0, 0, 128)), "png", (127, 127, 127)),
        (palette(), "png", RED),
        (palette(transparency=1), "png", WHITE),
        (palette(transparency=bytes([255, 0])), "png", WHITE),
        (palette(), "gif", RED),
        (solid("CMYK", (0, 255, 255, 0)), "jpg", RED),
        (solid("YCbCr", (128, 128, 128)), "jpg", (128, 128, 128)),
        (solid("LAB", (255, 128, 128)), "tif", WHITE),
        (grey16(65535), "png", WHITE),
        (grey16(128 * 257), "png", (128, 128, 128)),
        (grey16(128), "png", (0, 0, 0)),  # dark, and not 8 bits in disguise
        (grey16(128 * 257), "tif", (128, 128, 128)),
        (grey16(128 * 257), "pgm", (128, 128, 128)),
        (solid("I", 128), "tif", (128, 128, 128)),
        (solid("I", 128 * 257), "tif", (128, 128, 128)),
        (solid("F", 0.5), "tif", (128, 128, 128)),
        (solid("F", 128.0), "tif", (128, 128, 128)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else None,
)
def test_every_mode(
    tmp_path: Path, image: Image.Image, ending: str, expected: tuple[int, int, int]
) -> None:
    file = tmp_path / f"image.{ending}"
    image.save(file)
    read = read_image(file)
    assert (read.mode, read.size) == ("RGB", (6, 4))
    # JPEG, WebP and a colour profile round.
    np.testing.assert_allclose(np.asarray(read)[2, 3], expected, atol=3)
    grey = read_image(str(file), in_chans=1)
    assert (grey.mode, grey.size) == ("L", (6, 4))
    assert abs(int(np.asarray(grey)[2, 3]) - round(np.dot(expected, [0.299, 0.587, 0.114]))) <= 3


def test_values_without_a_range_of_a_format_use_their_own() -> None:
    ramp = np.array([[-1000, 0, 1000]], np.int32)
    assert np.asarray(to_channels(Image.fromarray(ramp), 1)).tolist() == [[0, 128, 255]]
    flat = np.full((1, 2), -7.0, np.float32)
    assert np.asarray(to_channels(Image.fromarray(flat), 1)).tolist() == [[0, 0]]
    holes = np.array([[np.nan, np.inf, 1.0]], np.float32)
    assert np.asarray(to_channels(Image.fromarray(holes), 1)).tolist() == [[0, 0, 255]]


TURN = Image.Transpose
# How EXIF's orientations 1 to 8 store an upright image.
STORED = (
    None, TURN.FLIP_LEFT_RIGHT, TURN.ROTATE_180, TURN.FLIP_TOP_BOTTOM,
    TURN.TRANSPOSE, TURN.ROTATE_90, TURN.TRANSVERSE, TURN.ROTATE_270,
)  # fmt: skip


@pytest.mark.parametrize(("orientation", "turn"), list(enumerate(STORED, 1)))
def test_exif_turns_the_image_upright(
    tmp_path: Path, orientation: int, turn: Image.Transpose | None
) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # the top left corner is white
    stored = Image.fromarray(upright)
    if turn is not None:
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = tmp_path / "turned.png"
    stored.save(file, exif=exif)
    np.testing.assert_array_equal(np.asarray(read_image(file)), upright)


def test_damaged_exif_is_no_damage_to_the_image(tmp_path: Path) -> None:
    file = tmp_path / "exif.jpg"
    solid("RGB", RED).save(file, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f garbage")
    assert read_image(file).size == (6, 4)


@pytest.mark.parametrize("ending", ["gif", "webp", "png", "tif"])
def test_of_an_animation_the_first_frame(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"moving.{ending}"
    frames = [solid("RGB", colour) for colour in ("red", "lime", "blue")]
    frames[0].save(file, save_all=True, append_images=frames[1:], lossless=True)
    assert read_image(file).getpixel((0, 0)) == RED


def test_from_a_stream() -> None:
    stream = io.BytesIO()
    solid("RGB", RED).save(stream, "PNG")
    stream.seek(0)
    assert read_image(stream).getpixel((0, 0)) == RED
    with pytest.raises(UnreadableImageError, match=r"^the file cannot be read as an image: "):
        read_image(io.BytesIO(b"nothing"))
    with pytest.raises(UnreadableImageError, match=r"^image 7 cannot be read as an image: "):
        read_image(io.BytesIO(b"nothing"), name="image 7")


def test_other_channel_counts_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(HVTError, match="in_chans=2 is not supported: use 3 or 1") as caught:
        read_image(tmp_path / "none.png", in_chans=2)
    assert not isinstance(caught.value, UnreadableImageError)


def noise(ending: str) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, ending)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *[(noise(f)[: len(noise(f)) // 2], "") for f in ("JPEG", "PNG", "GIF", "BMP", "WEBP")],
        (noise("TIFF")[: len(noise("TIFF")) // 2], ""),
        (noise("JPEG")[:-200], "truncated"),
        (noise("PNG")[:-200], "truncated"),
        (noise("JPEG")[:20], ""),
        (b"", "the file is empty"),
        (b"this is text\n" * 40, "its content is not in an image format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not in an image format"),
        (png(100_000, 100_000, bytes(1000)), "it has more pixels than the limit"),
        (None, "there is no such file"),
    ],
)
def test_what_is_damaged_is_broken(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "damaged image.jpg"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UnreadableImageError) as caught:
        read_image(file)
    message = str(caught.value)
    assert message.startswith(f"{file} cannot be read as an image: ")
    assert reason in message
    assert "\n" not in message
    assert message.count(str(file)) == 1
    assert caught.value.path == str(file)
    assert message.endswith(caught.value.reason)


def test_formats() -> None:
    assert {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif"} <= image_extensions()
    assert not {".txt", ".mpg", ".eps", ".h5"} & image_extensions()
    assert "EPS" not in image_formats()
    assert not {"IPTC", "FITS", "MPEG", "WMF"} & set(image_formats())
