"""Any checkpoint as one kind of value: its tensors, and what it or others say of its model.

Our own files describe themselves. Of others' the tensors tell the architecture, and the JSON files
of a Hugging Face directory the rest: timm's name the architecture and its arguments, transformers'
hold the fields themselves.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from safetensors import safe_open

from ..config import HVTConfig
from ..errors import CheckpointError
from ..zoo import MODELS, find_checkpoint, get_config
from . import checksum
from .description import Description, check_names, check_preprocessing, read_description, understood
from .fitting import State, check_weights
from .foreign import infer_config
from .timm_vit import named_config
from .torch_files import read_torch
from .transformers_vit import from_transformers, transformers_config, transformers_preprocessing

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face's directories call them."""


@dataclass
class Checkpoint(Description):
    """What a weights file says, whoever wrote it."""

    path: Path = Path()
    tensors: State = field(default_factory=dict)
    described: bool = False
    """Whether the file itself says its architecture; that of others' files is inferred."""


def read(path: str | Path, hints: dict[str, Any] | None = None) -> Checkpoint:
    """What a file or directory says; `hints` settle what another's file leaves open."""
    path = find_checkpoint(path)
    weights, folder = _find_weights(path)
    tensors, arguments, description = _read_file(weights)
    if description is not None:
        said = read_description(weights, description)
    else:  # DDP and torch.compile put something before the names
        plain = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): t for name, t in tensors.items()}
        tensors = from_transformers(plain, weights)
        said = _inferred(weights, folder, tensors, arguments, hints or {})
    check_weights(tensors, said.config, said.settings, path)
    return Checkpoint(
        **vars(said), path=weights, tensors=tensors, described=description is not None
    )


def _find_weights(path: Path) -> tuple[Path, Path | None]:
    """The file that holds the weights, and the directory whose JSON files tell of them."""
    # Not Path's methods, which raise for a name that is too long or a folder that is not ours.
    if os.path.isdir(path):  # noqa: PTH112
        for name in WEIGHT_FILES:
            if (path / name).exists():
                return path / name, path
        raise CheckpointError(f"{path} contains no {' or '.join(WEIGHT_FILES)}")
    beside = path.name in WEIGHT_FILES and os.path.isfile(path.parent / "config.json")  # noqa: PTH113
    return path, path.parent if beside else None


def _read_file(path: Path) -> tuple[State, dict[str, Any], str | None]:
    """A file's tensors, the training arguments beside them, and our description of the model."""
    if path.suffix.lower() in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} is an exported model: use the checkpoint it was exported from"
        )
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if start[8:9] != b"{":
        if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
            return *read_torch(path), None
        raise CheckpointError(
            f"{path} is neither a safetensors nor a PyTorch file, or its beginning is damaged"
        )
    with (
        understood(f"{path} is damaged or cut short, so fetch or copy it again"),
        safe_open(path, framework="pt") as opened,
    ):
        metadata = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    checksum.check(path, metadata, checksum.tensor_parts(metadata, tensors))
    return tensors, {}, metadata.get("hvt")


def _inferred(
    path: Path,
    folder: Path | None,
    tensors: State,
    arguments: dict[str, Any],
    hints: dict[str, Any],
) -> Description:
    """A file of others, from its tensors and what is told beside it."""
    about = f"the JSON files in {folder} are not understood"
    with understood(about if folder else f"{path} does not describe a usable model"):
        known, preprocessing, names = _read_folder(folder) if folder else ({}, {}, None)
        if isinstance(known, HVTConfig):
            config = known
        else:
            config = infer_config(tensors, known | arguments, hints, path)
        if names and config.num_classes:
            names = check_names(names, config.num_classes)
        return Description(config, check_preprocessing(preprocessing, config), names or None)


_Told = tuple[HVTConfig | dict[str, Any], dict[str, Any], list[Any] | None]
"""Of JSON files: fields that tensors leave open, or all of them; preprocessing; class names."""


def _read_folder(path: Path) -> _Told:
    """What a directory tells beside its weights; raises whatever values of a wrong kind lead to."""
    config = _read_json(path / "config.json")
    if "pretrained_cfg" in config or "architecture" in config:
        return _timm(config)
    arguments, names = transformers_config(config)
    processor = path / "preprocessor_config.json"
    if processor.exists():
        return arguments, transformers_preprocessing(_read_json(processor)), names
    if config:  # ViT's mean and std are not those of DeiT
        raise CheckpointError(
            f"{path} has no preprocessor_config.json, so the normalisation of its images is "
            "unknown: save the model's image processor there too (processor.save_pretrained)"
        )
    return arguments, {}, names


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.exists() else {}


def _timm(config: dict[str, Any]) -> _Told:
    """timm's form; in its earlier one everything lies at the top."""
    name, arguments = config.get("architecture"), dict(config.get("model_args") or {})
    cfg = config.get("pretrained_cfg", config)
    names = config.get("label_names") or config.get("labels") or cfg.get("label_names")
    if name in MODELS:
        if "num_classes" in config:
            arguments["num_classes"] = config["num_classes"]
        return get_config(name, **arguments), cfg, names
    if isinstance(name, str) and timm.is_model(name):
        if config.get("global_pool") is not None:
            arguments.setdefault("global_pool", config["global_pool"])
        return _timm_arguments(name, arguments), cfg, names
    return {}, cfg, names


def _timm_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the name of a timm model and its arguments tell that tensors do not."""
    try:  # one block tells as much as all, and nothing is read from a file that they may name
        named = named_config(name, checkpoint_path="", **arguments | {"depth": 1})
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(f"timm cannot build {name} with {arguments} ({error})") from error
    fields = ("num_heads", "act_layer", "norm_eps", "no_embed_class", "global_pool")
    sizes = {"img_size": arguments["img_size"]} if "img_size" in arguments else {}
    return {key: getattr(named, key) for key in fields} | sizes
