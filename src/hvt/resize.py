"""How learned positions and patch filters follow a change of image or patch size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor

from .config import HVTConfig


def resized(tensors: Mapping[str, Tensor], old: HVTConfig, new: HVTConfig) -> dict[str, Tensor]:
    """Those of a model's tensors that follow another image or patch size."""
    filters = "patch_embed.proj.weight"
    moved = {filters: resize_patches(tensors[filters], new.patch_size)}
    names = ["pos_embed", *(f"blocks.{block}.pos_embed" for block in new.pool_blocks)]
    for stage, name in enumerate(names):
        if name in tensors:  # a pruned model has fewer blocks
            moved[name] = resize_positions(tensors[name], old, new, stage)
    return moved


def resize_positions(embedding: Tensor, old: HVTConfig, new: HVTConfig, stage: int) -> Tensor:
    """The positional embedding after pooling `stage` (0 is the first), moved to another grid.

    The first one, and all of a 2D-pooled model, lie on a grid and are resampled in 2D; those of a
    1D-pooled sequence are resampled along it. `(1, N, D)` → `(1, N', D)`.
    """
    before, after = old.grids[stage], new.grids[stage]
    prefix = 0 if stage == 0 and new.no_embed_class else new.num_prefix_tokens
    if before == after:
        return embedding
    if stage == 0 or new.pool_dims == 2:
        return resample_abs_pos_embed(embedding, list(after), list(before), prefix)
    kept, sequence = embedding[:, :prefix], embedding[:, prefix:]
    moved = F.interpolate(sequence.float().transpose(1, 2), size=after[1], mode="linear")
    return torch.cat((kept, moved.transpose(1, 2).to(embedding.dtype)), dim=1)


def resize_patches(weight: Tensor, patch_size: int) -> Tensor:
    """Patch filters `(D, C, P, P)` resampled to another patch size (FlexiViT's pseudo-inverse)."""
    if weight.shape[-1] == patch_size:
        return weight
    return resample_patch_embed(weight, [patch_size, patch_size])
