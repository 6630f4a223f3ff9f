"""Every image of a source opened once: which are broken, twice there, or few of their class."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from ..errors import HVTError
from ..files import encodable
from .arrays import ArrayImages
from .evaluation import RefuseStrips
from .images import FileImages, UnreadableImageError, image_formats, mode_of, read_image, why
from .sources import Images, open_parts, why_not_trainable

TINY = 10
"""A class with fewer training images than this is pointed out."""

_refuse_strips = RefuseStrips(256)  # as for a model of 224 pixels
_CHUNK = 4096  # images handed out at a time, so that a million need no million promises


@dataclass(frozen=True)
class Broken:
    """An image that cannot be read."""

    path: str
    part: str
    reason: str


@dataclass(frozen=True)
class DuplicateGroup:
    """The same file content at several places."""

    paths: tuple[str, ...]
    parts: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass
class Report:
    """What a check found; `clean` if every image can be read and training would take them."""

    name: str
    images: dict[str, int] = field(default_factory=dict)
    """Part (train, val, or all) → how many images, broken ones too."""
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Class → part → how many images."""
    broken: list[Broken] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Files that are not taken for images."""
    width: tuple[int, float, int] | None = None
    """Smallest, median, largest."""
    height: tuple[int, float, int] | None = None
    modes: dict[str, int] = field(default_factory=dict)
    """Pillow's mode of the files → how many images."""
    shared: list[DuplicateGroup] = field(default_factory=list)
    """Images that are in more than one part: a model has seen what it is measured on."""
    contradicting: list[DuplicateGroup] = field(default_factory=list)
    """Images that are in more than one class."""
    tiny: dict[str, int] = field(default_factory=dict)
    """Classes with few training images."""
    problems: list[str] = field(default_factory=list)
    """Why training cannot use the data even if every image can be read."""

    @property
    def clean(self) -> bool:
        return not self.broken and not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "clean": self.clean, **asdict(self)}


@dataclass(frozen=True)
class _Seen:
    path: str
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    reason: str | None = None


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
    if workers is not None and workers < 1:
        raise HVTError(f"workers={workers} is out of range: give 1 or more")
    source = open_parts(name, root=root)
    parts = {"train": source.train, "val": source.val}
    if source.val is None:
        parts = {"all": source.train}
    work: list[tuple[str, Images, int]] = []
    problems = why_not_trainable(str(name), source)
    ignored = sorted(map(encodable, source.ignored))
    report = Report(encodable(str(name)), ignored=ignored, problems=problems)
    for part, images in parts.items():
        if images is None:
            continue
        if not isinstance(images, Images):
            raise HVTError(f"{name} is a stream, which cannot be checked: check it as a folder")
        work += [(part, images, index) for index in range(len(images))]
        report.images[part] = len(images)
    _count_classes(report, parts, source.class_names)

    with ThreadPoolExecutor(workers or min(32, os.cpu_count() or 1)) as pool:
        seen = _ordered(pool, work)
        _collect(report, work, progress(seen, len(work)), source.class_names)
    return report


def _count_classes(report: Report, parts: dict[str, Any], names: tuple[str, ...]) -> None:
    for part, images in parts.items():
        if images is None or images.labels is None:
            continue
        counts = Counter(int(label) for label in images.labels)
        for label in range(max(len(names), max(counts, default=-1) + 1)):
            name = _class_name(names, label)
            report.classes.setdefault(name, {})[part] = counts[label]
    first = next(iter(report.images), "")
    report.tiny = {
        name: counts[first]
        for name, counts in report.classes.items()
        if first != "val" and first in counts and counts[first] < TINY
    }


def _class_name(names: tuple[str, ...], label: int) -> str:
    return names[label] if 0 <= label < len(names) else str(label)


def _ordered(pool: ThreadPoolExecutor, work: list[tuple[str, Images, int]]) -> Iterator[_Seen]:
    for start in range(0, len(work), _CHUNK):
        chunk = work[start : start + _CHUNK]
        # What is in memory takes less time than to hand it to a thread.
        in_memory = all(isinstance(images, ArrayImages) for _, images, _ in chunk)
        yield from map(_look, chunk) if in_memory else pool.map(_look, chunk)


def _look(item: tuple[str, Images, int]) -> _Seen:
    part, images, index = item
    if not isinstance(images, FileImages):
        return _look_inside(part, images, index)
    path = images.path(index)
    name = encodable(path)
    try:
        content = path.read_bytes()
        image = _refuse_strips(read_image(content))
    except UnreadableImageError as broken:
        return _Seen(name, reason=broken.reason)
    except OSError as error:
        return _Seen(name, reason=why(error))
    with Image.open(io.BytesIO(content), formats=image_formats()) as header:
        mode = header.mode  # that of the file
    return _Seen(name, _digest(content), image.size, mode)


def _look_inside(part: str, images: Images, index: int) -> _Seen:
    """An image that has no file of its own."""
    name = f"{part}[{index}]"
    if isinstance(images, ArrayImages):
        pixels = images.images[index].numpy()  # (H, W, C)
        height, width, channels = pixels.shape
        return _Seen(name, _digest(pixels.tobytes()), (width, height), mode_of(channels))
    try:
        image = _refuse_strips(images[index][0])
    except UnreadableImageError as broken:
        return _Seen(name, reason=broken.reason)
    return _Seen(name, _digest(image.tobytes()), image.size, image.mode)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _collect(
    report: Report,
    work: list[tuple[str, Images, int]],
    seen: Iterable[_Seen],
    names: tuple[str, ...],
) -> None:
    widths: list[int] = []
    heights: list[int] = []
    modes: Counter[str] = Counter()
    places: dict[bytes, list[int]] = defaultdict(list)
    paths: list[str] = []
    for place, ((part, _, _), one) in enumerate(zip(work, seen, strict=True)):
        paths.append(one.path)
        if one.reason is not None:
            report.broken.append(Broken(one.path, part, one.reason))
            continue
        widths.append(one.size[0])
        heights.append(one.size[1])
        modes[one.mode] += 1
        places[one.digest].append(place)
    if widths:
        report.width = (min(widths), median(widths), max(widths))
        report.height = (min(heights), median(heights), max(heights))
    report.modes = dict(modes.most_common())
    for twins in places.values():
        if len(twins) == 1:
            continue
        parts, classes = [], []
        for place in twins:
            part, images, index = work[place]
            parts.append(part)
            label = None if images.labels is None else int(images.labels[index])
            classes.append("" if label is None else _class_name(names, label))
        group = DuplicateGroup(tuple(paths[place] for place in twins), tuple(parts), tuple(classes))
        if len(set(parts)) > 1:
            report.shared.append(group)
        if len(set(classes)) > 1:
            report.contradicting.append(group)
