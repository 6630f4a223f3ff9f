"""What `torch.save` wrote: only tensors and plain values, nothing runs.

A pickle can run code when it is opened. torch's restricted unpickler builds tensors and plain
values only, to which training arguments in an `argparse.Namespace` are added here, and raises an
error that names any other class or function.
"""

from __future__ import annotations

import argparse
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


def read_torch(path: Path) -> tuple[State, dict[str, Any]]:
    """A file's tensors, and the training arguments beside them."""
    with understood(f"{path} is damaged or cut short, so fetch or copy it again"):
        if zipfile.is_zipfile(path):
            _check_zip(path)
        content = _unpickled(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a model's weights")
    states = [content.get(key) for key in ("model", "state_dict", "model_ema", "state_dict_ema")]
    state = next((one for one in states if isinstance(one, dict)), content)
    tensors = {str(k): v.detach() for k, v in state.items() if isinstance(v, Tensor)}
    arguments = content.get("args")
    return tensors, vars(arguments) if isinstance(arguments, argparse.Namespace) else {}


def _unpickled(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UnsafeCheckpointError(
                f"{path} contains {found[1]}, which is not a tensor or a plain value, so it was "
                "not opened: save only its state_dict"
            ) from error
        raise


def _check_zip(path: Path) -> None:
    """Raise an error if an entry is damaged, which torch does not notice."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.CRC:  # torch can be told to write none
                archive.read(entry)  # compares it
