"""Any checkpoint as one kind of value: its tensors, and what it or others say of its model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..zoo import find_checkpoint
from . import checksum
from .description import (
    Description,
    check_names,
    check_preprocessing,
    read_description,
    understood,
)
from .fitting import check_weights, compare, parameter_shapes
from .folder import WEIGHT_FILES, read_folder
from .foreign import infer_config
from .torch_files import read_torch, stripped
from .transformers_vit import from_transformers


@dataclass
class Checkpoint(Description):
    """What a weights file says, whoever wrote it."""

    path: Path = Path()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    described: bool = False
    """Whether the file itself says its architecture; that of others' files is inferred."""
    missing: str = ""
    """Why it cannot be told how images are prepared, where it cannot."""


def read(path: str | Path, hints: dict[str, Any] | None = None) -> Checkpoint:
    """What a file or directory says; `hints` settle what another's file leaves open."""
    path = find_checkpoint(path)
    # Not Path's methods, which raise for a name that is too long or a folder that is not ours.
    beside = path.name in WEIGHT_FILES and os.path.isfile(path.parent / "config.json")  # noqa: PTH113
    if os.path.isdir(path) or beside:  # noqa: PTH112
        weights = path if beside else _weights(path)
        checkpoint = _read_folder(weights.parent, weights, hints or {})
    else:
        checkpoint = _read_file(path, {}, hints or {})
    check_weights(checkpoint.tensors, checkpoint.config, checkpoint.settings, path)
    return checkpoint


def _weights(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has no {' or '.join(WEIGHT_FILES)} in it")


def _read_file(path: Path, arguments: dict[str, Any], hints: dict[str, Any]) -> Checkpoint:
    """A file; `arguments` are what is said beside it, and count as if it said them itself."""
    if path.suffix.lower() == ".onnx":
        raise CheckpointError(
            f"{path} is an exported model, which hvt predict, hvt eval and hvt.Predictor run: "
            "here name the checkpoint that it was exported from"
        )
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if start[8:9] == b"{":
        return _read_safetensors(path, arguments, hints)
    if start[:4] != b"PK\x03\x04" and start[:1] != b"\x80":
        raise CheckpointError(
            f"{path} is neither a safetensors nor a PyTorch file, or its beginning is damaged"
        )
    tensors, own, description = read_torch(path)
    if description is not None:
        return _described(path, description, tensors)
    return _inferred(path, tensors, arguments | own, hints)


def _read_safetensors(path: Path, arguments: dict[str, Any], hints: dict[str, Any]) -> Checkpoint:
    with (
        understood(f"{path} is damaged or cut short, so fetch or copy it again"),
        safe_open(path, framework="pt") as file,
    ):
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checksum.check(path, metadata, checksum.tensor_parts(metadata, tensors))
    if "hvt" in metadata:
        return _described(path, metadata["hvt"], tensors)
    return _inferred(path, stripped(tensors, path), arguments, hints)


def _described(path: Path, description: str, tensors: dict[str, Tensor]) -> Checkpoint:
    """One of our own files, from what it says of itself."""
    said = vars(read_description(path, description))
    return Checkpoint(**said, path=path, tensors=tensors, described=True)


def _inferred(
    path: Path, tensors: dict[str, Tensor], arguments: dict[str, Any], hints: dict[str, Any]
) -> Checkpoint:
    """A file of others, from its tensors."""
    tensors = from_transformers(tensors, path)
    config = infer_config(tensors, arguments, hints, path)
    with understood(f"{path} does not describe a usable model"):
        check_preprocessing({}, config)  # the size of its input
    return Checkpoint(config, path=path, tensors=tensors)


def _read_folder(folder: Path, weights: Path, hints: dict[str, Any]) -> Checkpoint:
    with understood(f"the JSON files in {folder} are not understood"):
        told = read_folder(folder)
        checkpoint = _read_file(weights, told.arguments, hints)
        if checkpoint.described:
            return checkpoint
        if told.config is not None:
            verdict = f"{folder} does not fit the architecture and model_args of its config.json"
            compare(checkpoint.tensors, parameter_shapes(told.config), verdict)
            checkpoint.config = told.config
        classes = checkpoint.config.num_classes
        if told.class_names and classes:
            checkpoint.class_names = check_names(told.class_names, classes)
        checkpoint.preprocessing = check_preprocessing(told.preprocessing or {}, checkpoint.config)
    if told.preprocessing is None:  # ViT's mean and std are not those of DeiT
        checkpoint.missing = (
            f"{folder} has no preprocessor_config.json, so nothing tells how its images are "
            "normalised: save the image processor that the model was trained with there too "
            "(processor.save_pretrained)"
        )
    return checkpoint
