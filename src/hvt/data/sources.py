"""Where images come from: a source's name or path, opened as training and validation parts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HVTError, did_you_mean
from ..files import expanded
from .arrays import CIFAR, ArrayImages, open_cifar, open_digits
from .classes import ClassMatch, match_classes
from .folders import open_folder
from .images import IndexedImages, mode_of
from .packed import open_hub, open_shards
from .splits import split_stratified, subsample

SOURCES = ("cifar10", "cifar100", "digits", "imagenet")


Images = ArrayImages | IndexedImages
"""Each has `labels`, `subset(indices)` and `relabel(mapping)`."""


@dataclass(frozen=True, kw_only=True)
class EvalData:
    """What a model is evaluated on."""

    name: str
    val: Images
    class_names: tuple[str, ...]
    """By label; empty where the source does not tell, as WebDataset shards may not."""
    match: ClassMatch | None = None
    """How the labels became indices of a model's logits, where one was named."""
    validation_part: bool = True
    """Whether the source has one. If not, `open_eval` gives all its images as `val`."""


@dataclass(frozen=True, kw_only=True)
class Data(EvalData):
    """What a model is trained and evaluated on."""

    train: Images
    held_out: bool
    """Whether `val` was cut from the training data, there being no other or none wanted."""


@dataclass(frozen=True)
class Splits:
    """A source before any split; a part is None where there is none."""

    train: Images | None
    val: Images | None
    class_names: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Files that are not taken for images."""
    problems: tuple[str, ...] = ()
    """Why it can be used neither for training nor for evaluation, each in a sentence."""


def open_data(
    name: str | Path,
    *,
    val_fraction: float = 0.1,
    holdout: float = 0.0,
    train_fraction: float = 1.0,
    seed: int = 0,
    **where: Any,
) -> Data:
    """Open a source for training, given also `root`, `download` and `in_chans` as `open_parts` is.

    Without a validation part, `val_fraction` of the training data becomes one. A `holdout` above 0
    takes that much of the training data in place of the validation part, so that choices never see
    it. A `train_fraction` below 1 keeps that fraction of each class of the rest, and at least one
    image of it.
    """
    name = str(name)
    parts = open_parts(name, **where)
    if reasons := why_not_trainable(name, parts):
        raise HVTError("; ".join(reasons))
    train, val = parts.train, parts.val
    assert train is not None
    if val is None:
        train, val = _cut(train, val_fraction, seed)
    if holdout:
        train, val = _cut(train, holdout, seed)
    if train_fraction != 1:
        train = train.subset(subsample(train.labels, train_fraction, seed))
    return Data(
        name=name,
        train=train,
        val=val,
        class_names=parts.class_names,
        held_out=parts.val is None or holdout > 0,
        validation_part=parts.val is not None,
    )


def why_not_trainable(name: str, parts: Splits) -> list[str]:
    """Why training cannot use a source, each reason a sentence; empty if it can."""
    reasons = list(parts.problems)
    if parts.train is None:
        reasons.append(f"{name} has no train folder: add one with one folder per class")
    if len(parts.class_names) == 1:
        reasons.append(
            f"{name} has only the class {parts.class_names[0]!r}: a classifier needs at least "
            "two class folders"
        )
    elif parts.val is None and parts.train is not None:
        counts = Counter(int(label) for label in parts.train.labels)
        if max(counts.values(), default=0) < 2:
            reasons.append(
                f"there are not enough images to split in {name}: add some, or a val folder"
            )
    return reasons


def open_eval(
    name: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    match_by_order: bool = False,
    **where: Any,
) -> EvalData:
    """Open only a source's validation part, or all of a source without one.

    `validation_part` tells which: a model trained on the latter has seen most of its images.
    `root`, `download` and `in_chans` are those of `open_parts`.

    With a model's `class_names`, or its `num_classes` where it does not know their names, the
    labels become indices of its logits (see `match_classes`).
    """
    name = str(name)
    parts = open_parts(name, need_train=False, **where)
    if parts.problems:
        raise HVTError("; ".join(parts.problems))
    val = parts.val if parts.val is not None else parts.train
    assert val is not None
    names, match = parts.class_names, None
    if class_names is not None or num_classes is not None:
        count = len(class_names) if class_names is not None else num_classes or 0
        match = match_classes(names, class_names, count, name, match_by_order)
        val = val if match.by == "label" else val.relabel(match.places)
        names = tuple(class_names or names)
    return EvalData(
        name=name, val=val, class_names=names, match=match, validation_part=parts.val is not None
    )


def open_parts(
    name: str | Path,
    *,
    root: str | Path | None = None,
    download: bool = False,
    in_chans: int = 3,
    need_train: bool = True,
) -> Splits:
    """Open a source without splitting it; without `need_train`, training data is not read.

    `name` is one of `SOURCES`, a folder (with `train/` and `val/`, or of class folders only),
    `hfds/…` of the Hugging Face hub or `wds/…` of WebDataset; `./digits` is a folder in any case.
    `root` is where the named sources lie (`data` if not given), and what a relative folder is
    relative to. A folder of class folders without a validation part is the training part.
    """
    name = str(name)
    mode_of(in_chans)
    if "" in (name, root):  # which would be the working folder
        raise HVTError("data and root must not be empty: name a folder")
    base = None if root is None else expanded(root)
    base_or_default = base or Path("data")
    if name == "digits":
        return Splits(*open_digits(in_chans))
    if name in CIFAR:
        return Splits(*open_cifar(name, base_or_default, download, in_chans, need_train))
    if name == "imagenet":
        if not (base_or_default / "val").is_dir():
            raise HVTError(
                f"{base_or_default / 'val'} does not exist: pass --root with the folder that "
                "contains ImageNet's train and val, each with one folder per class"
            )
        return Splits(*open_folder(base_or_default, in_chans, need_train))
    if name.startswith("hfds/"):
        return Splits(*open_hub(name, base, in_chans))
    if name.startswith("wds/"):
        return Splits(*open_shards(name, base, in_chans, need_train))
    folder = expanded(name) if base is None else base / expanded(name)
    exists = os.path.exists(folder)  # noqa: PTH110 - never raises
    if not exists and not any(sign in name for sign in "/\\.~"):
        raise HVTError(
            f"{name!r} is neither a folder nor a known source: {did_you_mean(name, SOURCES)}"
        )
    return Splits(*open_folder(folder, in_chans, need_train))


def _cut(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    train, val = split_stratified(images.labels, fraction, seed)
    return images.subset(train), images.subset(val)
