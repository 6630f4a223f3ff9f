"""The hierarchy of one image, as plain data: its tokens stage by stage, and what blocks cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..model import HVT
from ..see import TokenSources, token_sources
from ..see.sources import own_patches

EXPORTED = (
    "an exported file gives its answer and nothing from inside, so what its tokens come from "
    "is unknown: serve the checkpoint to see it"
)


class Token(BaseModel):
    """A token that is left, by the patches that it came from."""

    patches: list[int] = Field(description="counted row by row from 0")
    weights: list[float] = Field(description="the part of it from each; sums to 1")


class Stage(BaseModel):
    """The tokens at first, or after one step at which they became fewer."""

    tokens: int = Field(description="the sequence's length, a class token counted")
    after_block: int | None = Field(description="the block that made them fewer; null at first")
    grid: list[int] | None = Field(
        description="rows and columns of tokens; null where what is left has no grid"
    )
    shares: list[float] | None = Field(
        description="for each patch, the part of all tokens that came from it; sums to 1"
    )
    kept: list[Token] | None = Field(description="the tokens in order, a class token left out")


class Block(BaseModel):
    """One block and its price for one image."""

    block: int
    tokens: int = Field(description="that it takes")
    macs: int = Field(description="MACs, its pooling included")
    unpooled_macs: int = Field(description="MACs if all tokens had been kept")


class Box(BaseModel):
    """A part of the upright image, in parts of its width and height.

    It reaches beyond the image, below 0 or above 1, where the model's input has a border.
    """

    left: float
    top: float
    width: float
    height: float


class Hierarchy(BaseModel):
    """What becomes of one image inside the model."""

    model: str
    milliseconds: float = Field(
        default=0.0, description="from the request's headers to this answer"
    )
    image: list[int] = Field(description="height and width in pixels that the model sees")
    patches: list[int] = Field(description="rows and columns of patches")
    seen: Box = Field(description="the part of the image that the model sees")
    class_token: bool
    reduction: Literal["max", "avg", "conv", "drop", "merge"] | None = Field(
        description="how tokens become fewer: max or average pooling or a convolution, PoWER's "
        "dropping, ToMe's merging; null where all are kept"
    )
    stages: list[Stage]
    untraced: str | None = Field(description="why shares and kept tokens are null, where they are")
    blocks: list[Block]
    macs: int = Field(description="MACs in all, patch embedding and classifier included")
    unpooled_macs: int = Field(description="MACs in all if all tokens had been kept")


def hierarchy(
    config: HVTConfig, model: HVT | None, image: Tensor | None, seen: Box, name: str = ""
) -> Hierarchy:
    """The hierarchy of a prepared image `(C, H, W)`; without a model, only counts and costs."""
    traces, untraced = _traces(config, model, image)
    price, whole = cost(config), cost(config, stages=0, retention=None, merge=None)
    lengths = [*(tokens for tokens, _ in price.blocks()), config.tokens[-1]]
    steps = [block for block in range(config.depth) if lengths[block + 1] < lengths[block]]
    # What PoWER and ToMe leave has no grid.
    grids = [*map(list, config.grids), *[None] * (len(config.tokens) - len(config.grids))]
    stages = [
        Stage(
            tokens=tokens,
            after_block=block,
            grid=grid,
            shares=None if trace is None else _rounded(trace.shares.flatten()),
            kept=None if trace is None else _tokens(trace),
        )
        for tokens, block, grid, trace in zip(
            config.tokens, [None, *steps], grids, traces, strict=True
        )
    ]
    return Hierarchy(
        model=name,
        image=list(config.image),
        patches=list(config.grid),
        seen=seen,
        class_token=config.class_token,
        reduction=_reduction(config),
        stages=stages,
        untraced=untraced,
        blocks=[
            Block(block=index, tokens=tokens, macs=macs, unpooled_macs=unpooled)
            for index, ((tokens, macs), (_, unpooled)) in enumerate(
                zip(price.blocks(), whole.blocks(), strict=True)
            )
        ],
        macs=price.macs,
        unpooled_macs=price.unpooled_macs,
    )


def seen_part(size: tuple[int, int], config: HVTConfig, preprocessing: Mapping[str, Any]) -> Box:
    """What part of an image of `(width, height)` reaches the model after resize and crop."""
    share = preprocessing["crop_pct"]
    # Pixels of the image for each pixel of the input: timm's transform_imagenet_eval.
    scales = [
        side / math.floor(wanted / share)
        for side, wanted in zip(size, reversed(config.image), strict=True)
    ]
    if preprocessing["crop_mode"] == "border":
        scales = [max(scales)] * 2
    elif preprocessing["crop_mode"] != "squash":
        scales = [min(scales)] * 2
    width, height = (
        wanted * scale / side
        for side, wanted, scale in zip(size, reversed(config.image), scales, strict=True)
    )
    return Box(left=(1 - width) / 2, top=(1 - height) / 2, width=width, height=height)


def _traces(
    config: HVTConfig, model: HVT | None, image: Tensor | None
) -> tuple[list[TokenSources | None], str | None]:
    """For each stage what its tokens came from, or why that is unknown."""
    nothing: list[TokenSources | None] = [None] * len(config.tokens)
    if model is None or image is None:
        return nothing, EXPORTED
    patches = math.prod(config.grid)
    shares = torch.full(config.grid, 1 / patches, dtype=torch.float64)
    first = TokenSources(-1, own_patches(config.grid), shares, None)
    if len(config.tokens) == 1:
        return [first], None
    try:
        return [first, *token_sources(model, image)], None
    except HVTError as error:
        return nothing, str(error)


def _tokens(stage: TokenSources) -> list[Token]:
    rows, patches = stage.weights.indices()
    counts = torch.bincount(rows, minlength=stage.tokens).tolist()
    parts = zip(patches.split(counts), stage.weights.values().split(counts), strict=True)
    return [Token(patches=p.tolist(), weights=_rounded(w)) for p, w in parts]


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _reduction(config: HVTConfig) -> Any:
    if len(config.tokens) == 1:
        return None
    if config.merge is not None:
        return "merge"
    return config.pool if config.retention is None else "drop"
