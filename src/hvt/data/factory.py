"""Hugging Face, WebDataset, torchvision and TensorFlow data sets, through timm's factory."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import IterableImageDataset, create_dataset

from ..errors import HVTError
from .images import (
    FileImages,
    IndexedImages,
    UnreadableImageError,
    mode_of,
    read_image,
    to_channels,
    why,
)

# Prefix → the packages that it needs.
_PACKAGES = {
    "hfds": "datasets",
    "hfids": "datasets",
    "tfds": "tensorflow tensorflow-datasets",
    "torch": "torchvision",
    "wds": "webdataset",
}

_VALIDATION = ("validation", "val", "test")  # names of the split, the usual one first


class MissingSplitError(HVTError):
    """A split that is not there, or that has no labels."""


class FactoryImages(IndexedImages):
    """A data set of timm's factory with random access."""

    def __init__(self, dataset: Any, name: str, labels: Sequence[int], in_chans: int = 3) -> None:
        super().__init__(np.arange(len(labels)), labels, in_chans)
        self.dataset, self.name = dataset, name

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        place, name = int(self.items[index]), self.path(index)
        reader = getattr(self.dataset, "reader", None)
        try:
            if reader is None:
                return to_channels(self.dataset[place][0], self.in_chans), self.labels[index]
            file, _ = reader[place]  # past timm's own reading, which skips broken images unseen
        except Exception as error:  # as Pillow's, of damaged images
            raise UnreadableImageError.of(name, why(error)) from error
        with file:
            return read_image(file, self.in_chans, name=name), self.labels[index]

    def path(self, index: int) -> str:
        """What errors call an image."""
        return f"image {self.items[index]} of {self.name}"


FactoryPart = FactoryImages | FileImages | IterableImageDataset


def is_factory_name(name: str) -> bool:
    """Whether a name has one of timm's prefixes, as in `hfds/food101`."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and prefix.lower() in _PACKAGES


def open_factory(
    name: str, root: Path | None, in_chans: int, need_train: bool, **options: Any
) -> tuple[FactoryPart | None, FactoryPart | None, tuple[str, ...]]:
    """Open the training and the validation split.

    The names of the classes come with them, or none. `hfds/FOLDER` is a folder that the `datasets`
    package reads. `wds/FOLDER` is the folder of shards, below `root` if it is there; otherwise that
    is `root`, whatever the name. A `classes.txt` beside the shards, one name in a line, names the
    classes. Without `need_train` there is no training split. Without a validation split there is
    an error, unless a part of the training split can do for one.
    """
    root = _find_root(name, root)
    options["root"] = None if root is None else str(root)
    names: tuple[str, ...] = ()
    train: FactoryPart | None = None
    val: FactoryPart | None = None
    if need_train:
        train, names = _open_split(name, "train", in_chans, options)
    failure: MissingSplitError | None = None
    for split in _VALIDATION:
        try:
            val, val_names = _open_split(name, split, in_chans, options)
            names = names or val_names
            break
        except MissingSplitError as error:
            failure = failure or error
    if failure and val is None and (train is None or isinstance(train, IterableImageDataset)):
        raise failure
    if not names and root is not None and (root / "classes.txt").is_file():
        names = read_names(root / "classes.txt")
    for part in (train, val):
        if names and part is not None:
            check_labels(name, part, len(names))
    return train, val, names


def _find_root(name: str, root: Path | None) -> Path | None:
    """The folder that timm should look into; an error for what it cannot open."""
    prefix, _, rest = name.partition("/")
    prefix = prefix.lower()
    packages = _PACKAGES[prefix]
    if any(importlib.util.find_spec(p.replace("-", "_")) is None for p in packages.split()):
        raise HVTError(f"{name} needs a package that is not installed: pip install {packages}")
    if prefix == "torch":
        return root or Path("data")
    if prefix != "wds":
        return root
    if root is None:
        return Path(rest)
    return root / rest if (root / rest).exists() else root  # else a name only, as timm takes it


def _open_split(
    name: str, split: str, in_chans: int, options: dict[str, Any]
) -> tuple[FactoryPart, tuple[str, ...]]:
    options = {"input_img_mode": mode_of(in_chans), "is_training": split == "train", **options}
    try:
        with _trust_remote_code_ignored(name):
            dataset = create_dataset(name, split=split, **options)
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:  # timm's for a split
        reason = f"{name} cannot be opened with the split {split}: {why(error)}"
        raise MissingSplitError(reason) from error
    except Exception as error:  # the network, the disk, a package
        raise HVTError(f"{name} cannot be opened: {why(error)}") from error
    names = _class_names(dataset)
    if isinstance(dataset, IterableImageDataset):
        return dataset, names
    try:
        labels = _labels(dataset)
    except Exception as error:  # a column of another name, several numbers for an image
        raise HVTError(
            f"{name} does not have its labels as numbers in a column called label: {why(error)}"
        ) from error
    if labels and min(labels) < 0:
        raise MissingSplitError(f"the split {split} of {name} has no labels")
    if hasattr(dataset, "imgs"):  # the files of torchvision's ImageNet and Places365
        return FileImages([path for path, _ in dataset.imgs], labels, in_chans), names
    return FactoryImages(dataset, name, labels, in_chans), names


@contextlib.contextmanager
def _trust_remote_code_ignored(name: str) -> Iterator[None]:
    """timm's reader of streams passes `trust_remote_code`, unknown to datasets 4 and later."""
    if not name.lower().startswith("hfids/"):
        yield
        return
    datasets: Any = importlib.import_module("datasets")
    load = datasets.load_dataset_builder
    datasets.load_dataset_builder = lambda *args, trust_remote_code, **kw: load(*args, **kw)
    try:
        yield
    finally:
        datasets.load_dataset_builder = load


