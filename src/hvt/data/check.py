"""Every image of a source opened once: which are broken, twice there, or few of their class."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from ..files import encodable
from .evaluation import RejectStrips
from .images import FileImages, UnreadableImageError, read_image, why
from .sources import Images, open_parts, why_not_trainable

TINY = 10
"""A class with fewer training images than this is pointed out."""

_reject_strips = RejectStrips(256)  # as for a model of 224 pixels


@dataclass(frozen=True)
class CheckedImage:
    """Where an image is, and why it cannot be read, if so."""

    path: str
    part: str
    class_name: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found; `clean` if every image can be read and training would take them."""

    name: str
    images: dict[str, int]
    """Part (train, val, or all) → how many images, broken ones too."""
    classes: dict[str, dict[str, int]]
    """Class → part → how many images."""
    broken: list[CheckedImage]
    ignored: list[str]
    """Files that are not taken for images."""
    shared: list[list[CheckedImage]]
    """The same file content in more than one part: a model was trained on what it is evaluated
    on."""
    contradicting: list[list[CheckedImage]]
    """The same file content in more than one class."""
    tiny: dict[str, int]
    """Classes with few training images."""
    problems: list[str]
    """Why training cannot use the data even if every image can be read."""

    @property
    def clean(self) -> bool:
        return not self.broken and not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"clean": self.clean, **asdict(self)}


Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Wraps what is worked through, given its length, as a progress bar does."""


def check(
    name: str | Path,
    workers: int | None = None,
    *,
    root: str | Path | None = None,
    progress: Progress = lambda items, total: items,
) -> Report:
    """Read every image of a source in full; threads do, since decoding lets go of the lock."""
    source = open_parts(name, root=root)
    parts = {"train": source.train, "val": source.val}
    if source.val is None:
        parts = {"all": source.train}
    opened = {part: images for part, images in parts.items() if images is not None}
    places = [(part, images, i) for part, images in opened.items() for i in range(len(images))]
    look = functools.partial(_look, source.class_names)
    with ThreadPool(workers or min(32, os.cpu_count() or 1)) as pool:
        seen = list(progress(pool.imap(look, places, chunksize=16), len(places)))
    counts = Counter((one.class_name, one.part) for one, _ in seen)
    names = source.class_names or sorted({name for name, _ in counts})
    classes = {name: {part: counts[name, part] for part in opened} for name in names}
    first = next(iter(opened))  # that is trained on, if there is one
    few = {name: of[first] for name, of in classes.items() if of[first] < TINY}
    same: dict[bytes, list[CheckedImage]] = defaultdict(list)
    for one, digest in seen:
        if not one.reason:
            same[digest].append(one)
    return Report(
        name=encodable(str(name)),
        images={part: len(images) for part, images in opened.items()},
        classes=classes,
        broken=[one for one, _ in seen if one.reason],
        ignored=sorted(map(encodable, source.ignored)),
        shared=[ones for ones in same.values() if len({one.part for one in ones}) > 1],
        contradicting=[ones for ones in same.values() if len({one.class_name for one in ones}) > 1],
        tiny={} if first == "val" else few,
        problems=why_not_trainable(str(name), source),
    )


def _look(names: tuple[str, ...], place: tuple[str, Images, int]) -> tuple[CheckedImage, bytes]:
    """Read an image, from its file where it has one of its own, and digest its content."""
    part, images, index = place
    label = int(images.labels[index])
    name = names[label] if names else str(label)
    path, content = f"{part}[{index}]", b""
    try:
        if isinstance(images, FileImages):
            path = encodable(images.path(index))
            content = images.path(index).read_bytes()
            image = read_image(content)
        else:
            image = images[index][0]
        _reject_strips(image)
    except (UnreadableImageError, OSError) as error:
        reason = error.reason if isinstance(error, UnreadableImageError) else why(error)
        return CheckedImage(path, part, name, reason), b""
    digest = hashlib.blake2b(content or image.tobytes(), digest_size=16).digest()
    return CheckedImage(path, part, name), digest
