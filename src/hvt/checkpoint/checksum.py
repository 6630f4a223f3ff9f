"""A checksum in a file's own metadata: a flipped byte is an error, not silently another model.

CRC-32, as in a zip, is for accidents: it is fast enough not to be noticed, and who can change a
file on purpose can change its checksum too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError

KEY = "crc32"
"""Of a file's metadata."""


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """CRC-32 of some bytes, in hexadecimal; parts count as one after the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return f"{value:08x}"


def check(path: Path, metadata: Mapping[str, str], parts: Iterable[bytes | memoryview]) -> None:
    """Raise an error if a file has a checksum and it is not that of its content."""
    if KEY in metadata and metadata[KEY] != checksum(parts):
        raise CheckpointError(
            f"{path} is damaged: its content does not match its checksum, so fetch or copy it "
            "again, or save it again if another program changed it"
        )


def tensor_parts(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Iterable[bytes | memoryview]:
    """What the checksum of a safetensors file covers, whatever the order within the file."""
    names = sorted(tensors)
    header = {
        "metadata": {key: value for key, value in metadata.items() if key != KEY},
        "tensors": [[name, str(tensors[name].dtype), *tensors[name].shape] for name in names],
    }
    yield json.dumps(header, sort_keys=True).encode()
    for name in names:
        yield tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data
