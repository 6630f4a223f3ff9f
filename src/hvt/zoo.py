"""Models by name, without torch: the paper's, those of config files, those in the package."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from .config import HVTConfig
from .errors import HVTError, did_you_mean
from .files import atomic_write

# One line per model: what differs from HVTConfig's defaults (224 px, patch 16, 12 blocks, M = 0).
_TI, _S, _B = 3, 6, 12  # heads of 64 channels
MODELS: dict[str, HVTConfig] = {
    "deit_ti": HVTConfig(num_heads=_TI, class_token=True),
    "deit_s": HVTConfig(num_heads=_S, class_token=True),
    "deit_b": HVTConfig(num_heads=_B, class_token=True),
    "deit_ti_power": HVTConfig(
        num_heads=_TI,
        class_token=True,
        retention=(186, 175, 164, 152, 141, 130, 119, 107, 96, 85, 73, 63),
    ),
    "deit_s_power": HVTConfig(
        num_heads=_S,
        class_token=True,
        retention=(184, 171, 158, 145, 132, 119, 106, 93, 80, 67, 53, 40),
    ),
    **{f"hvt_ti_{m}": HVTConfig(num_heads=_TI, stages=m) for m in range(5)},
    **{f"hvt_s_{m}": HVTConfig(num_heads=_S, stages=m) for m in range(5)},
    **{f"hvt_b_{m}": HVTConfig(num_heads=_B, stages=m) for m in range(1, 5)},
    "scale_hvt_ti_4": HVTConfig(num_heads=_S, stages=4),
    "hvt_s_2_2d": HVTConfig(num_heads=_S, stages=2, patch_size=8, pool_dims=2),
}

_POWER = (
    "the paper prints the costs of its PoWER models but not their retentions; this one follows a "
    "rule that meets the cost (an even decline, hvt.power.retention_for)"
)
NOTES: dict[str, str] = {"deit_ti_power": _POWER, "deit_s_power": _POWER}
"""Remarks on a model's figures."""

_AUTHORS = "https://github.com/zhuang-group/HVT/releases/download"
_DEIT = "https://dl.fbaipublicfiles.com/deit"
# Published ImageNet weights. Such files hold more than tensors, so `custom_load` has timm hand any
# file to `HVT.load_pretrained`, which reads it safely.
WEIGHT_URLS: dict[str, str] = {
    "deit_ti": f"{_DEIT}/deit_tiny_patch16_224-a1311bcf.pth",
    "deit_s": f"{_DEIT}/deit_small_patch16_224-cd65a155.pth",
    "deit_b": f"{_DEIT}/deit_base_patch16_224-b5f2ef4d.pth",
    "hvt_ti_1": f"{_AUTHORS}/v1.0/hvt_ti_1.pth",
    "scale_hvt_ti_4": f"{_AUTHORS}/v1.0/scale_hvt_ti_4.pth",
    "hvt_s_0": f"{_AUTHORS}/v1.0/hvt_s_0.pth",
    "hvt_s_1": f"{_AUTHORS}/v1.1/hvt_s_1.pth",
    "hvt_s_2": f"{_AUTHORS}/v1.0/hvt_s_2.pth",
    "hvt_s_3": f"{_AUTHORS}/v1.0/hvt_s_3.pth",
}

BUILT_IN: dict[str, str] = {
    "imagenet": "ImageNet's 1,000 classes",
    "cifar100": "CIFAR-100's classes",
}
"""Name → the classes of the model; its weights are in `assets/NAME.safetensors`."""

DEFAULT = "imagenet"
"""The checkpoint where none is named."""


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern, ordered by size: `list_models("hvt_s_*")`."""
    return [name for name in MODELS if fnmatch.fnmatchcase(name, pattern)]


def get_config(name: str | Path, **overrides: Any) -> HVTConfig:
    """The config of a named model or a `.json` file, with fields replaced."""
    if is_config_file(name):
        return read_config(name).replace(**overrides)
    if str(name) not in MODELS:
        raise HVTError(f"unknown model {str(name)!r}: {did_you_mean(str(name), MODELS)}")
    return MODELS[str(name)].replace(**overrides)


def is_config_file(name: str | Path) -> bool:
    """Whether the name of a model is that of a config file, by its form."""
    return str(name).lower().endswith(".json")


def read_config(path: str | Path) -> HVTConfig:
    """The config in a JSON file: `hvt plan --save` writes one, and a run's folder has one."""
    try:
        values = json.loads(Path(path).read_bytes())
        if not isinstance(values, dict):
            raise HVTError("it must be an object with the model's fields")
        return HVTConfig.from_dict(values)
    except OSError as error:
        raise HVTError(f"cannot read the config {path}: {error.strerror or error}") from error
    except ValueError as error:  # of JSON, or of a field
        raise HVTError(f"{path} is not a config: {error}") from error


def write_config(config: HVTConfig, path: str | Path) -> None:
    """A config as JSON, for `read_config` and `hvt train --model FILE`."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def built_in(name: str) -> Path:
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
