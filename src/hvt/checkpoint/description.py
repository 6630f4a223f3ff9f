"""What a file says of its model besides weights: config, class names, preprocessing, as JSON.

It may come from anywhere and is checked: a wrong value would end in a crash or in wrong predictions
at the first image.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import HVTConfig
from ..elastic import check_settings, configs_of
from ..errors import CheckpointError, HVTError, did_you_mean, first_line
from ..fields import check_value
from ..model import HVT

FORMAT_VERSION = 1
DTYPES = ("float32", "float16", "bfloat16", "float64")

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    # Of pixels from 0 to 1. Beyond these an input, (pixel - mean) / std, is no longer near a
    # number that float32 and float16 can work with.
    "mean": (tuple[float, ...], {"ge": -1000, "le": 1000}),
    "std": (tuple[float, ...], {"ge": 1e-5, "le": 1000}),
    # timm's, for evaluation.
    "interpolation": (
        str, {"choices": ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")}
    ),
    # timm's models have 0.875 to 1.15. Below a tenth, a hundredth of the image is left and resizing
    # makes it a hundred times the input; above 2, three quarters of the input are padding.
    "crop_pct": (float, {"ge": 0.1, "le": 2.0}),
    "crop_mode": (str, {"choices": ("center", "squash", "border")}),
}  # fmt: skip
PREPROCESSING = tuple(_KINDS)


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
    settings: tuple[HVTConfig, ...] = ()
    """The smaller settings of an elastic model, largest first."""


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
    check_settings(configs_of(model))
    cheaper = [config.to_dict() for config in configs_of(model)[1:]]
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "config": model.config.to_dict(),
            "class_names": None if names is None else check_names(list(names), model.num_classes),
            "preprocessing": check_preprocessing(known, model.config),
            "dtype": str(model.pos_embed.dtype).removeprefix("torch."),
            "origin": check_origin(model.pretrained_cfg.get("origin") or {}),
        }
        | ({"settings": cheaper} if cheaper else {})
    )


def read_description(path: Path, text: str) -> Description:
    """The way back, all of it checked."""
    with understood(f"{path} does not describe a usable model"):
        described = json.loads(text)
        if described["format_version"] > FORMAT_VERSION:
            raise CheckpointError(f"{path} was written by a newer hvt: upgrade to read it")
        config = HVTConfig.from_dict(described["config"])
        names, dtype, origin = (described[key] for key in ("class_names", "dtype", "origin"))
        check_value("dtype", dtype, str, choices=DTYPES)
        cheaper = tuple(HVTConfig.from_dict(one) for one in described.get("settings", ()))
        check_settings((config, *cheaper))
        return Description(
            config,
            check_preprocessing(described["preprocessing"], config),
            check_names(names, config.num_classes) if names else None,
            getattr(torch, dtype),
            check_origin(origin),
            cheaper,
        )


def check_preprocessing(values: dict[str, Any], config: HVTConfig) -> dict[str, Any]:
    """Those of some values that say how an image becomes an input of `config`."""
    known = {key: values[key] for key in PREPROCESSING if key in values}
    for key, value in known.items():
        known[key] = value = tuple(value) if isinstance(value, list) else value
        kind, limits = _KINDS[key]
        check_value(key, value, kind, **limits)
        counts = sorted({1, 3, config.in_chans})
        if key in ("mean", "std") and len(value) not in counts:
            raise HVTError(f"{key}={value} must be {' or '.join(map(str, counts))} numbers")
    return known


def check_names(names: Any, num_classes: int) -> list[str]:
    """Class names, one for each class."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HVTError("class names must be a list of text")
    if len(names) != num_classes:
        raise HVTError(f"{len(names)} class names do not fit {num_classes} classes")
    return names


def check_origin(origin: dict[str, Any]) -> dict[str, str]:
    """Where weights come from: texts by name."""
    for key, value in origin.items():
        check_value(f"origin {key}", value, str)
    return origin


@contextlib.contextmanager
def understood(problem: str) -> Iterator[None]:
    """Turn whatever untrusted content makes a reader raise into one sentence on the problem."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a library's own, and whatever values of a wrong kind lead to
        raise CheckpointError(f"{problem}: {first_line(error)}") from error
