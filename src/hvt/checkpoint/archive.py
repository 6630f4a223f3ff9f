"""`torch.export` archives (`.pt2`) read as checkpoints: only their tensors, nothing unpickled.

`torch.export.load` unpickles parts of an archive and evaluates expressions of its graph, so whoever
wrote the file can run code. What `hvt export` writes also holds the weights as plain bytes, as all
archives do since torch 2.9, and our description of the model; these are all that is read here.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .description import damaged
from .pth import check_zip

DESCRIPTION = "hvt.json"
_FOLDER, _INDEX = "data/weights", "model_weights_config.json"


def is_archive(path: Path) -> bool:
    """Whether a zip file says that it is an archive of `torch.export`."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("/archive_format") for name in file.namelist())
    except Exception:  # zipfile raises errors of many kinds for a damaged directory
        return False


def read_archive(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of one of our archives by name, and its description."""
    try:
        check_zip(path)
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            root = names[0].partition("/")[0]  # the writer's choice
            index, description = f"{root}/{_FOLDER}/{_INDEX}", f"{root}/extra/{DESCRIPTION}"
            if index not in names or description not in names:
                raise CheckpointError(
                    f"{path} is not a torch.export program of hvt export and torch 2.9 or later: "
                    "no other can be read, as its weights are pickled"
                )
            tensors = {
                name: _tensor(file.read(f"{root}/{_FOLDER}/{entry['path_name']}"), entry)
                for name, entry in json.loads(file.read(index))["config"].items()
            }
            return tensors, file.read(description).decode()
    except CheckpointError:
        raise
    except Exception as error:  # zipfile's, and whatever a damaged index leads to
        raise damaged(path, error, "export it again") from error


def _tensor(content: bytes, entry: dict[str, Any]) -> Tensor:
    """One float32 tensor from its bytes; what is pickled or not contiguous raises an error."""
    shape = [size["as_int"] for size in entry["tensor_meta"]["sizes"]]
    strides = tuple(size["as_int"] for size in entry["tensor_meta"]["strides"])
    tensor = torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(shape)
    if entry["use_pickle"] or tensor.stride() != strides:
        raise ValueError("a weight is not stored as plain float32 numbers")
    return tensor
