"""What `torch.save` wrote, read by `torch.load(weights_only=True)`: tensors and plain values.

A pickle can run code when it is opened. torch's restricted unpickler builds tensors and plain
values only, to which training arguments in an `argparse.Namespace` are added here, and raises an
error that names any other class or function.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsafeCheckpointError
from .description import damaged

State = dict[str, Tensor]

MAX_SHARING = 4
"""How many times the file's size its tensors may be, where several share their numbers."""


def read_pth(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a `.pth` file and the training arguments beside them, if any."""
    try:
        if zipfile.is_zipfile(path):
            check_zip(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch's, zipfile's, and whatever damaged values lead to
        raise _failure(path, error) from error
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
    return stripped(tensors, path), told


def check_zip(path: Path) -> None:
    """Raise an error if an entry is damaged, or larger than it is in the file."""
    with zipfile.ZipFile(path) as archive:
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


def _failure(path: Path, error: Exception) -> CheckpointError:
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return UnsafeCheckpointError(
            f"{path} holds {found[1]}, which is not a tensor or a plain value, so it is not "
            "opened: save only its state_dict"
        )
    return damaged(path, error)
