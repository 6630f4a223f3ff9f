"""Whether a data set is the one that a run began with: its images, and their labels."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .arrays import ArrayImages
from .images import FileImages
from .sources import Data, Images

_SAMPLED = 256
"""Files of a part whose content is read. Of all of them the size is known, which nearly every
replaced image changes; modification times would not survive a copy."""


def identity(data: Data) -> dict[str, str]:
    """What tells the images from others, wherever they lie, by the words of a sentence.

    Others would be split anew, and the run evaluated on what it was trained on.
    """
    found = {}
    for part, images in (("training", data.train), ("validation", data.val)):
        files = images.names if isinstance(images, FileImages) else []
        found[f"number of {part} images"] = str(len(images))
        found[f"{part} images"] = _digest(images, files)
    return found


def _digest(images: Images, files: Sequence[str]) -> str:
    """Of labels; of files their names and sizes, and the content of a few hundred.

    Names are relative to the folder that all files share, so it may lie anywhere. Of what is in
    memory, all pixels count; of what lies in other containers, where that is.
    """
    digest = hashlib.blake2b(np.asarray(images.labels, dtype="<i8").tobytes(), digest_size=16)
    if isinstance(images, ArrayImages):
        digest.update(images.images.numpy().tobytes())
    elif not files:  # the places and sizes in shards
        digest.update(images.items.tobytes())
    # What the first and the last by order share, all share.
    above = os.path.commonpath([Path(min(files)).parent, Path(max(files)).parent]) if files else ""
    for file in files:
        name = os.fsencode(os.sep + file[len(above) :].lstrip(os.sep))
        digest.update(name + b"\0" + _size(file).to_bytes(8, "little", signed=True))
    for file in random.Random(len(files)).sample(files, min(_SAMPLED, len(files))):
        if _size(file) >= 0:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size  # noqa: PTH116 - twice as fast
    except OSError:  # reading it says what is wrong
        return -1
