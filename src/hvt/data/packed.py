"""Images in other containers than files: Hugging Face data sets and WebDataset shards."""

from __future__ import annotations

import importlib
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import HVTError
from .images import IndexedImages, image_extensions, read_image, why

_VALIDATION = ("validation", "val", "test")  # names of the split, the usual one first


class HubImages(IndexedImages):
    """A split of a Hugging Face data set."""

    def __init__(self, dataset: Any, name: str, in_chans: int) -> None:
        super().__init__(np.arange(len(dataset)), [int(x) for x in dataset["label"]], in_chans)
        self.dataset, self.name = dataset, name

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = self.dataset[int(self.items[index])]["image"]
        file = image["bytes"] or image["path"]
        return read_image(file, self.in_chans, name=self.path(index)), self.labels[index]

    def path(self, index: int) -> str:
        """What errors call an image."""
        return f"image {self.items[index]} of {self.name}"


class ShardImages(IndexedImages):
    """Images in WebDataset's tar files; `items` are (number of the tar, first byte, size)."""

    def __init__(self, tars: Sequence[Path], in_chans: int) -> None:
        found = [(number, *image) for number, tar in enumerate(tars) for image in _images_in(tar)]
        places = np.array(found, np.int64).reshape(-1, 4)  # tar, label, first byte, size
        super().__init__(places[:, [0, 2, 3]], places[:, 1].tolist(), in_chans)
        self.tars = tars

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        number, start, size = self.items[index]
        with self.tars[number].open("rb") as file:
            file.seek(start)
            content = file.read(size)
        return read_image(content, self.in_chans, name=self.path(index)), self.labels[index]

    def path(self, index: int) -> str:
        """What errors call an image."""
        number, start, _ = self.items[index]
        return f"the image at byte {start} of {self.tars[number]}"


Opened = tuple[IndexedImages | None, IndexedImages | None, tuple[str, ...]]
"""The training and the validation part, and the names of the classes, if there are any."""


def open_hub(name: str, root: Path | None, in_chans: int) -> Opened:
    """Open `hfds/NAME` of the Hugging Face hub, or a folder that the `datasets` package reads."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise HVTError(f"{name} needs the package datasets: pip install datasets") from error
    try:
        found = datasets.load_dataset(name.partition("/")[2], cache_dir=root and str(root))
        found = found.cast_column("image", datasets.Image(decode=False))
        splits = {split: HubImages(part, name, in_chans) for split, part in found.items()}
        names = tuple(getattr(next(iter(found.values())).features["label"], "names", ()))
    except Exception as error:  # the network, the disk, a column of another name or kind
        raise HVTError(
            f"{name} cannot be opened with an image and a number as label in columns of these "
            f"names: {why(error)}"
        ) from error
    labelled = {k: part for k, part in splits.items() if min(part.labels, default=-1) >= 0}
    val = next((labelled[split] for split in _VALIDATION if split in labelled), None)
    if val is None and "train" not in labelled:
        raise HVTError(f"{name} has no split called train or validation")
    return labelled.get("train"), val, names


def open_shards(name: str, root: Path | None, in_chans: int, need_train: bool) -> Opened:
    """Open `wds/FOLDER` of WebDataset: tar files with train or validation in their names.

    Each image has its label in a `.cls` beside it. A `classes.txt`, one name in a line, names the
    classes.
    """
    folder = (root or Path()) / name.partition("/")[2]
    tars = sorted(folder.glob("*.tar"))
    parts = {part: [tar for tar in tars if part in tar.name] for part in ("train", *_VALIDATION)}
    val_tars = next((parts[part] for part in _VALIDATION if parts[part]), [])
    if not (parts["train"] or val_tars):
        raise HVTError(f"{folder} has no tar files called *train*.tar or *validation*.tar")
    names = read_names(folder / "classes.txt") if (folder / "classes.txt").is_file() else ()
    val = ShardImages(val_tars, in_chans) if val_tars else None
    train = ShardImages(parts["train"], in_chans) if need_train or val is None else None
    for part in (train, val):
        last = max(part.labels, default=0) if part is not None else 0
        if names and last >= len(names):
            raise HVTError(
                f"{name} has the label {last} but only {len(names)} class names: name them all"
            )
    return train if parts["train"] else None, val, names


def tar_members(path: str | Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an uncompressed tar file, one by one; tarfile ends at damage without error."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            yield tar, member
            tar.members = []  # type: ignore[attr-defined]  # it would keep them all
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {tar.offset}")


def _images_in(tar: Path) -> list[tuple[int, int, int]]:
    """The label, the first byte and the size of each image in a shard."""
    labels: dict[str, int] = {}
    images: dict[str, tuple[int, int]] = {}
    try:
        for shard, member in tar_members(tar):
            folder, _, file = member.name.rpartition("/")
            stem, _, ending = file.partition(".")
            if ending == "cls":
                labels[f"{folder}/{stem}"] = int(shard.extractfile(member).read())  # type: ignore[union-attr]
            elif f".{ending.lower()}" in image_extensions():
                images[f"{folder}/{stem}"] = member.offset_data, member.size
        return [(labels[key], *place) for key, place in images.items()]
    except (OSError, ValueError, tarfile.TarError) as error:
        raise HVTError(f"{tar} cannot be read as a shard of WebDataset: {error}") from error
    except KeyError as error:
        raise HVTError(f"{tar} has no label {error.args[0].lstrip('/')}.cls") from error


def read_names(file: Path) -> tuple[str, ...]:
    """The lines of a file, each the name of a class."""
    try:
        names = tuple(map(str.strip, file.read_text("utf-8-sig").rstrip().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise HVTError(f"{file} cannot be read as UTF-8 text: {why(error)}") from error
    if "" in names:
        raise HVTError(f"line {names.index('') + 1} of {file} is empty: give each class its line")
    return names
