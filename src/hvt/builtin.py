"""The checkpoints that come with the package, whose names do wherever a checkpoint's path does."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .config import HVTConfig
from .errors import CheckpointError

BUILT_IN: dict[str, str] = {
    "imagenet": "ImageNet's 1,000 classes",
    "cifar100": "CIFAR-100's classes",
}
"""Name → what the model knows; its weights are in `assets/NAME.safetensors`."""

DEFAULT = "imagenet"
"""What answers where no checkpoint is named."""

_ENDINGS = (".safetensors", ".pth", ".pt", ".pt2", ".bin", ".onnx")


def built_in(name: str = DEFAULT) -> Path:
    """The file of a built-in checkpoint."""
    return Path(__file__).parent / "assets" / f"{name}.safetensors"


def find_checkpoint(name: str | Path) -> Path:
    """The file of a built-in name, else the path itself; `./cifar100` is a path in any case."""
    if name == "":
        raise CheckpointError("the checkpoint's name is empty: name a file or a built-in model")
    if not isinstance(name, str) or name not in BUILT_IN:
        return Path(name)
    path = built_in(name)
    if not path.is_file():
        raise CheckpointError(
            f"the built-in model {name} is not in this installation, {path} is missing: "
            "install hvt again, or name a checkpoint"
        )
    return path


def installed() -> list[str]:
    """The built-in models whose files are there; a repackaged hvt may leave large ones out."""
    return [name for name in BUILT_IN if built_in(name).is_file()]


def built_in_config(name: str) -> HVTConfig:
    """A built-in model's config, from the beginning of its file: no weights, and no torch."""
    with built_in(name).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return HVTConfig.from_dict(json.loads(header["__metadata__"]["hvt"])["config"])


def is_checkpoint(path: str) -> bool:
    """Whether a command's argument names weights rather than an image, by its form."""
    folder = Path(path)
    if path in BUILT_IN or folder.suffix.lower() in _ENDINGS:
        return True
    # Not Path.is_file, which raises for a name that is too long or a folder that is not ours.
    names = ("model.safetensors", "pytorch_model.bin")
    return any(os.path.isfile(folder / name) for name in names)  # noqa: PTH113
