"""Every image of a source opened once: which are broken, twice there, or few of their class."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from ..errors import HVTError
from ..files import encodable
from .evaluation import RefuseStrips
from .images import FileImages, UnreadableImageError, image_formats, read_image, why
from .sources import Images, open_parts, why_not_trainable

TINY = 10
"""A class with fewer training images than this is pointed out."""

_refuse_strips = RefuseStrips(256)  # as for a model of 224 pixels
_CHUNK = 16  # images that a thread takes at a time


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
    """Images that are in more than one part: a model was trained on what it is evaluated on."""
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
    """What was found in an image."""

    part: str
    class_name: str
    path: str
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    reason: str = ""
    """Why it cannot be read."""


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
    report = Report(
        encodable(str(name)),
        ignored=sorted(map(encodable, source.ignored)),
        problems=why_not_trainable(str(name), source),
    )
    places: list[tuple[str, Images, int]] = []
    for part, images in (("train", source.train), ("val", source.val)):
        if images is None:
            continue
        if not isinstance(images, Images):
            raise HVTError(f"{name} is a stream, which cannot be checked: check it as a folder")
        part = "all" if source.val is None else part
        places += [(part, images, index) for index in range(len(images))]
        report.images[part] = len(images)
    look = functools.partial(_look, source.class_names)
    with ThreadPool(workers or min(32, os.cpu_count() or 1)) as pool:
        seen = list(progress(pool.imap(look, places, _CHUNK), len(places)))
    _count_classes(report, seen, source.class_names)
    _collect(report, seen)
    return report


def _look(names: tuple[str, ...], place: tuple[str, Images, int]) -> _Seen:
    """Read an image, from its file where it has one of its own."""
    part, images, index = place
    label = int(images.labels[index])
    name = names[label] if names else str(label)
    path, content, mode = f"{part}[{index}]", b"", ""
    try:
        if isinstance(images, FileImages):
            path = encodable(images.path(index))
            content = images.path(index).read_bytes()
            image = read_image(content)
            with Image.open(io.BytesIO(content), formats=image_formats()) as header:
                mode = header.mode  # that of the file
        else:
            image = images[index][0]
        _refuse_strips(image)
    except (UnreadableImageError, OSError) as error:
        reason = error.reason if isinstance(error, UnreadableImageError) else why(error)
        return _Seen(part, name, path, reason=reason)
    digest = hashlib.blake2b(content or image.tobytes(), digest_size=16).digest()
    return _Seen(part, name, path, digest, image.size, mode or image.mode)


def _count_classes(report: Report, seen: list[_Seen], names: tuple[str, ...]) -> None:
    counts = Counter((one.class_name, one.part) for one in seen)
    for name in names or sorted({name for name, _ in counts}):
        report.classes[name] = {part: counts[name, part] for part in report.images}
    part = next(iter(report.images))  # that is trained on, if there is one
    if part != "val":
        report.tiny = {name: of[part] for name, of in report.classes.items() if of[part] < TINY}


def _collect(report: Report, seen: list[_Seen]) -> None:
    report.broken = [Broken(one.path, one.part, one.reason) for one in seen if one.reason]
    read = [one for one in seen if not one.reason]
    if read:
        widths, heights = zip(*(one.size for one in read), strict=True)
        report.width = (min(widths), median(widths), max(widths))
        report.height = (min(heights), median(heights), max(heights))
    report.modes = dict(Counter(one.mode for one in read).most_common())
    same: dict[bytes, list[_Seen]] = defaultdict(list)
    for one in read:
        same[one.digest].append(one)
    for ones in same.values():
        group = DuplicateGroup(
            tuple(one.path for one in ones),
            tuple(one.part for one in ones),
            tuple(one.class_name for one in ones),
        )
        if len(set(group.parts)) > 1:
            report.shared.append(group)
        if len(set(group.classes)) > 1:
            report.contradicting.append(group)
