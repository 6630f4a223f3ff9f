"""`torch.export` archives (`.pt2`) read as checkpoints: their tensors alone, nothing unpickled.

`torch.export.load` unpickles parts of an archive and evaluates expressions of its graph, so whoever
wrote the file can run code. What `hvt export` writes also holds the weights as plain bytes and our
description of the model, and these are all that is read here.
"""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .description import NOT_AS_EXPECTED

DESCRIPTION = "hvt.json"


def is_archive(path: Path) -> bool:
    """Whether a zip file says that it is an archive of `torch.export`."""
    try:
        with zipfile.ZipFile(path) as file:
            found = _member(file, "archive_format")
            return found is not None and file.read(found).strip() == b"pt2"
    except (*NOT_AS_EXPECTED, zipfile.BadZipFile):
        return False


def read_archive(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of one of our archives by name, and its description."""
    try:
        with zipfile.ZipFile(path) as file:
            description = _member(file, f"extra/{DESCRIPTION}")
            index = _member(file, "data/weights/model_weights_config.json")
            if description is None or index is None:
                raise CheckpointError(
                    f"{path} is no torch.export program of hvt, or of another torch version: only "
                    "the files of hvt export can be read, as their weights are plain bytes"
                )
            if any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist()):
                raise ValueError("its parts are compressed, which torch.export never does")
            folder = index.rpartition("/")[0]
            tensors = {
                name: _tensor(file.read(f"{folder}/{entry['path_name']}"), entry)
                for name, entry in json.loads(file.read(index))["config"].items()
            }
            return tensors, file.read(description).decode()
    except CheckpointError:
        raise
    except (*NOT_AS_EXPECTED, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read ({error}): export it again"
        ) from error


def _member(file: zipfile.ZipFile, end: str) -> str | None:
    """The file of an archive below its root folder, whose name is the writer's choice."""
    return next((name for name in file.namelist() if name.partition("/")[2] == end), None)


def _tensor(content: bytes, entry: dict[str, Any]) -> Tensor:
    """One float32 tensor from its bytes; what is pickled or laid out otherwise is refused."""
    meta = entry["tensor_meta"]
    shape, strides = (tuple(size["as_int"] for size in meta[key]) for key in ("sizes", "strides"))
    dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if entry["use_pickle"] or strides != dense or len(content) != 4 * math.prod(shape):
        raise ValueError("a weight is not stored as plain float32 numbers")
    return torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(shape)
