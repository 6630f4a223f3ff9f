"""What a file says of its model besides weights: config, class names, preprocessing, as JSON.

It may come from anywhere and is checked: a wrong value would end in a crash, gigabytes or wrong
predictions at the first image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError, did_you_mean
from ..model import HVT

FORMAT_VERSION = 1
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
DTYPES = ("float32", "float16", "bfloat16", "float64")

# timm's, for evaluation.
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")

MAX_TEXT = 8 * 2**20
"""Bytes of JSON; the names of 100,000 classes fit. As Python values it may be 20 times as large."""
MAX_INPUT = 2**28
"""Numbers in one input: 1 GB, an image of 9,459 × 9,459 pixels."""
MAX_SIDE = 16_384
"""Pixels of an image's side when it is resized before the crop."""
MAX_WIDTH, MAX_CLASSES = 10**5, 10**7  # so that products stay below 2⁶³, where torch's counts end
# timm's models have 0.875 to 1.15. Below a tenth, a hundredth of the image is left and resizing
# makes it a hundred times the input; above 2, three quarters of the input are padding.
CROP_PCT = (0.1, 2.0)
# Of pixels from 0 to 1. Beyond these an input, (pixel - mean) / std, is no longer near a number
# that float32 and float16 can work with.
MEAN, STD = (-1000.0, 1000.0), (1e-5, 1000.0)

# What reading values of a wrong kind raises; `RecursionError` is JSON nested too deep.
NOT_AS_EXPECTED = (
    ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError
)  # fmt: skip


@dataclass
class Description:
    """An architecture, what its inputs and outputs mean, and where its weights come from."""

    config: HVTConfig
    preprocessing: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    dtype: torch.dtype = torch.float32
    """The model's precision; a file may hold its weights in another."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where the weights come from, such as `source`, `license` and `command`."""


def describe(
    model: HVT,
    class_names: Sequence[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
) -> str:
    """A model's description; names and preprocessing default to the model's own."""
    for name in preprocessing or ():
        if name not in PREPROCESSING:
            raise HVTError(f"unknown preprocessing {name!r}: {did_you_mean(name, PREPROCESSING)}")
    names = model.class_names if class_names is None else class_names
    known = model.pretrained_cfg | (preprocessing or {})
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "config": model.config.to_dict(),
            "class_names": None if names is None else check_names(list(names), model.num_classes),
            "preprocessing": check_preprocessing(known, model.config),
            "dtype": str(model.pos_embed.dtype).removeprefix("torch."),
            "origin": model.pretrained_cfg.get("origin") or {},
        }
    )


def read_description(path: Path, text: str) -> Description:
    """The way back, all of it checked."""
    try:
        described = read_json(text)
        if described["format_version"] > FORMAT_VERSION:
            raise CheckpointError(f"{path} was written by a newer hvt: upgrade to read it")
        config = HVTConfig.from_dict(described["config"])
        names, dtype, origin = (described[key] for key in ("class_names", "dtype", "origin"))
        if dtype not in DTYPES:
            raise HVTError(f"dtype={dtype!r} is unknown: {did_you_mean(str(dtype), DTYPES)}")
        if not all(isinstance(value, str) for value in origin.values()):
            raise HVTError("its origin must be texts with names")
        return Description(
            config,
            check_preprocessing(described["preprocessing"], config),
            check_names(names, config.num_classes) if names else None,
            getattr(torch, dtype),
            origin,
        )
    except CheckpointError:
        raise
    except NOT_AS_EXPECTED as error:
        raise CheckpointError(f"{path} does not describe a usable model: {shown(error)}") from error


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object of sane size."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"its JSON is {len(text) / 2**20:.0f} MB, more than any description has")
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("its JSON is not an object")
    return content


def check_preprocessing(values: dict[str, Any], config: HVTConfig) -> dict[str, Any]:
    """Those of some values that say how an image becomes an input of `config`."""
    known = {key: values[key] for key in PREPROCESSING if key in values}
    for key, limits in (("mean", MEAN), ("std", STD)):
        if key in known:
            known[key] = _check_channels(key, known[key], config.in_chans, limits)
    for key, choices in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
        if key in known and known[key] not in choices:
            raise HVTError(
                f"{key}={known[key]!r} is unknown: {did_you_mean(str(known[key]), choices)}"
            )
    if "crop_pct" in known and not _is_number(known["crop_pct"], CROP_PCT):
        raise HVTError(
            f"crop_pct={known['crop_pct']!r} must be a number from {CROP_PCT[0]} to {CROP_PCT[1]}"
        )
    _check_sizes(config, known.get("crop_pct", 1.0))
    return known


def check_names(names: Any, num_classes: int) -> list[str]:
    """Class names, one for each class."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HVTError("class names must be a list of text")
    if len(names) != num_classes:
        raise HVTError(f"{len(names)} class names do not fit {num_classes} classes")
    return names


def shown(error: object) -> str:
    """What an error says, in one line of limited length whatever a file makes of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} …"


def _check_sizes(config: HVTConfig, crop_pct: float) -> None:
    """Raise an error for a config that is valid, but larger than any model."""
    for name, value, most in (
        ("in_chans × img_size", config.in_chans * math.prod(config.image), MAX_INPUT),
        ("img_size / crop_pct", math.floor(max(config.image) / crop_pct), MAX_SIDE),
        ("num_heads × head_dim", config.width, MAX_WIDTH),
        ("num_classes", config.num_classes, MAX_CLASSES),
    ):
        if value > most:
            raise HVTError(f"{name} must be at most {most}, and is {value}")


def _check_channels(
    key: str, values: Any, channels: int, limits: tuple[float, float]
) -> tuple[float, ...]:
    counts = sorted({1, 3, channels})
    if not isinstance(values, (list, tuple)) or len(values) not in counts:
        raise HVTError(f"{key}={values!r} must be {' or '.join(map(str, counts))} numbers")
    if not all(_is_number(value, limits) for value in values):
        raise HVTError(f"{key}={values!r} must be numbers from {limits[0]:g} to {limits[1]:g}")
    return tuple(values)


def _is_number(value: Any, limits: tuple[float, float]) -> bool:
    """Whether a value is a number within limits; NaN is in none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and limits[0] <= value <= limits[1]
