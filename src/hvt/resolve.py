"""What a word names: one of our models, a config, a checkpoint, an ONNX file or a timm model."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import nn

from .checkpoint.reading import WEIGHT_FILES
from .checkpoint.save_load import load
from .errors import HVTError, did_you_mean, first_line
from .registry import create_model
from .zoo import BUILT_IN, DEFAULT, MODELS, is_config_file

TIMM = "timm:"
_ENDINGS = (".safetensors", ".pth", ".pt", ".pt2", ".bin", ".onnx")


@dataclass(frozen=True)
class Source:
    """What a name or a path stands for; checkpoints and ONNX files have their own weights."""

    kind: Literal["model", "config", "checkpoint", "onnx", "timm"]
    name: str
    """A model's without `timm:`, a built-in checkpoint's, or a path."""


def resolve(word: str | Path | None) -> Source:
    """What an argument names; None is the default built-in model.

    A model's name wins over a file or folder of the same name, which `./` in front of it, or a
    `Path`, asks for. Raises an `HVTError` that suggests names for what is neither.
    """
    name = os.path.expanduser(DEFAULT if word is None else word)  # noqa: PTH111 - keeps the `./`
    if isinstance(word, Path):
        name = os.path.join(".", name)  # noqa: PTH118
    plain, suffix = name.removeprefix(TIMM), Path(name).suffix.lower()
    if plain in MODELS:
        return Source("model", plain)
    if is_config_file(name):
        return Source("config", name)
    if name in BUILT_IN or suffix in _ENDINGS:  # before timm, whose tags may look like endings
        return Source("onnx" if suffix == ".onnx" else "checkpoint", name)
    if timm.is_model(plain):
        return Source("timm", plain)
    if "/" in name or os.path.exists(name):  # noqa: PTH110 - Path.exists raises for some names
        return Source("checkpoint", name)
    hint = did_you_mean(plain, timm.list_models())
    raise HVTError(f"{name!r} is neither a model nor a checkpoint: {hint}")


def is_checkpoint(word: str) -> bool:
    """Whether a word names weights rather than an image or a folder of images, by its form."""
    if word in BUILT_IN or Path(word).suffix.lower() in _ENDINGS:
        return True
    # Not Path.is_file, which raises for a name that is too long.
    return any(os.path.isfile(Path(word) / name) for name in WEIGHT_FILES)  # noqa: PTH113


def build(source: Source, pretrained: bool = False, seed: int = 0, **overrides: Any) -> nn.Module:
    """The model of anything but an ONNX file.

    A checkpoint's has its weights in float32. Others have random ones, the same for the same seed,
    or published ones; `overrides` are keyword arguments, for ours fields of `HVTConfig`.
    """
    if source.kind in ("checkpoint", "onnx"):
        return load(source.name, **overrides).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if source.kind == "timm":
            with timm_errors(source.name, pretrained):
                return timm.create_model(source.name, pretrained=pretrained, **overrides)
        return create_model(source.name, pretrained, **overrides)


@contextlib.contextmanager
def timm_errors(name: str, pretrained: bool = False) -> Iterator[None]:
    """Turn whatever timm raises into one sentence, without the hub library's own log."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except HVTError:
        raise
    # What a missing network raises depends on the HTTP library, what a bad tag does on the model.
    except Exception as error:
        reason = first_line(error)
        if not pretrained:
            raise HVTError(f"timm cannot build {name} ({reason})") from error
        raise HVTError(
            f"timm's weights of {name} could not be fetched ({reason}): check the network, or "
            "download the file and name it instead"
        ) from error
    finally:
        logger.setLevel(level)
