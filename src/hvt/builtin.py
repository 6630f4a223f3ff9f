"""The checkpoints that come with the package, whose names do wherever a checkpoint's path does."""

from __future__ import annotations

import json
from pathlib import Path

from .config import HVTConfig

BUILT_IN: dict[str, str] = {
    "cifar100": "CIFAR-100's classes",
}
"""Name → what the model knows; its weights are in `assets/NAME.safetensors`."""

DEFAULT = "cifar100"

_ENDINGS = (".safetensors", ".pth", ".pt", ".pt2", ".bin", ".onnx")


def built_in(name: str = DEFAULT) -> Path:
    """The file of a built-in checkpoint."""
    return Path(__file__).parent / "assets" / f"{name}.safetensors"


def find_checkpoint(name: str | Path) -> Path:
    """The file of a built-in name, else the path itself; `./cifar100` is a path in any case."""
    return built_in(name) if isinstance(name, str) and name in BUILT_IN else Path(name)


def built_in_config(name: str) -> HVTConfig:
    """A built-in model's config, from the beginning of its file: no weights, and no torch."""
    with built_in(name).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return HVTConfig.from_dict(json.loads(header["__metadata__"]["hvt"])["config"])


def is_checkpoint(path: str) -> bool:
    """Whether a command's argument names weights rather than a picture, by its form."""
    folder = Path(path)
    if path in BUILT_IN or folder.suffix.lower() in _ENDINGS:
        return True
    return any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
