"""Hugging Face, WebDataset, torchvision and TensorFlow data sets, through timm's factory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import IterableImageDataset, create_dataset
from torch.utils.data import Dataset

from ..errors import HVTError
from .images import UnreadableImageError, mode_of, read_image, to_channels, why

# Prefix → modules that must be there, and how to get them.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "hfds": (("datasets",), "datasets"),
    "hfids": (("datasets",), "datasets"),
    "tfds": (("tensorflow", "tensorflow_datasets"), "tensorflow tensorflow-datasets"),
    "torch": ((), ""),
    "wds": (("webdataset",), "webdataset"),
}
PREFIXES = tuple(_NEEDS)

# What timm's readers raise for a split that is not there.
_NO_SPLIT = (AssertionError, KeyError, RuntimeError, ValueError)


class FactoryImages(Dataset[tuple[Image.Image, int]]):
    """A data set of timm's factory with random access; `labels` is None where they are unknown."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        in_chans: int = 3,
        indices: Sequence[int] | None = None,
        mapping: Sequence[int] | None = None,
    ) -> None:
        self.dataset, self.name, self.in_chans = dataset, name, in_chans
        self.indices = list(range(len(dataset)) if indices is None else indices)
        self.mapping = mapping
        if hasattr(dataset, "loader"):  # torchvision's ImageNet, past its own reading
            dataset.loader = functools.partial(read_image, in_chans=in_chans)
        every = _labels(dataset)
        self.labels = None if every is None else [self._map(every[i]) for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        place, name = self.indices[index], self.path(index)
        reader = getattr(self.dataset, "reader", None)
        if reader is not None:  # past timm's own reading, which skips broken images unseen
            try:
                file, target = reader[place]
            except OSError as error:
                raise UnreadableImageError.of(name, why(error)) from error
            except (AssertionError, TypeError) as error:  # timm's, of what is not there
                raise UnreadableImageError.of(name, "there is no image") from error
            with file:
                return read_image(file, self.in_chans, name=name), self._map(target)
        try:
            image, target = self.dataset[place]
        except UnreadableImageError:
            raise
        except (OSError, SyntaxError, ValueError) as error:
            raise UnreadableImageError.of(name, " ".join(str(error).split())) from error
        return to_channels(image, self.in_chans), self._map(target)

    def path(self, index: int) -> str:
        """What errors call an image."""
        return f"image {self.indices[index]} of {self.name}"

    def subset(self, indices: Sequence[int]) -> FactoryImages:
        chosen = [self.indices[i] for i in indices]
        return FactoryImages(self.dataset, self.name, self.in_chans, chosen, self.mapping)

    def relabel(self, mapping: Sequence[int]) -> FactoryImages:
        if self.mapping is not None:
            mapping = [mapping[label] for label in self.mapping]
        return FactoryImages(self.dataset, self.name, self.in_chans, self.indices, mapping)

    def _map(self, label: Any) -> int:
        return int(label) if self.mapping is None else self.mapping[int(label)]


FactoryPart = FactoryImages | IterableImageDataset


def is_factory_name(name: str) -> bool:
    """Whether a name has one of timm's prefixes, as in `hfds/food101`."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and prefix.lower() in PREFIXES


def open_factory(
    name: str,
    *,
    root: Path | None,
    train_split: str | None,
    val_split: str | None,
    need_train: bool,
    **options: Any,
) -> tuple[FactoryPart | None, FactoryPart | None, tuple[str, ...]]:
    """Open the training and the validation split, by the names given or by those that are usual.

    The names of the classes come with them, or none. `hfds/FOLDER` is a folder that the `datasets`
    package reads. `wds/FOLDER` is the folder of shards, below `root` if it is there; otherwise that
    is `root`, whatever the name. A `classes.txt` beside the shards, one name in a line, names the
    classes. Without `need_train` there is no training split.
    """
    root = _find_root(name, root)
    options["root"] = None if root is None else str(root)
    train = _open_split(name, [train_split or "train"], True, options) if need_train else None
    val: FactoryPart | None = None
    try:
        usual = ["validation", "val", "test"]
        val = _open_split(name, [val_split] if val_split else usual, False, options)
    except HVTError as error:
        # A part of the training split can do for one that does not exist.
        may_cut = isinstance(train, FactoryImages) and not val_split
        if not may_cut or not isinstance(error.__cause__, _NO_SPLIT):
            raise
    names = _class_names(train if train is not None else val, root)
    for part in (train, val):
        if names and part is not None:
            check_labels(name, part, len(names))
    return train, val, names


def _find_root(name: str, root: Path | None) -> Path | None:
    """The folder that timm should look into; an error for what it cannot open."""
    prefix, _, rest = name.partition("/")
    modules, package = _NEEDS[prefix.lower()]
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise HVTError(f"{name} needs a package that is not installed: pip install {package}")
    if prefix.lower() in ("hfds", "hfids") and rest != rest.lower() and Path(rest).exists():
        raise HVTError(f"timm would look for {rest.lower()}: {rest} must have no capital letters")
    if prefix.lower() == "torch":
        return root or Path("data")
    if prefix.lower() != "wds":
        return root
    if root is None and not rest:
        raise HVTError("wds/ needs a folder: give wds/FOLDER, the folder with the shards")
    if root is None:
        return Path(rest)
    return root / rest if (root / rest).exists() else root  # else a name only, as timm takes it


class StreamLabels:
    """Maps a stream's labels as they are read; one without a name is an error."""

    def __init__(self, name: str, places: Sequence[int]) -> None:
        self.name, self.places = name, places

    def __call__(self, label: Any) -> int:
        if not 0 <= int(label) < len(self.places):
            raise _nameless(self.name, int(label), len(self.places))
        return self.places[int(label)]


def _nameless(name: str, label: int, classes: int) -> HVTError:
    return HVTError(f"{name} has the label {label} and names {classes} classes: name them all")


def check_labels(name: str, images: FactoryPart, classes: int) -> None:
    """Raise an error for labels without a name: at once where they are listed, else when read."""
    if isinstance(images, IterableImageDataset):
        images.target_transform = StreamLabels(name, range(classes))
    elif images.labels and max(images.labels) >= classes:
        raise _nameless(name, max(images.labels), classes)


def _open_split(
    name: str, splits: Sequence[str], training: bool, options: dict[str, Any]
) -> FactoryPart:
    options = dict(options)
    in_chans = options.pop("in_chans")
    failure: Exception | None = None
    for split in splits:
        try:
            with _builder_as_timm_calls_it(name):
                dataset = create_dataset(
                    name,
                    split=split,
                    is_training=training,
                    input_img_mode=mode_of(in_chans),
                    **options,
                )
        except _NO_SPLIT as error:
            failure = failure or error
        except Exception as error:  # the network, the disk, a package
            raise HVTError(f"{name} cannot be opened: {_one_line(error)}") from error
        else:
            if isinstance(dataset, IterableImageDataset):
                return dataset
            try:
                images = FactoryImages(dataset, name, in_chans)
            except Exception as error:  # a column of another name, several numbers for an image
                raise HVTError(
                    f"{name} does not have its labels as numbers in a column called label: "
                    f"{_one_line(error)}"
                ) from error
            if not images.labels or min(images.labels) >= 0:
                return images
            failure = failure or ValueError("its images have no labels")
    tried = " or ".join(splits)
    assert failure is not None
    raise HVTError(
        f"{name} cannot be opened with the split {tried}: {_one_line(failure)}"
    ) from failure


@contextlib.contextmanager
def _builder_as_timm_calls_it(name: str) -> Iterator[None]:
    """timm's reader of streams passes `trust_remote_code`, unknown to datasets 4 and later."""
    if not name.lower().startswith("hfids/"):
        yield
        return
    datasets: Any = importlib.import_module("datasets")
    load = datasets.load_dataset_builder
    if "trust_remote_code" in inspect.signature(load).parameters:
        yield
        return

    def load_without(*args: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        return load(*args, **kwargs)  # these versions run no remote code anyway

    datasets.load_dataset_builder = load_without
    try:
        yield
    finally:
        datasets.load_dataset_builder = load


def _labels(dataset: Any) -> list[int] | None:
    """The label of every image without opening one, if the data set keeps them somewhere."""
    reader = getattr(dataset, "reader", None)
    if reader is not None and hasattr(reader, "label_key"):
        labels = list(reader.dataset[reader.label_key])
        return [reader.class_to_idx[x] for x in labels] if reader.remap_class else labels
    targets = getattr(dataset, "targets", None)
    return None if targets is None else [int(target) for target in targets]


def _class_names(dataset: Any, root: Path | None) -> tuple[str, ...]:
    dataset = dataset.dataset if isinstance(dataset, FactoryImages) else dataset
    reader: Any = getattr(dataset, "reader", None)
    for owner in (reader, dataset):
        # torchvision's ImageNet has each of a class's names in the second.
        places = getattr(owner, "wnid_to_idx", None) or getattr(owner, "class_to_idx", None)
        if places:
            if sorted(places.values()) != list(range(len(places))):
                raise HVTError(
                    "the data has several names for a class, or none: use it as a folder"
                )
            return tuple(str(name) for name in sorted(places, key=places.__getitem__))
    if reader is not None and hasattr(reader, "builder"):  # hfids, tfds
        features = reader.builder.info.features or {}
        if "label" in features and hasattr(features["label"], "names"):
            return tuple(features["label"].names)
    file = None if root is None else root / "classes.txt"
    if file is not None and file.is_file():
        return read_names(file)
    return ()


def read_names(file: Path) -> tuple[str, ...]:
    """The lines of a file, each the name of a class."""
    try:
        lines = file.read_text("utf-8-sig").rstrip().splitlines()
    except OSError as error:
        raise HVTError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise HVTError(f"{file} is not UTF-8 text: save it as that") from error
    names = tuple(line.strip() for line in lines)
    if "" in names:
        raise HVTError(
            f"line {names.index('') + 1} of {file} is empty, where the name of class "
            f"{names.index('')} should be: give each class its line"
        )
    return names


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
