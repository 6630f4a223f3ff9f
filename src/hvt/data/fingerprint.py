"""Whether a data set is the one that a run began with: its pictures by name, and their labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .factory import FactoryPictures
from .folders import FilePictures
from .keyed import stream_length
from .sources import AnyPictures, Data, Pictures


def identity(data: Data) -> dict[str, str]:
    """What tells the pictures from others, wherever they lie, by the words of a sentence.

    Others would be split anew, and what was trained on would be measured on.
    """
    parts = {"training": data.train, "validation": data.val}
    counts = {f"number of {k} pictures": str(count_pictures(v)) for k, v in parts.items()}
    lists = {f"list of {k} pictures": fingerprint(v) for k, v in parts.items()}
    return counts | {name: digest for name, digest in lists.items() if digest is not None}


def count_pictures(pictures: AnyPictures) -> int:
    """How many there are; of a stream, over all processes."""
    return len(pictures) if isinstance(pictures, Pictures) else stream_length(pictures)


def fingerprint(pictures: AnyPictures) -> str | None:
    """A digest of labels and, of files, their names; None where neither is listed.

    Names are relative to the folder that all files share, so it may lie anywhere.
    """
    if not isinstance(pictures, Pictures) or pictures.labels is None:
        return None
    digest = hashlib.blake2b(np.asarray(pictures.labels, dtype="<i8").tobytes(), digest_size=16)
    for name in _relative(_files(pictures)):
        digest.update(name + b"\0")
    return digest.hexdigest()


def _files(pictures: Any) -> list[bytes]:
    if isinstance(pictures, FilePictures):
        return pictures.encoded_paths
    if isinstance(pictures, FactoryPictures):  # torchvision's folders list theirs
        samples = getattr(pictures.dataset, "samples", None)
        if isinstance(samples, list):
            return [os.fsencode(samples[index][0]) for index in pictures.indices]
    return []


def _relative(files: Sequence[bytes]) -> list[bytes]:
    # What the first and the last by order share, all share.
    ends = [os.path.dirname(path) for path in (min(files), max(files))] if files else []  # noqa: PTH120
    above = os.path.commonpath(ends) if ends else b""
    separator = os.fsencode(os.sep)
    return [separator + path[len(above) :].lstrip(separator) for path in files]
