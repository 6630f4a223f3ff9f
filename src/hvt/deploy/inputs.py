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
    if isinstance(image, np.ndarray):
        return to_channels(_from_array(image), in_chans)
    if isinstance(image, Tensor):
        return to_channels(_from_tensor(image), in_chans)
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


def _from_array(array: np.ndarray) -> Image.Image:
    """uint8 `(H, W, 3)` in RGB, or `(H, W, 1)` in grey."""
    if array.dtype != np.uint8:
        raise HVTError(
            f"an array of {array.dtype} is not an image: give uint8 values from 0 to 255"
        )
    _check_shape("an array", array.shape, "(H, W, C)", array.shape[-1:])
    return Image.fromarray(np.ascontiguousarray(array.squeeze(2) if array.shape[2] == 1 else array))


def _from_tensor(tensor: Tensor) -> Image.Image:
    """uint8, or float from 0 to 1: `(3, H, W)` in RGB, or `(1, H, W)` in grey."""
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise HVTError(
            f"a tensor of {tensor.dtype} is not an image: give uint8 values from 0 to 255, or "
            "float ones from 0 to 1"
        )
    _check_shape("a tensor", tuple(tensor.shape), "(C, H, W)", tensor.shape[:1])
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        low, high = tensor.min().item(), tensor.max().item()
        if not (low >= 0 and high <= 1):  # NaN too
            raise HVTError(
                f"a float tensor from {low:.4g} to {high:.4g} is not an image: its values must "
                "be from 0 to 1, before any normalisation"
            )
        tensor = tensor.float().mul(255).round().to(torch.uint8)
    return _from_array(tensor.permute(1, 2, 0).numpy())


def _check_shape(what: str, shape: tuple[int, ...], wanted: str, channels: tuple[int, ...]) -> None:
    if len(shape) != 3 or 0 in shape or channels[0] not in (1, 3):
        raise HVTError(
            f"{what} of shape {shape} is not an image: give {wanted} with C = 3 for RGB or C = 1 "
            "for grey, and a batch as list(batch)"
        )


# ── paths ───────────────────────────────────────────────────────────────────────────────────────


def find_images(patterns: Sequence[str]) -> list[str]:
    """The files behind paths, folders and glob patterns, in order; each must give some."""
    paths: list[str] = []
    for pattern in patterns:
        # os.path: Path raises for a name that is too long, or an unknown user's.
        path = os.path.expanduser(pattern)  # noqa: PTH111
        if os.path.isdir(path):  # noqa: PTH112
            files = _below(Path(path))
            if not files:
                raise HVTError(f"the folder {path} has no images in it")
        elif os.path.exists(path):  # noqa: PTH110
            files = [Path(path)]
        elif not glob.has_magic(path):
            raise HVTError(f"there is no file {pattern}")
        else:
            files = _matching(Path(path))
            if not files:
                raise HVTError(f"no image matches {pattern}")
        paths += map(str, files)
    return paths


def _below(folder: Path) -> list[Path]:
    """Every image below a folder, without what is hidden, through links to folders too."""
    return sorted(path for path in map(Path, files_below(folder)) if _looks_like_one(path))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") and part != ".." for part in path.parts)


def _matching(pattern: Path) -> list[Path]:
    """What a glob pattern stands for; of folders it is the images below them."""
    # Path.glob, as glob.glob follows links in `**` without end. But Path.glob takes no absolute
    # patterns, and gives hidden files, which no shell does.
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    base, rest = Path(*parts[:first]), parts[first:]
    try:
        matches = list(base.glob("/".join(rest)))
    except (OSError, ValueError, NotImplementedError):  # a name that no file can have
        return []
    if not any(part.startswith(".") for part in rest):
        matches = [path for path in matches if not _hidden(path.relative_to(base))]
    files = [path for path in matches if path.is_file()]
    if not pattern.suffix:  # it does not say itself which files it means
        files = [path for path in files if _looks_like_one(path)]
        files += [path for folder in matches if folder.is_dir() for path in _below(folder)]
    return sorted(set(files))


def _looks_like_one(path: Path) -> bool:
    known = path.suffix.lower() in image_extensions()
    return known and not path.name.startswith(".") and path.is_file()
