"""Hugging Face directories: what `config.json` tells of weights that others saved.

timm's name the architecture and its arguments; transformers' hold the fields themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..fields import check_value
from ..zoo import MODELS, get_config
from .description import MAX_TEXT, read_json
from .timm_vit import is_timm_name, named_config
from .transformers_vit import transformers_config, transformers_preprocessing

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
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
    if not path.exists():
        return {}
    if path.stat().st_size > MAX_TEXT:
        raise ValueError(f"{path.name} is larger than {MAX_TEXT // 2**20} MB")
    return read_json(path.read_text(encoding="utf-8"))


def _timm(config: dict[str, Any]) -> Told:
    """timm's form; in its earlier one everything lies at the top."""
    name, arguments = config.get("architecture"), config.get("model_args") or {}
    names = config.get("label_names") or config.get("labels")
    cfg = config.get("pretrained_cfg", config)
    names = names or cfg.get("label_names")
    if name in MODELS:
        classes = {key: config[key] for key in ("num_classes",) if key in config}
        own = get_config(name, **arguments | classes)
        return Told(own.to_dict(), own, cfg, names)
    if not isinstance(name, str) or not is_timm_name(name):
        return Told({}, None, cfg, names)
    return Told(_timm_arguments(name, arguments, config.get("global_pool")), None, cfg, names)


def _timm_arguments(name: str, arguments: dict[str, Any], pool: str | None) -> dict[str, Any]:
    """What the name of a timm model and its arguments tell that tensors do not."""
    unread = [key for key in arguments if key not in (*_ASKED, *_TOLD)]
    if unread:
        raise ValueError(f"model_args has {unread[0]}, which is not read from there")
    asked = {key: arguments[key] for key in _ASKED if arguments.get(key) is not None}
    for key, value in asked.items():
        check_value(key, value, _ASKED[key])
    named = named_config(name, **asked)
    fields = ("num_heads", "act_layer", "norm_eps", "no_embed_class", "global_pool")
    told = {key: getattr(named, key) for key in fields}
    if "img_size" in arguments:
        told["img_size"] = arguments["img_size"]
    pool = arguments.get("global_pool", pool)
    return told | ({} if pool is None else {"global_pool": pool})


_ASKED = {
    "global_pool": str, "no_embed_class": bool, "pool_include_prefix": bool, "final_norm": bool
}  # fmt: skip
"""Arguments of timm's plain ViTs that change the outputs and that no tensor tells."""
_TOLD = (
    "img_size", "patch_size", "in_chans", "num_classes", "depth", "embed_dim", "mlp_ratio",
    "qkv_bias", "init_values", "class_token", "reg_tokens", "pre_norm", "fc_norm", "qk_norm",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init",
)  # fmt: skip
"""Those that tensors tell, or that are for training."""
