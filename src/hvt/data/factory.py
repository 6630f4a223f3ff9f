"""Hugging Face data sets (`hfds/…`) and WebDataset shards (`wds/…`), through timm's factory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import IterableImageDataset, create_dataset

from ..errors import HVTError
from .images import IndexedImages, UnreadableImageError, mode_of, read_image, why

_PACKAGES = {"hfds": "datasets", "wds": "webdataset"}
_VALIDATION = ("validation", "val", "test")  # names of the split, the usual one first


class MissingSplitError(HVTError):
    """A split that is not there, or that has no labels."""


class FactoryImages(IndexedImages):
    """A Hugging Face data set."""

    def __init__(self, dataset: Any, name: str, labels: Sequence[int], in_chans: int = 3) -> None:
        super().__init__(np.arange(len(labels)), labels, in_chans)
        self.dataset, self.name = dataset, name

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        name = self.path(index)
        try:  # past timm's own reading, which skips broken images unseen
            file, _ = self.dataset.reader[int(self.items[index])]
        except Exception as error:  # as Pillow's, of damaged images
            raise UnreadableImageError.of(name, why(error)) from error
        with file:
            return read_image(file, self.in_chans, name=name), self.labels[index]

    def path(self, index: int) -> str:
        """What errors call an image."""
        return f"image {self.items[index]} of {self.name}"


FactoryPart = FactoryImages | IterableImageDataset


def is_factory_name(name: str) -> bool:
    """Whether a name has one of the prefixes, as in `hfds/food101`."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and prefix.lower() in _PACKAGES


def open_factory(
    name: str, root: Path | None, in_chans: int, need_train: bool, **options: Any
) -> tuple[FactoryPart | None, FactoryPart | None, tuple[str, ...]]:
    """Open the training and the validation split, and the names of the classes, if it has any.

    `hfds/FOLDER` is a folder that the `datasets` package reads. `wds/FOLDER` is the folder of
    shards; a `classes.txt` beside them, one name in a line, names the classes. Without
    `need_train` there is no training split. Without a validation split there is an error, unless
    a part of the training split can do for one.
    """
    prefix, _, rest = name.partition("/")
    package = _PACKAGES[prefix.lower()]
    if importlib.util.find_spec(package) is None:
        raise HVTError(f"{name} needs a package that is not installed: pip install {package}")
    if package == "webdataset":
        root = Path(rest) if root is None else root / rest
    options["root"] = None if root is None else str(root)
    train, names = _open_split(name, "train", in_chans, options) if need_train else (None, ())
    val: FactoryPart | None = None
    failure: MissingSplitError | None = None
    for split in _VALIDATION:
        try:
            val, val_names = _open_split(name, split, in_chans, options)
            names = names or val_names
            break
        except MissingSplitError as error:
            failure = failure or error
    if failure and val is None and not isinstance(train, FactoryImages):
        raise failure
    if not names and root is not None and (root / "classes.txt").is_file():
        names = read_names(root / "classes.txt")
    for part in (train, val):
        if names and part is not None:
            check_labels(name, part, len(names))
    return train, val, names


def _open_split(
    name: str, split: str, in_chans: int, options: dict[str, Any]
) -> tuple[FactoryPart, tuple[str, ...]]:
    options = {"input_img_mode": mode_of(in_chans), "is_training": split == "train", **options}
    try:
        dataset: Any = create_dataset(name, split=split, **options)
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:  # timm's for a split
        reason = f"{name} cannot be opened with the split {split}: {why(error)}"
        raise MissingSplitError(reason) from error
    except Exception as error:  # the network, the disk, a package
        raise HVTError(f"{name} cannot be opened: {why(error)}") from error
    reader = dataset.reader
    names = tuple(sorted(reader.class_to_idx, key=reader.class_to_idx.__getitem__))
    if isinstance(dataset, IterableImageDataset):
        return dataset, names
    try:  # without opening an image
        labels = [int(label) for label in reader.dataset[reader.label_key]]
    except Exception as error:  # a column of another name, several numbers for an image
        raise HVTError(
            f"{name} has no numeric labels in a column called label: {why(error)}"
        ) from error
    if labels and min(labels) < 0:
        raise MissingSplitError(f"the split {split} of {name} has no labels")
    return FactoryImages(dataset, name, labels, in_chans), names


def read_names(file: Path) -> tuple[str, ...]:
    """The lines of a file, each the name of a class."""
    try:
        names = tuple(map(str.strip, file.read_text("utf-8-sig").rstrip().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise HVTError(f"{file} cannot be read as UTF-8 text: {why(error)}") from error
    if "" in names:
        raise HVTError(
            f"line {names.index('') + 1} of {file} is empty: it must be the name of class "
            f"{names.index('')}"
        )
    return names


class StreamLabels:
    """Maps labels as they are read; one without a name is an error."""

    def __init__(self, name: str, places: Sequence[int]) -> None:
        self.name, self.places = name, places

    def __call__(self, label: Any) -> int:
        if not 0 <= int(label) < len(self.places):
            count = len(self.places)
            raise HVTError(
                f"{self.name} has the label {label} but only {count} class names: name them all"
            )
        return self.places[int(label)]


def check_labels(name: str, images: FactoryPart, classes: int) -> None:
    """Raise an error for labels without a name: at once where they are listed, else when read."""
    labels = StreamLabels(name, range(classes))
    if isinstance(images, IterableImageDataset):
        images.target_transform = labels
    else:
        labels(max(images.labels, default=0))
