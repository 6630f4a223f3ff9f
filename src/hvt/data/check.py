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
from typing import Any, NamedTuple

from PIL import Image

from ..errors import HVTError
from ..files import encodable
from .evaluation import RefuseStrips
from .images import FileImages, UnreadableImageError, image_formats, read_image, why
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
    report = Report(
        encodable(str(name)),
        ignored=sorted(map(encodable, source.ignored)),
        problems=why_not_trainable(str(name), source),
    )
    work: list[_Work] = []
    for part, images in (("train", source.train), ("val", source.val)):
        if images is None:
            continue
        if not isinstance(images, Images):
            raise HVTError(f"{name} is a stream, which cannot be checked: check it as a folder")
        part = "all" if source.val is None else part
        work += [_Work(part, images, index, source.class_names) for index in range(len(images))]
        report.images[part] = len(images)
    _count_classes(report, work, source.class_names)
    with ThreadPoolExecutor(workers or min(32, os.cpu_count() or 1)) as pool:
        _collect(report, work, list(progress(_ordered(pool, work), len(work))))
    return report


class _Work(NamedTuple):
    """An image to look at."""

    part: str
    images: Images
    number: int
    names: tuple[str, ...]

    @property
    def class_name(self) -> str:
        if self.images.labels is None:
            return ""
        label = int(self.images.labels[self.number])
        return self.names[label] if 0 <= label < len(self.names) else str(label)


def _count_classes(report: Report, work: list[_Work], names: tuple[str, ...]) -> None:
    counts = Counter((one.class_name, one.part) for one in work)
    labelled = [name for name, _ in counts if name]
    for name in dict.fromkeys((*names, *labelled)) if labelled else ():
        report.classes[name] = {part: counts[name, part] for part in report.images}
    first = next(iter(report.images), "val")
    if first != "val":
        few = {name: of[first] for name, of in report.classes.items()}
        report.tiny = {name: count for name, count in few.items() if count < TINY}


def _ordered(pool: ThreadPoolExecutor, work: list[_Work]) -> Iterator[_Seen]:
    for start in range(0, len(work), _CHUNK):
        yield from pool.map(_look, work[start : start + _CHUNK])


def _look(one: _Work) -> _Seen:
    """Read an image, from its file where it has one of its own."""
    name = f"{one.part}[{one.number}]"
    content, mode = b"", ""
    try:
        if isinstance(one.images, FileImages):
            path = one.images.path(one.number)
            name, content = encodable(path), path.read_bytes()
            image = read_image(content)
            with Image.open(io.BytesIO(content), formats=image_formats()) as header:
                mode = header.mode  # that of the file
        else:
            image = one.images[one.number][0]
        image = _refuse_strips(image)
    except UnreadableImageError as broken:
        return _Seen(name, reason=broken.reason)
    except OSError as error:
        return _Seen(name, reason=why(error))
    digest = hashlib.blake2b(content or image.tobytes(), digest_size=16).digest()
    return _Seen(name, digest, image.size, mode or image.mode)


def _collect(report: Report, work: list[_Work], seen: list[_Seen]) -> None:
    good: dict[bytes, list[int]] = defaultdict(list)
    for place, (item, one) in enumerate(zip(work, seen, strict=True)):
        if one.reason is not None:
            report.broken.append(Broken(one.path, item.part, one.reason))
        else:
            good[one.digest].append(place)
    read = [one for one in seen if one.reason is None]
    if read:
        widths, heights = zip(*(one.size for one in read), strict=True)
        report.width = (min(widths), median(widths), max(widths))
        report.height = (min(heights), median(heights), max(heights))
    report.modes = dict(Counter(one.mode for one in read).most_common())
    for places in (places for places in good.values() if len(places) > 1):
        group = DuplicateGroup(
            tuple(seen[place].path for place in places),
            tuple(work[place].part for place in places),
            tuple(work[place].class_name for place in places),
        )
        if len(set(group.parts)) > 1:
            report.shared.append(group)
        if len(set(group.classes)) > 1:
            report.contradicting.append(group)
