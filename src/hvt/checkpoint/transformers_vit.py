"""transformers' ViT and DeiT: the names of tensors, `config.json`, `preprocessor_config.json`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Resampling

from ..errors import CheckpointError
from .fitting import State

_TRANSFORMERS = (
    (r"^(?:vit|deit)\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(?<!attention)\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)


def from_transformers(state: State, path: Path) -> State:
    """A transformers ViT or DeiT state dict in our names; others come back unchanged."""
    if not any(".attention.attention.query." in name for name in state):
        return state
    renamed: State = {}
    for name, tensor in state.items():
        for pattern, ours in _TRANSFORMERS:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    # Its DeiTs have the token whether or not a head reads it; one that is not read is a register.
    distilled = renamed.pop("embeddings.distillation_token", None)
    if distilled is not None:
        renamed["dist_token" if "head_dist.weight" in renamed else "reg_token"] = distilled
    for name in [n for n in renamed if ".attention.attention.query." in n]:
        names = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        try:
            joined = torch.cat([renamed.pop(part) for part in names])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} has no matching {', '.join(names)}") from error
        renamed[name.replace(".attention.attention.query.", ".attn.qkv.")] = joined
    return renamed


def transformers_config(config: dict[str, Any]) -> tuple[dict[str, Any], list[Any] | None]:
    """What a transformers `config.json` knows and weights do not tell, and the class names."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"hidden_act={config['hidden_act']!r}, but this family uses gelu")
    labels = {int(index): name for index, name in (config.get("id2label") or {}).items()}
    if sorted(labels) != list(range(len(labels))):
        raise ValueError("id2label does not number the classes from 0")
    fields = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_eps"}
    fields["image_size"] = "img_size"
    known = {ours: config[name] for name, ours in fields.items() if config.get(name) is not None}
    return known, [labels[index] for index in range(len(labels))] or None


# What transformers' image processors do where their file does not say.
_VIT: dict[str, Any] = {
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_center_crop": False,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224, "resample": 2,
}  # fmt: skip
_DEIT = {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3}


def transformers_preprocessing(processor: dict[str, Any]) -> dict[str, Any]:
    """timm's terms for a transformers `preprocessor_config.json`."""
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    usual = _VIT | (_DEIT if str(kind).startswith("DeiT") else {})
    told = usual | {name: value for name, value in processor.items() if value is not None}
    if not told["do_rescale"] or not math.isclose(told["rescale_factor"], 1 / 255, rel_tol=1e-3):
        raise ValueError("image values are not rescaled to 0 … 1, as this family requires")
    cropped = told["do_center_crop"]
    keeps_shape = isinstance(told["size"], dict) and "shortest_edge" in told["size"]
    return {
        "mean": told["image_mean"] if told["do_normalize"] else [0.0] * 3,
        "std": told["image_std"] if told["do_normalize"] else [1.0] * 3,
        "interpolation": Resampling(told["resample"]).name.lower(),  # as timm names them
        "crop_pct": _side(told["crop_size"]) / _side(told["size"]) if cropped else 1.0,
        "crop_mode": "center" if keeps_shape else "squash",  # to height × width
    }


def _side(size: Any) -> float:
    """Pixels from transformers' `224`, `{"height": 224, …}` or `{"shortest_edge": 224}`."""
    if isinstance(size, dict):
        size = size["shortest_edge" if "shortest_edge" in size else "height"]
    return float(size)
