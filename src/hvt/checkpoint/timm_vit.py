"""timm's plain vision transformers as ours: which of them fit, and what in one does not.

The names of the parameters are the same, so the architecture is that of the tensors. What no tensor
tells is read off the modules, so that a part this family does not have raises an error with its
name and is never left out silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import timm
import torch
from timm.layers import LayerNorm, Mlp, PatchEmbed, QuickGELU
from timm.layers.activations import GELUTanh
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Attention, Block, VisionTransformer
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
    """What a timm model is in our fields; a part that has no field raises an error."""
    reason = _misfit(model)
    if reason:
        raise _does_not_fit(name, reason)
    assert isinstance(model, VisionTransformer)
    block: Any = model.blocks[0]
    patch = model.patch_embed.patch_size[0]
    arguments = {
        "img_size": tuple(side // patch * patch for side in model.patch_embed.img_size),
        "num_heads": block.attn.num_heads,
        "norm_eps": block.norm1.eps,
        "act_layer": _ACTIVATIONS[type(block.mlp.act)],
        "no_embed_class": model.no_embed_class,
        "global_pool": model.global_pool,
    }
    try:
        config = infer_config(model.state_dict(), arguments, {}, "it")
        compare(model.state_dict(), parameter_shapes(config), "it is not a plain ViT")
    except CheckpointError as error:
        raise _does_not_fit(name, str(error)) from error
    return config


def _does_not_fit(name: str, reason: str) -> HVTError:
    return HVTError(
        f"{name} does not fit: {reason}. Plain ViTs with learned positions do, such as "
        "deit_tiny_patch16_224, vit_base_patch16_224 or vit_small_patch14_dinov2"
    )


def _misfit(model: nn.Module) -> str | None:
    """What in a model is not a plain ViT's and would not be seen in its tensors, if anything."""
    for words, part, kinds in _parts(model):
        if type(part) not in kinds:
            return words.format(type(part).__name__)
    assert isinstance(model, VisionTransformer)
    if model.global_pool not in ("", "avg", "token") or model.attn_pool is not None:
        return f"its head pools by {model.global_pool!r}"
    if model.pool_include_prefix and model.num_prefix_tokens and model.global_pool == "avg":
        return "its average includes the class or register tokens"
    blocks: Any = model.blocks
    alike = {(b.attn.num_heads, type(b.mlp.act), b.norm1.eps, b.norm2.eps) for b in blocks}
    return "its blocks differ from each other" if len(alike) > 1 else None


def _parts(model: Any) -> Iterator[tuple[str, nn.Module, Collection[type]]]:
    """What to say of a part that does not fit, the part, and its types; those before it fit."""
    plain = (VisionTransformer, VisionTransformerDistilled)
    yield "it is a {}, not a plain VisionTransformer", model, plain
    yield "its patches are made by a {}", model.patch_embed, (PatchEmbed,)
    for block in model.blocks:
        yield "its blocks are {}", block, (Block,)
        yield "its attention is a {}", block.attn, (Attention,)
        yield "its MLP is a {}", block.mlp, (Mlp,)
        yield "its activation is {}", block.mlp.act, _ACTIVATIONS
        yield "its norms are {}", block.norm1, (nn.LayerNorm, LayerNorm)
