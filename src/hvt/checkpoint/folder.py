"""Hugging Face directories: what `config.json` tells of weights that others saved.

timm's name the architecture and its arguments; transformers' hold the fields themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..zoo import MODELS, get_config
from .description import read_json
from .timm_vit import is_timm_name, named_config
from .transformers_vit import transformers_config, transformers_preprocessing

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face's directories call them."""


@dataclass
class Told:
    """What the JSON files beside some weights tell."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Fields that tensors leave open."""
    config: HVTConfig | None = None
    """All fields, of one of our models that timm saved."""
    preprocessing: dict[str, Any] | None = field(default_factory=dict)
    """None where a transformers directory has no image processor."""
    class_names: list[Any] | None = None


def read_folder(path: Path) -> Told:
    """What a directory tells beside its weights; raises whatever values of a wrong kind lead to."""
    config = _read_json(path / "config.json")
    if "pretrained_cfg" in config or "architecture" in config:
        return _timm(config)
    arguments, names = transformers_config(config)
    processor = path / "preprocessor_config.json"
    if processor.exists():
        return Told(arguments, None, transformers_preprocessing(_read_json(processor)), names)
    return Told(arguments, None, None if config else {}, names)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path.read_bytes()) if path.exists() else {}


def _timm(config: dict[str, Any]) -> Told:
    """timm's form; in its earlier one everything lies at the top."""
    name, arguments = config.get("architecture"), dict(config.get("model_args") or {})
    cfg = config.get("pretrained_cfg", config)
    names = config.get("label_names") or config.get("labels") or cfg.get("label_names")
    if name in MODELS:
        if "num_classes" in config:
            arguments["num_classes"] = config["num_classes"]
        own = get_config(name, **arguments)
        return Told(own.to_dict(), own, cfg, names)
    if not isinstance(name, str) or not is_timm_name(name):
        return Told({}, None, cfg, names)
    if config.get("global_pool") is not None:
        arguments.setdefault("global_pool", config["global_pool"])
    return Told(_timm_arguments(name, arguments), None, cfg, names)


def _timm_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the name of a timm model and its arguments tell that tensors do not."""
    try:  # one block tells as much as all, and nothing is read from a file that they may name
        named = named_config(name, checkpoint_path="", **arguments | {"depth": 1})
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(f"timm makes no {name} of {arguments} ({error})") from error
    fields = ("num_heads", "act_layer", "norm_eps", "no_embed_class", "global_pool")
    sizes = {"img_size": arguments["img_size"]} if "img_size" in arguments else {}
    return {key: getattr(named, key) for key in fields} | sizes
