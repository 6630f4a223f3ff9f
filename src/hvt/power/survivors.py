"""Which patches a PoWER model keeps of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..extraction import Extract, best, significance
from ..model import HVT


@torch.inference_mode()
def survivors(model: HVT, images: Tensor) -> list[Tensor]:
    """The patches that leave each block, numbered row by row: L tensors of shape `(B, l_j - 1)`."""
    chosen: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(module, Extract):
            chosen[module] = best(significance(inputs[1]), module.keep - 1)

    extracts = [block.extract for block in model.blocks]
    hooks = [e.register_forward_hook(watch) for e in extracts if isinstance(e, Extract)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    patches = model.config.grid[0] * model.config.grid[1]
    left = torch.arange(patches, device=images.device).expand(images.shape[0], -1)
    kept = []
    for extract in extracts:
        if isinstance(extract, Extract):
            left = left.gather(1, chosen[extract])
        kept.append(left)
    return kept
