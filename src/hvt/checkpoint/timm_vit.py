"""timm's plain vision transformers as ours: which of them fit, and what in one does not.

The names of the parameters are the same; what is read off here is the architecture, part by part,
so that a part this family does not have is refused by name and never left out in silence.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import LayerScale, Mlp, PatchEmbed, QuickGELU
from timm.layers.activations import GELUTanh
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn

from ..config import HVTConfig
from ..errors import HVTError
from ..model import HVT
from .description import PREPROCESSING

_ACTIVATIONS = {
    nn.GELU: "gelu",
    GELUTanh: "gelu_tanh",
    QuickGELU: "quick_gelu",
}


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


def is_timm_name(name: str) -> bool:
    """Whether timm knows a model of this name that is not one of ours."""
    return timm.is_model(name) and not timm.models.model_entrypoint(name).__module__.startswith(
        "hvt."
    )


def named_config(name: str, **kwargs: Any) -> HVTConfig:
    """The architecture of a timm model by name; its weights are neither made nor fetched."""
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, **kwargs)
    return timm_config(model, name)


def timm_config(model: nn.Module, name: str) -> HVTConfig:
    """What a timm model is in our fields; refuses what has no field."""
    distilled = type(model) is VisionTransformerDistilled
    if type(model) is not VisionTransformer and not distilled:
        raise _misfit(name, f"it is a {type(model).__name__}, not a plain VisionTransformer")
    assert isinstance(model, VisionTransformer)
    patch, grid = _patches(model, name)
    block = _first_block(model, name)
    attention, mlp = block.attn, block.mlp
    if model.pos_embed is None:
        raise _misfit(name, "it has no learned positions")
    if model.global_pool not in ("", "avg", "token") or model.attn_pool is not None:
        raise _misfit(name, f"its head pools by {model.global_pool!r}")
    if model.pool_include_prefix and model.num_prefix_tokens and model.global_pool == "avg":
        raise _misfit(name, "its average includes the class or register tokens")
    norms = [model.norm, model.fc_norm]
    real = [norm for norm in norms if not isinstance(norm, nn.Identity)]
    if len(real) != 1:
        raise _misfit(name, "it has no norm before its head")
    scale = block.ls1.gamma if isinstance(block.ls1, LayerScale) else None
    return HVTConfig(
        img_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        in_chans=model.patch_embed.proj.in_channels,
        num_classes=model.num_classes,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        depth=len(model.blocks),
        stages=0,
        class_token=model.has_class_token,
        dist_token=distilled,
        reg_tokens=model.num_reg_tokens,
        global_pool=model.global_pool,
        fc_norm=real[0] is model.fc_norm,
        no_embed_class=model.no_embed_class,
        pre_norm=not isinstance(model.norm_pre, nn.Identity),
        norm_eps=block.norm1.eps,
        qkv_bias=attention.qkv.bias is not None,
        init_values=None if scale is None else 1e-5,
        act_layer=_ACTIVATIONS[type(mlp.act)],
        mlp_ratio=mlp.fc1.out_features / model.embed_dim,
    )


def _misfit(name: str, reason: str) -> HVTError:
    return HVTError(
        f"{name} does not fit: {reason}. Plain ViTs with learned positions do, such as "
        "deit_tiny_patch16_224, vit_base_patch16_224 or vit_small_patch14_dinov2"
    )


def _patches(model: VisionTransformer, name: str) -> tuple[int, tuple[int, int]]:
    embed = model.patch_embed
    if type(embed) is not PatchEmbed:
        raise _misfit(name, f"its patches are made by a {type(embed).__name__}")
    if not isinstance(embed.norm, nn.Identity):
        raise _misfit(name, "its patches are normed before positions are added")
    rows, cols = embed.patch_size
    if rows != cols:
        raise _misfit(name, f"its patches are of {rows} × {cols} pixels and not square")
    height, width = embed.img_size
    return rows, (height // rows, width // cols)


def _first_block(model: VisionTransformer, name: str) -> Block:
    """The first block, after all of them were found to be plain and alike."""
    kinds = {_kind(block, name) for block in model.blocks}
    if len(kinds) > 1:
        raise _misfit(name, "its blocks differ from each other")
    first = model.blocks[0]
    assert isinstance(first, Block)
    return first


def _kind(block: nn.Module, name: str) -> tuple[Any, ...]:
    if type(block) is not Block:
        raise _misfit(name, f"its blocks are {type(block).__name__}")
    attention, mlp = block.attn, block.mlp
    if type(attention) is not Attention:
        raise _misfit(name, f"its attention is a {type(attention).__name__}")
    for part, what in (
        (attention.q_norm, "queries and keys are normed"),
        (attention.k_norm, "queries and keys are normed"),
        (attention.norm, "attention's output is normed"),
    ):
        if not isinstance(part, nn.Identity):
            raise _misfit(name, f"its {what}")
    if type(mlp) is not Mlp or not isinstance(mlp.norm, nn.Identity):
        raise _misfit(name, f"its MLP is a {type(mlp).__name__} or normed")
    if type(mlp.act) not in _ACTIVATIONS:
        raise _misfit(name, f"its activation is {type(mlp.act).__name__}")
    if attention.proj.bias is None or mlp.fc1.bias is None:
        raise _misfit(name, "its projections have no bias")
    for norm in (block.norm1, block.norm2):
        if not isinstance(norm, nn.LayerNorm):
            raise _misfit(name, f"its norms are {type(norm).__name__}")
        if norm.weight is None or norm.bias is None:
            raise _misfit(name, "its norms have no weight or bias")
    return (
        attention.num_heads,
        attention.qkv.bias is None,
        mlp.fc1.out_features,
        type(mlp.act),
        type(block.ls1),
        type(block.ls2),
        block.norm1.eps,
        block.norm2.eps,
    )
