"""`torch.export` archives (`.pt2`) read as checkpoints: their tensors alone, nothing unpickled.

`torch.export.load` unpickles parts of an archive and evaluates expressions of its graph, so whoever
wrote the file can run code. What `hvt export` writes also holds the weights as plain bytes and our
description of the model, and these are all that is read here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .container import BAD_ZIP, StoredZip
from .description import NOT_AS_EXPECTED, read_json, shown
from .pickles import MAX_DIMS

DESCRIPTION = "hvt.json"
WEIGHTS, INDEX = "data/weights", "model_weights_config.json"


def is_archive(path: Path) -> bool:
    """Whether a zip file says that it is an archive of `torch.export`."""
    try:
        file = StoredZip(path)
        return "archive_format" in file and file.read("archive_format").strip() == b"pt2"
    except (*NOT_AS_EXPECTED, *BAD_ZIP):
        return False


def read_archive(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of one of our archives by name, and its description."""
    try:
        file = StoredZip(path)
        if f"extra/{DESCRIPTION}" not in file or f"{WEIGHTS}/{INDEX}" not in file:
            raise CheckpointError(
                f"{path} is not a torch.export program of hvt, or of another torch version: only "
                "the files of hvt export can be read, as their weights are plain bytes"
            )
        entries = read_json(file.read(f"{WEIGHTS}/{INDEX}"))["config"]
        paths = [entry["path_name"] for entry in entries.values()]
        if len(set(paths)) < len(paths):
            raise ValueError("a weight has two names")
        tensors = {
            name: _tensor(file.read(f"{WEIGHTS}/{entry['path_name']}"), entry)
            for name, entry in entries.items()
        }
        return tensors, file.read(f"extra/{DESCRIPTION}").decode()
    except CheckpointError:
        raise
    except (*NOT_AS_EXPECTED, *BAD_ZIP) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read ({shown(error)}): export it again"
        ) from error


def _tensor(content: bytearray, entry: dict[str, Any]) -> Tensor:
    """One float32 tensor from its bytes; what is pickled or laid out otherwise is refused."""
    meta = entry["tensor_meta"]
    shape, strides = (tuple(size["as_int"] for size in meta[key]) for key in ("sizes", "strides"))
    if len(shape) > MAX_DIMS or not all(type(size) is int for size in shape):
        raise ValueError("a weight has no usable shape")
    dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if entry["use_pickle"] or strides != dense or len(content) != 4 * math.prod(shape):
        raise ValueError("a weight is not stored as plain float32 numbers")
    return torch.frombuffer(content, dtype=torch.float32).reshape(shape)
