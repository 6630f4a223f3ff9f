"""timm's plain vision transformers as ours: which of them fit, and what in one does not.

The names of the parameters are the same, so the architecture is that of the tensors. What no tensor
tells is read off the modules, so that a part this family does not have raises an error with its
name and is never left out silently.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import LayerNorm, Mlp, PatchEmbed, QuickGELU
from timm.layers.activations import GELUTanh
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError
from ..model import HVT
from .description import PREPROCESSING
from .fitting import compare, parameter_shapes
from .foreign import infer_config

_ACTIVATIONS = {nn.GELU: "gelu", GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu"}


def from_timm(model: nn.Module, name: str = "the model") -> HVT:
    """The same model in our family, weights, preprocessing and all; in evaluation mode.

    Raises an `HVTError` that names the part that does not fit, for those that are not a plain ViT:
    rotary or relative positions, windows, other norms, attention pooling and the like.
    """
    ours = HVT(timm_config(model, name))
    ours.load_state_dict(model.state_dict())
    theirs: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    ours.pretrained_cfg.update({k: theirs[k] for k in PREPROCESSING if theirs.get(k) is not None})
    if theirs.get("label_names"):
        ours.pretrained_cfg["label_names"] = tuple(theirs["label_names"])
    ours.to(next(model.parameters()).dtype)
    return ours.eval()


def named_config(name: str, **kwargs: Any) -> HVTConfig:
    """The architecture of a timm model by name; its weights are neither made nor fetched."""
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, **kwargs)
    return timm_config(model, name)


def timm_config(model: Any, name: str) -> HVTConfig:
    """What a timm model is in our fields; a part that has no field raises an error."""
    try:
        _check_parts(model)
        block = model.blocks[0]
        patch = model.patch_embed.patch_size[0]
        arguments = {
            "img_size": tuple(side // patch * patch for side in model.patch_embed.img_size),
            "num_heads": block.attn.num_heads,
            "norm_eps": block.norm1.eps,
            "act_layer": _ACTIVATIONS[type(block.mlp.act)],
            "no_embed_class": model.no_embed_class,
            "global_pool": model.global_pool,
        }
        config = infer_config(model.state_dict(), arguments, {}, "it")
        compare(model.state_dict(), parameter_shapes(config), "it is not a plain ViT")
    except CheckpointError as error:
        raise HVTError(
            f"{name} is not supported: {error}; use a plain ViT with learned positions, such as "
            "deit_tiny_patch16_224, vit_base_patch16_224 or vit_small_patch14_dinov2"
        ) from error
    return config


def _check_parts(model: Any) -> None:
    """Raise an error that names what is not a plain ViT's and would not be seen in its tensors."""
    if type(model) not in (VisionTransformer, VisionTransformerDistilled):
        raise CheckpointError(f"it is a {type(model).__name__}, not a plain VisionTransformer")
    for words, part, kinds in (
        ("its patch embedding is a {}", model.patch_embed, (PatchEmbed,)),
        ("its blocks are {}", model.blocks[0], (Block,)),
        ("its MLP is a {}", model.blocks[0].mlp, (Mlp,)),
        ("its activation is {}", model.blocks[0].mlp.act, _ACTIVATIONS),
        ("its norms are {}", model.blocks[0].norm1, (nn.LayerNorm, LayerNorm)),
    ):
        if type(part) not in kinds:
            raise CheckpointError(words.format(type(part).__name__))
    if model.global_pool not in ("", "avg", "token"):
        raise CheckpointError(f"its head pools by {model.global_pool!r}")
    if model.pool_include_prefix and model.num_prefix_tokens and model.global_pool == "avg":
        raise CheckpointError("its average includes the class or register tokens")
