"""What a file says of its model besides weights: config, class names, preprocessing, as JSON.

None of it is believed unchecked, whoever wrote it: a wrong value would end in a crash, gigabytes or
a wrong answer at the first image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError, did_you_mean
from ..model import HVT

FORMAT = 1
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")

# timm's, for evaluation.
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")

MAX_TEXT = 8 * 2**20
"""Bytes of JSON; the names of 100,000 classes fit. As Python values it may be 20 times as large."""
MAX_INPUT = 2**28
"""Numbers in one input: 1 GB, an image of 9,459 × 9,459 pixels."""
MAX_SIDE = 16_384
"""Pixels of an image's side when it is resized before the crop."""
MAX_CLASSES = 10**7
# So that no product of sizes is above 2⁶³, which is all that torch can count.
MAX_WIDTH, MAX_MLP = 10**5, 10**7
# timm's models have 0.875 to 1.15. Below a tenth, a hundredth of the image is left and resizing
# makes it a hundred times the input; above 2, three quarters of the input are padding.
CROP_PCT = (0.1, 2.0)
# Of pixels from 0 to 1. Beyond these an input, (pixel - mean) / std, is no longer near a number
# that float32 and float16 can work with.
MAX_MEAN, STD = 1000.0, (1e-5, 1000.0)

# What reading values of a wrong kind raises; `RecursionError` is JSON nested too deep.
NOT_AS_EXPECTED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


class Description(NamedTuple):
    """An architecture and what images and answers mean to it."""

    config: HVTConfig
    preprocessing: dict[str, Any]
    class_names: list[str] | None


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
            "format": FORMAT,
            "config": model.config.to_dict(),
            "class_names": None if names is None else check_names(list(names), model.num_classes),
            "preprocessing": check_preprocessing(known, model.config),
        }
    )


def read_description(path: Path, text: str, blocks: int | None = None) -> Description:
    """The way back; `blocks` is how many the file holds, where that can be told beforehand."""
    try:
        described = read_json(text)
        if described["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer hvt: upgrade to read it")
        # Before the config, which takes as long to check as it is deep.
        depth = described["config"]["depth"]
        if blocks is not None and depth != blocks:
            raise CheckpointError(f"{path} describes {depth!r} blocks but holds {blocks}")
        config = HVTConfig.from_dict(described["config"])
        names = described["class_names"]
        return Description(
            config,
            check_preprocessing(described["preprocessing"], config),
            check_names(names, config.num_classes) if names else None,
        )
    except CheckpointError:
        raise
    except NOT_AS_EXPECTED as error:
        raise CheckpointError(f"{path} does not describe a usable model: {shown(error)}") from error


def read_json(text: str | bytes | bytearray) -> dict[str, Any]:
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
    for key in ("mean", "std"):
        if key in known:
            known[key] = _check_channels(key, known[key], config.in_chans)
    for key, choices in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
        if key in known and known[key] not in choices:
            raise HVTError(
                f"{key}={known[key]!r} is unknown: {did_you_mean(str(known[key]), choices)}"
            )
    low, high = CROP_PCT
    if "crop_pct" in known and not (_is_number(known["crop_pct"], low, high)):
        raise HVTError(f"crop_pct={known['crop_pct']!r} must be a number from {low} to {high}")
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
    """What an error says, in one line that a hostile file cannot make long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} …"


def _check_sizes(config: HVTConfig, crop_pct: float) -> None:
    """Refuse a config that is legal, but that no file of a model has."""
    height, width = config.image
    if config.in_chans * height * width > MAX_INPUT:
        raise HVTError(f"in_chans={config.in_chans} × img_size={config.img_size} is above 1 GB")
    side = math.floor(max(height, width) / crop_pct)
    if side > MAX_SIDE:
        raise HVTError(
            f"img_size={config.img_size} with crop_pct={crop_pct} has images resized to {side} "
            f"pixels, above {MAX_SIDE}"
        )
    for name, value, most in (
        ("num_heads × head_dim", config.width, MAX_WIDTH),
        ("the width of the MLP", config.mlp_width, MAX_MLP),
        ("num_classes", config.num_classes, MAX_CLASSES),
    ):
        if value > most:
            raise HVTError(f"{name} must be at most {most}, and is {value}")


def _check_channels(key: str, values: Any, channels: int) -> tuple[float, ...]:
    low, high = STD if key == "std" else (-MAX_MEAN, MAX_MEAN)
    counts = sorted({1, 3, channels})
    if not isinstance(values, (list, tuple)) or len(values) not in counts:
        raise HVTError(f"{key}={values!r} must be {' or '.join(map(str, counts))} numbers")
    if not all(_is_number(value, low, high) for value in values):
        raise HVTError(f"{key}={values!r} must be numbers from {low:g} to {high:g}")
    return tuple(values)


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number of a range; NaN is in none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
