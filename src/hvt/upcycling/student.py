"""The pooled model that a source becomes: its weights, its outputs, its part after pooling."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..config import HVTConfig
from ..elastic import rebuilt, replica
from ..model import HVT


class Outputs(NamedTuple):
    """What distillation compares."""

    logits: Tensor  # (B, classes); the feature where there is no head
    feature: Tensor  # (B, D), after the last norm


def resized(source: HVT, image: tuple[int, int]) -> HVT:
    """The source for images of another size, its other weights shared."""
    if source.config.image == image:
        return source
    model: HVT = replica(source)
    model.set_input_size(image)
    return model


def pooled(source: HVT, config: HVTConfig) -> HVT:
    """The source's weights in a pooled architecture of the same image size.

    Positions that follow a pooling are zero, so that pooled tokens are unchanged. Other weights
    are shared with the source.
    """
    tensors = dict(source.named_parameters())
    for stage, block in enumerate(config.pool_blocks, 1):
        zeros = source.pos_embed.new_zeros(1, config.tokens[stage], config.width)
        tensors[f"blocks.{block}.pos_embed"] = nn.Parameter(zeros)
    return rebuilt(source, config, tensors).eval()


def split_of(config: HVTConfig) -> int:
    """The block after which the tail begins: the first that is pooled, else two thirds down."""
    return config.pool_blocks[0] if config.pool_blocks else max(0, config.depth * 2 // 3 - 1)


def tail(model: HVT, x: Tensor) -> Tensor:  # (B, N, D) → (B, classes)
    """The logits of a model from the output of the block at its split, not pooled yet."""
    blocks: Any = model.blocks
    first, *rest = blocks[split_of(model.config) :]
    if first.pool is not None:
        x = first.pool(x) + first.pos_embed
    for block in rest:
        x = block(x)
    return model.forward_head(model.norm(x))


class Student(nn.Module):
    """A model that gives its feature beside its logits."""

    def __init__(self, model: HVT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Outputs:
        x = self.model.forward_features(images)
        feature = self.model.forward_head(x, pre_logits=True)
        return Outputs(self.model.forward_head(x), feature)
