"""Folders of class folders: which layouts are understood, and which images they hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from ..errors import HVTError, did_you_mean
from .images import image_extensions, read_image
from .suggest import better_folder

_TRAIN = ("train", "training")
_VAL = ("val", "validation", "valid", "test")


class FileImages(Dataset[tuple[Image.Image, int]]):
    """Images in files, each read when it is asked for; `UnreadableImageError` if it cannot be."""

    def __init__(
        self, paths: Sequence[str | Path], labels: Sequence[int], in_chans: int = 3
    ) -> None:
        # One array, not a million Path objects: what worker processes only read they share, and a
        # Python object is written to whenever it is looked at (its reference count).
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.labels = list(labels)
        self.in_chans = in_chans

    @property
    def paths(self) -> list[Path]:
        return [self.path(index) for index in range(len(self))]

    @property
    def encoded_paths(self) -> list[bytes]:
        listed: list[bytes] = self._paths.tolist()
        return listed

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(bytes(self._paths[index])))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.path(index), self.in_chans), self.labels[index]

    def subset(self, indices: Sequence[int]) -> FileImages:
        paths = [self.path(i) for i in indices]
        return FileImages(paths, [self.labels[i] for i in indices], self.in_chans)

    def relabel(self, mapping: Sequence[int]) -> FileImages:
        return FileImages(self.paths, [mapping[label] for label in self.labels], self.in_chans)


@dataclass(frozen=True)
class Layout:
    """The folders that hold the class folders of each part; `val` is None if there is one part."""

    train: Path | None
    val: Path | None


@dataclass
class Scan:
    """What lies below a folder of class folders."""

    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Files that are not images by their ending, and images outside the class folders."""


def find_layout(folder: Path) -> Layout:
    """`train/` and `val/` (or validation, valid, test) if they are there, else the folder itself.

    A `train/` with images of its own and no `val/` beside it is a class of railways. One with
    class folders may be either where other images lie beside it, so that is refused.
    """
    parts = {name.lower(): folder / name for name in class_folders(folder)}
    train = next((parts[name] for name in _TRAIN if name in parts), None)
    candidates = [parts[name] for name in _VAL if name in parts]
    val = next((part for part in candidates if class_folders(part)), None)
    if val is None and candidates and candidates[0].name.lower() != "test":
        val = candidates[0]  # `test` alone may be without labels; others are meant to have them
    if train is not None and (val is not None or class_folders(train)):
        others = [path for name, path in parts.items() if name not in (*_TRAIN, *_VAL)]
        beside = next((p for p in others if _holds_images(p)), None) if val is None else None
        if beside is not None:
            raise HVTError(
                f"{folder} has {train.name} and {beside.name} with images and no val, so that "
                f"{train.name} may be the training part or a class: give {train} if it is the "
                "part, or rename it if it is a class"
            )
        return Layout(train, val)
    if train is None and val is not None and set(parts) <= set(_VAL) and class_folders(val):
        return Layout(None, val)
    return Layout(folder, None)


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    # os.path's are False of what cannot be looked at, where Path's may raise: a name too long, say.
    if not os.path.exists(folder):  # noqa: PTH110
        raise HVTError(f"{folder} does not exist: give a folder of class folders")
    if not os.path.isdir(folder):  # noqa: PTH112
        raise HVTError(f"{folder} is not a folder: give the folder that holds the class folders")
    return [entry.name for entry in _entries(str(folder)) if _is_folder(entry)]


def scan(folder: Path, known: Sequence[str] | None = None) -> Scan:
    """Every image below the class folders of a folder, sorted by path.

    A label is the place of its class among `known`, or among the folder's own classes.
    """
    names = class_folders(folder)
    loose = [e.path for e in _entries(str(folder)) if not _is_folder(e)]
    if not names:
        if any(_is_image(path) for path in loose):
            raise HVTError(
                f"{folder} has images but no class folders: put the images of each class into "
                f"a folder of its own, such as {folder / 'cat' / 'image.jpg'}"
                f"{better_folder(folder)}"
            )
        raise HVTError(f"{folder} is empty: expected class folders such as {folder / 'cat'}")
    places = {name: place for place, name in enumerate(names if known is None else known)}
    result = Scan(ignored=loose)
    for name in names:
        if name not in places:
            raise HVTError(
                f"{folder / name} is a class that the training data does not have: rename or "
                f"remove it; {did_you_mean(name, places)}"
            )
        before = len(result.paths)
        for path in files_below(folder / name, f"would be of the class {name}"):
            (result.paths if _is_image(path) else result.ignored).append(path)
        count = len(result.paths) - before
        if not count:
            raise HVTError(f"{folder / name} has no images: add some or remove the folder")
        result.labels += [places[name]] * count
    return result


def _holds_images(folder: Path) -> bool:
    """Whether there is an image anywhere below, without following links."""
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        if any(_is_image(name) and name[0] != "." for name in names):
            return True
    return False


def _is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in image_extensions()  # noqa: PTH122 - 10× faster


def files_below(folder: Path, harm: str = "would be taken too") -> Iterator[str]:
    """The files below a folder in order, without what is hidden; links are followed, each once.

    A link to a folder above is refused; `harm` says what it would do to the images there.
    """
    place = Path(os.path.abspath(folder))  # noqa: PTH100 - where a link is, not where it leads
    parents = (*place.parent.resolve().parents, place.parent)
    above = {_identity(parent): parent for parent in parents if parent != place}  # as the root's is
    seen: set[tuple[int, int]] = set()

    def enter(path: str) -> Iterator[os.DirEntry[str]]:
        here = _identity(path)
        if here in above:
            raise HVTError(
                f"{path} is a link to {above[here]}, a folder above it, so that all images there "
                f"{harm}: remove the link"
            )
        if here in seen:
            return iter(())
        seen.add(here)
        return iter(_entries(path))

    open_folders = [enter(str(folder))]  # no recursion, which has a limit
    while open_folders:
        entry = next(open_folders[-1], None)
        if entry is None:
            open_folders.pop()
        elif _is_folder(entry):
            open_folders.append(enter(entry.path))
        else:  # a link to nothing and a pipe too: reading it says what is wrong
            yield entry.path


def _identity(folder: str | Path) -> tuple[int, int]:
    try:
        status = os.stat(folder)  # noqa: PTH116
    except OSError as error:
        raise HVTError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder, sorted by name, without what is hidden."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if e.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise HVTError(f"cannot read the folder {folder}: {error.strerror or error}") from error
