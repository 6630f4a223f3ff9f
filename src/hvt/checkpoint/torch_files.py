"""What `torch.save` and `torch.export.save` wrote: only tensors and plain values, nothing runs.

A pickle can run code when it is opened. torch's restricted unpickler builds tensors and plain
values only, to which training arguments in an `argparse.Namespace` are added here, and raises an
error that names any other class or function. `torch.export.load` unpickles parts of a `.pt2` and
evaluates expressions of its graph; what `hvt export` writes also holds the weights as plain bytes,
as all programs do since torch 2.9, and our description of the model: these are all that is read.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsafeCheckpointError
from .description import understood
from .fitting import State

DESCRIPTION = "hvt.json"
"""Of the model, among the extra files of an exported program."""
MAX_SHARING = 4
"""How many times the file's size its tensors may be, where several share their numbers."""


def read_torch(path: Path) -> tuple[State, dict[str, Any], str | None]:
    """A file's tensors, the training arguments beside them, and the description of an export."""
    with understood(f"{path} is damaged or cut short, so fetch or copy it again"):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_zip(archive, path)
                if any(name.endswith("/archive_format") for name in archive.namelist()):
                    return _read_export(archive, path)
        content = _unpickled(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a model's weights")
    states = [content.get(key) for key in ("model", "state_dict", "model_ema", "state_dict_ema")]
    state = next((one for one in states if isinstance(one, dict)), content)
    tensors = {str(k): v.detach() for k, v in state.items() if isinstance(v, Tensor)}
    if sum(t.numel() * t.itemsize for t in tensors.values()) > MAX_SHARING * path.stat().st_size:
        raise UnsafeCheckpointError(
            f"{path} is not opened: its tensors share their memory, and are together far larger "
            "than the file"
        )
    arguments = content.get("args")
    told = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
    return tensors, told, None


def _unpickled(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UnsafeCheckpointError(
                f"{path} holds {found[1]}, which is not a tensor or a plain value, so it is not "
                "opened: save only its state_dict"
            ) from error
        raise


def _check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise an error if an entry is damaged, or larger than it is in the file."""
    entries = archive.infolist()
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UnsafeCheckpointError(
            f"{path} is not opened: its entries are compressed or overlap, and torch stores "
            "them one by one: unzip it and zip it again with zip -0"
        )
    for entry in entries:
        if entry.CRC:  # torch can be told to write none
            archive.read(entry)  # compares it


def stripped(tensors: State, path: Path) -> State:
    """The tensors by names without what DDP and torch.compile put before them."""
    plain = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): t for name, t in tensors.items()}
    if len(plain) < len(tensors):
        raise CheckpointError(f"{path} has tensors both with and without module. or _orig_mod.")
    return plain


def _read_export(archive: zipfile.ZipFile, path: Path) -> tuple[State, dict[str, Any], str]:
    """The tensors and the description of one of our exported programs."""
    names = archive.namelist()
    root = names[0].partition("/")[0]  # the writer's choice
    weights, description = f"{root}/data/weights", f"{root}/extra/{DESCRIPTION}"
    index = f"{weights}/model_weights_config.json"
    if index not in names or description not in names:
        raise CheckpointError(
            f"{path} is not a torch.export program of hvt export and torch 2.9 or later: "
            "no other can be read, as its weights are pickled"
        )
    tensors = {
        name: _tensor(archive.read(f"{weights}/{entry['path_name']}"), entry)
        for name, entry in json.loads(archive.read(index))["config"].items()
    }
    return tensors, {}, archive.read(description).decode()


def _tensor(content: bytes, entry: dict[str, Any]) -> Tensor:
    """One float32 tensor from its bytes; what is pickled or not contiguous raises an error."""
    shape = [size["as_int"] for size in entry["tensor_meta"]["sizes"]]
    strides = tuple(size["as_int"] for size in entry["tensor_meta"]["strides"])
    tensor = torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(shape)
    if entry["use_pickle"] or tensor.stride() != strides:
        raise ValueError("a weight is not stored as plain float32 numbers")
    return tensor
