"""What a predictor takes for images: paths, folders, globs, PIL images, arrays, bytes, files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.folders import files_below
from ..data.images import (
    UnreadableImageError,
    finish,
    image_extensions,
    mode_of,
    read_image,
    to_channels,
    why,
)
from ..errors import HVTError

InMemory = Image.Image | np.ndarray | Tensor | bytes | bytearray | memoryview | BinaryIO
"""What is one image for certain: arrays are uint8 `(H, W, C)`, tensors `(C, H, W)`."""
ImageInput = str | os.PathLike[str] | InMemory
"""A path may also be that of a folder, or a glob pattern: of many images."""


def is_one(images: object) -> bool:
    """Whether this is one image rather than many; raises an error for what is neither."""
    if isinstance(images, str | os.PathLike):
        path = os.path.expanduser(images)  # noqa: PTH111 - as below
        return os.path.isfile(path) or not (os.path.isdir(path) or glob.has_magic(path))  # noqa: PTH112, PTH113
    if _is_image(images):
        return True
    # The order of a set or a mapping says nothing.
    if isinstance(images, Iterable) and not isinstance(images, Mapping | Set):
        return False
    raise _no_image(images)


def each_image(images: Any) -> Iterator[ImageInput]:
    """The images one by one, folders and globs as the files they stand for.

    A list is checked before the first is read, so that a missing file costs no time.
    """
    if is_one(images) or isinstance(images, str | os.PathLike):
        images = [images]
    return iter(list(_expand(images))) if isinstance(images, Sequence) else _expand(images)


def _expand(images: Iterable[Any]) -> Iterator[ImageInput]:
    for image in images:
        if isinstance(image, str | os.PathLike):
            yield from find_images([os.fspath(image)])
        elif _is_image(image):
            yield image
        else:
            raise _no_image(image)


def _is_image(image: object) -> bool:
    known = (Image.Image, np.ndarray, Tensor, bytes, bytearray, memoryview)
    return isinstance(image, known) or callable(getattr(image, "read", None))


def _no_image(value: object) -> HVTError:
    return HVTError(
        f"a value of type {type(value).__name__} is not an image: give a path, a folder, a glob, "
        "a PIL image, a uint8 array (H, W, C), a tensor (C, H, W), bytes or a binary file, "
        "or a list of them"
    )


def source_of(image: object) -> str | None:
    """The path of an image, where it has one."""
    if isinstance(image, str | os.PathLike):
        return os.fspath(image)
    name = getattr(image, "filename" if isinstance(image, Image.Image) else "name", None)
    return str(name) if isinstance(name, str | os.PathLike) and str(name) else None


def open_image(image: ImageInput, in_chans: int) -> Image.Image:
    """The image upright, as 8-bit RGB (3 channels) or grey (1 channel).

    Damaged content raises an `UnreadableImageError`, an array of another kind another `HVTError`.
    """
    mode_of(in_chans)
    if isinstance(image, np.ndarray | Tensor):
        return to_channels(_from_pixels(image), in_chans)
    name = source_of(image) or "the image"
    if isinstance(image, Image.Image):
        try:
            copy = image.copy()  # the caller's stays as it is
            copy.format = image.format  # which says how many bits a PGM has
            return finish(copy, in_chans)
        except Exception as error:  # damaged content, a closed file: all sorts
            raise UnreadableImageError.of(name, why(error)) from error
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), in_chans)
    content = bytes(image) if isinstance(image, bytearray | memoryview) else image
    return read_image(content, in_chans, name=name)


def _from_pixels(pixels: Any) -> Image.Image:
    """An array `(H, W, C)` of uint8, or a tensor `(C, H, W)` of uint8 or of floats from 0 to 1."""
    shape, is_tensor = tuple(pixels.shape), isinstance(pixels, Tensor)
    if len(shape) != 3 or 0 in shape or shape[0 if is_tensor else 2] not in (1, 3):
        layout = "a tensor (C, H, W)" if is_tensor else "an array (H, W, C)"
        raise HVTError(
            f"pixels of shape {shape} are not an image: give {layout} with C = 3 for RGB or C = 1 "
            "for grey, and a batch as list(batch)"
        )
    if is_tensor:
        pixels = pixels.detach().cpu().permute(1, 2, 0)
        if pixels.is_floating_point():
            low, high = pixels.min().item(), pixels.max().item()
            if not (low >= 0 and high <= 1):  # NaN too
                raise HVTError(
                    f"a float tensor from {low:.4g} to {high:.4g} is not an image: its values must "
                    "be from 0 to 1, before any normalisation"
                )
            pixels = pixels.float().mul(255).round().to(torch.uint8)
        pixels = pixels.numpy()
    if pixels.dtype != np.uint8:
        raise HVTError(
            f"pixels of {pixels.dtype} are not an image: give uint8 values from 0 to 255, or a "
            "float tensor from 0 to 1"
        )
    grey = pixels.shape[2] == 1
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if grey else pixels))


# ── paths ───────────────────────────────────────────────────────────────────────────────────────


def find_images(patterns: Sequence[str]) -> list[str]:
    """The files behind paths, folders and glob patterns, in order; each must give some."""
    paths: list[str] = []
    for pattern in patterns:
        # os.path: Path raises for a name that is too long, or an unknown user's.
        path = os.path.expanduser(pattern)  # noqa: PTH111
        if os.path.isdir(path):  # noqa: PTH112
            files = [file for file in files_below(Path(path)) if _looks_like_one(file)]
        elif os.path.exists(path):  # noqa: PTH110
            files = [path]
        elif glob.has_magic(path):
            files = _matching(Path(path))
        else:
            raise HVTError(f"there is no file {pattern}")
        if not files:
            raise HVTError(f"no images in {pattern}")
        paths += files
    return paths


def _matching(pattern: Path) -> list[str]:
    """What a glob pattern stands for; of folders it is the images below them."""
    # Path.glob, as glob.glob follows links in `**` without end. But Path.glob takes no absolute
    # patterns, and gives hidden files, which no shell does.
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    base, files = Path(*parts[:first]), set()
    try:
        matches = list(base.glob("/".join(parts[first:])))
    except (OSError, ValueError):  # such as `**.jpg`
        return []
    for path in matches:
        if any(part.startswith(".") for part in path.relative_to(base).parts):
            continue
        if pattern.suffix:  # it says itself which files it means
            files |= {str(path)} if path.is_file() else set()
        else:
            below = files_below(path) if path.is_dir() else [str(path)]
            files |= {file for file in below if _looks_like_one(file)}
    return sorted(files)


def _looks_like_one(path: str) -> bool:
    return Path(path).suffix.lower() in image_extensions()
