"""What a file says of its model besides weights: config, class names, preprocessing, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError
from ..model import HVT

FORMAT = 1
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")

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
    """An architecture and what pictures and answers mean to it."""

    config: HVTConfig
    preprocessing: dict[str, Any]
    class_names: list[str] | None


def describe(
    model: HVT,
    class_names: Sequence[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
) -> str:
    """A model's description; names and preprocessing default to the model's own."""
    names = model.class_names if class_names is None else class_names
    if names is not None and len(names) != model.num_classes:
        raise HVTError(f"{len(names)} class names do not fit {model.num_classes} classes")
    known = model.pretrained_cfg | (preprocessing or {})
    return json.dumps(
        {
            "format": FORMAT,
            "config": model.config.to_dict(),
            "class_names": None if names is None else list(names),
            "preprocessing": {key: known[key] for key in PREPROCESSING if key in known},
        }
    )


def read_description(path: Path, text: str, blocks: int | None = None) -> Description:
    """The way back; `blocks` is how many the file holds, where that can be told beforehand."""
    try:
        described = json.loads(text)
        if described["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer hvt: upgrade to read it")
        # Before the config, which takes as long to check as it is deep.
        depth = described["config"]["depth"]
        if blocks is not None and depth != blocks:
            raise CheckpointError(f"{path} describes {depth!r} blocks but holds {blocks}")
        return Description(
            HVTConfig.from_dict(described["config"]),
            read_preprocessing(described["preprocessing"]),
            read_names(described["class_names"]),
        )
    except CheckpointError:
        raise
    except NOT_AS_EXPECTED as error:
        raise CheckpointError(f"{path} describes no usable model: {error}") from error


def read_preprocessing(values: dict[str, Any]) -> dict[str, Any]:
    """Those of some values that say how a picture becomes an input."""
    known = {key: values[key] for key in PREPROCESSING if key in values}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}


def read_names(names: Any) -> list[str] | None:
    """Class names from JSON, None where there are none."""
    if not names:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("class names must be a list of text")
    return names