def _labels(dataset: Any) -> list[int]:
    """The label of every image, without opening one."""
    if hasattr(dataset, "reader"):  # Hugging Face's
        labels = dataset.reader.dataset[dataset.reader.label_key]
    elif hasattr(dataset, "targets"):
        labels = dataset.targets
    else:  # torchvision's INaturalist
        labels = [label for label, _ in dataset.index]
    return [int(label) for label in labels]


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names by label, as far as the data set tells them."""
    reader: Any = getattr(dataset, "reader", None)
    if hasattr(reader, "builder"):  # hfids, tfds
        features = reader.builder.info.features or {}
        return tuple(getattr(features["label"], "names", ())) if "label" in features else ()
    # torchvision's ImageNet has every synonym of a class in `class_to_idx`.
    places = getattr(dataset, "wnid_to_idx", getattr(reader or dataset, "class_to_idx", {}))
    return tuple(sorted(places, key=places.__getitem__))


def read_names(file: Path) -> tuple[str, ...]:
    """The lines of a file, each the name of a class."""
    try:
        names = tuple(map(str.strip, file.read_text("utf-8-sig").rstrip().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise HVTError(f"{file} cannot be read as UTF-8 text: {why(error)}") from error
    if "" in names:
        raise HVTError(
            f"line {names.index('') + 1} of {file} is empty, where the name of class "
            f"{names.index('')} should be: give each class its line"
        )
    return names


class StreamLabels:
    """Maps a stream's labels as they are read; one without a name is an error."""

    def __init__(self, name: str, places: Sequence[int]) -> None:
        self.name, self.places = name, places

    def __call__(self, label: Any) -> int:
        if not 0 <= int(label) < len(self.places):
            count = len(self.places)
            raise HVTError(
                f"{self.name} has the label {label} and names {count} classes: name them all"
            )
        return self.places[int(label)]


def check_labels(name: str, images: FactoryPart, classes: int) -> None:
    """Raise an error for labels without a name: at once where they are listed, else when read."""
    labels = StreamLabels(name, range(classes))
    if isinstance(images, IterableImageDataset):
        images.target_transform = labels
    else:
        labels(max(images.labels, default=0))
