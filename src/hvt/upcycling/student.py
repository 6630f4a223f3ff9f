"""The pooled model that a source becomes: its weights, and its parts before and after pooling."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HVTConfig
from ..model import HVT
from ..pooling import as_image, as_tokens


class Outputs(NamedTuple):
    """What distillation compares."""

    logits: Tensor  # (B, classes); the feature where there is no head
    feature: Tensor  # (B, D), after the last norm
    tokens: tuple[Tensor, ...]  # (B, N', D) after each of the taken blocks


def resized(source: HVT, image: tuple[int, int]) -> HVT:
    """The source for images of another size, its other weights shared."""
    if source.config.image == image:
        return source
    memo = {id(tensor): tensor for tensor in (*source.parameters(), *source.buffers())}
    model = copy.deepcopy(source, memo)  # what the memo holds is not copied
    model.set_input_size(image)
    return model


def pooled(source: HVT, config: HVTConfig) -> HVT:
    """The source's weights in a pooled architecture of the same image size.

    Positions that follow a pooling are zero, so that pooled tokens are unchanged. Other weights
    are shared with the source.
    """
    with torch.device("meta"):
        model = HVT(config)
    tensors = dict(source.state_dict())
    for stage, block in enumerate(config.pool_blocks, 1):
        shape = (1, config.tokens[stage], config.width)
        tensors[f"blocks.{block}.pos_embed"] = torch.zeros(shape, device=source.pos_embed.device)
    model.load_state_dict(tensors, assign=True)
    model.set_input_size(config.img_size)  # makes what follows from the config, off meta
    model.pretrained_cfg.update(
        {k: v for k, v in source.pretrained_cfg.items() if k not in ("input_size", "num_classes")}
    )
    return model.eval()


def split_of(config: HVTConfig) -> int:
    """The block after which the tail begins: the first that is pooled, else two thirds down."""
    return config.pool_blocks[0] if config.pool_blocks else max(0, config.depth * 2 // 3 - 1)


def taken_blocks(config: HVTConfig) -> tuple[int, ...]:
    """The blocks of the tail whose tokens are compared: its middle, and the last but one.

    The last one's patches are read by no head that has a class token.
    """
    split, last = split_of(config), config.depth - 2
    return tuple(sorted({block for block in ((split + last + 1) // 2, last) if block > split}))


class Student(nn.Module):
    """A model that gives more than logits, from images or, with a split, from its front's."""

    def __init__(self, model: HVT, split: int | None = None) -> None:
        super().__init__()
        self.model, self.split = model, split
        self.taken = taken_blocks(model.config)

    def forward(self, x: Tensor) -> Outputs:
        model, first = self.model, 0
        blocks: Any = model.blocks
        if self.split is None:
            x = model._embed(x)
        else:
            first, position = self.split + 1, blocks[self.split].pos_embed
            x = x if position is None else x + position
        tokens = []
        for index in range(first, model.config.depth):
            x, _ = model._run(blocks[index], x, None)
            if index in self.taken:
                tokens.append(x)
        return _outputs(model, x, tokens)


def _outputs(model: HVT, x: Tensor, tokens: list[Tensor]) -> Outputs:
    x = model.norm(x)
    return Outputs(model.forward_head(x), model.forward_head(x, pre_logits=True), tuple(tokens))


def averaged(x: Tensor, index: int, whole: HVTConfig, student: HVTConfig) -> Tensor:
    """Unpooled tokens after a block, averaged over the part of the image of each of a student's.

    `(B, N, D)` → `(B, N', D)`; prefix tokens stay.
    """
    prefix, stage = whole.num_prefix_tokens, sum(block <= index for block in student.pool_blocks)
    patches = x[:, prefix:]
    image = as_image(patches, whole.grid)
    if stage > 0 and student.pool_dims == 1:  # row by row, in rows of the student's length
        patches = as_tokens(F.adaptive_avg_pool2d(image, student.grid))
        image = as_image(patches, (1, patches.shape[1]))
    parts = as_tokens(F.adaptive_avg_pool2d(image, student.grids[stage]))
    return torch.cat((x[:, :prefix], parts), dim=1)


class Target(nn.Module):
    """The outputs of a source, its tokens pooled to a student's grids; never trained."""

    def __init__(self, source: HVT, student: HVTConfig) -> None:
        super().__init__()
        self.source = source.eval().requires_grad_(False)
        self.taken = taken_blocks(student)
        self.student = student

    def train(self, mode: bool = True) -> Target:
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Outputs:
        source, tokens = self.source, []
        x = source._embed(images)
        for index, block in enumerate(source.blocks):
            x = block(x)
            if index in self.taken:
                tokens.append(averaged(x, index, source.config, self.student))
        return _outputs(source, x, tokens)
