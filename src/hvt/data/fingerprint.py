"""Whether a data set is the one that a run began with: its images by name, and their labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .factory import FactoryImages
from .images import FileImages
from .sources import AnyImages, Data, Images
from .streams import stream_length


def identity(data: Data) -> dict[str, str]:
    """What tells the images from others, wherever they lie, by the words of a sentence.

    Others would be split anew, and what was trained on would be measured on.
    """
    parts = {"training": data.train, "validation": data.val}
    counts = {f"number of {k} images": str(count_images(v)) for k, v in parts.items()}
    lists = {f"list of {k} images": fingerprint(v) for k, v in parts.items()}
    return counts | {name: digest for name, digest in lists.items() if digest is not None}


def count_images(images: AnyImages) -> int:
    """How many there are; of a stream, over all processes."""
    return len(images) if isinstance(images, Images) else stream_length(images)


def fingerprint(images: AnyImages) -> str | None:
    """A digest of labels and, of files, their names; None where neither is listed.

    Names are relative to the folder that all files share, so it may lie anywhere.
    """
    if not isinstance(images, Images) or images.labels is None:
        return None
    digest = hashlib.blake2b(np.asarray(images.labels, dtype="<i8").tobytes(), digest_size=16)
    for name in _relative(_files(images)):
        digest.update(name + b"\0")
    return digest.hexdigest()


def _files(images: Any) -> list[bytes]:
    if isinstance(images, FileImages):
        return [os.fsencode(path) for path in images.paths]
    if isinstance(images, FactoryImages):  # torchvision's folders list theirs
        samples = getattr(images.dataset, "samples", None)
        if isinstance(samples, list):
            return [os.fsencode(samples[index][0]) for index in images.indices]
    return []


def _relative(files: Sequence[bytes]) -> list[bytes]:
    # What the first and the last by order share, all share.
    ends = [os.path.dirname(path) for path in (min(files), max(files))] if files else []  # noqa: PTH120
    above = os.path.commonpath(ends) if ends else b""
    separator = os.fsencode(os.sep)
    return [separator + path[len(above) :].lstrip(separator) for path in files]
