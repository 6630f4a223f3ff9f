"""The hierarchy of one image, as plain data: its tokens stage by stage, and what blocks cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..model import HVT
from ..see import TokenSources, token_sources

EXPORTED = (
    "an exported file returns only logits, so its tokens cannot be traced: serve the checkpoint "
    "instead"
)


def hierarchy(
    config: HVTConfig, model: HVT | None, image: Tensor | None, seen: dict[str, float]
) -> dict[str, Any]:
    """What `/explain` answers for a prepared image `(C, H, W)`; the reference of HTTP says it all.

    Without a model there are only counts and costs.
    """
    traces, untraced = _traces(config, model, image)
    price, whole = cost(config), cost(config, stages=0, retention=None, merge=None)
    lengths = [*(tokens for tokens, _ in price.blocks()), config.tokens[-1]]
    steps = [block for block in range(config.depth) if lengths[block + 1] < lengths[block]]
    # What PoWER and ToMe leave has no grid.
    grids = [*config.grids, *[None] * (len(config.tokens) - len(config.grids))]
    stages = [
        {
            "tokens": tokens,
            "after_block": block,
            "grid": grid,
            "shares": None if trace is None else _rounded(trace.shares.flatten()),
            "kept": None if trace is None else _tokens(trace),
        }
        for tokens, block, grid, trace in zip(
            config.tokens, [None, *steps], grids, traces, strict=True
        )
    ]
    prices = zip(price.blocks(), whole.blocks(), strict=True)
    blocks = [
        {"block": place, "tokens": tokens, "macs": macs, "unpooled_macs": unpooled}
        for place, ((tokens, macs), (_, unpooled)) in enumerate(prices)
    ]
    return {
        "image": config.image,
        "patches": config.grid,
        "seen": seen,
        "class_token": config.class_token,
        "reduction": _reduction(config),
        "stages": stages,
        "untraced": untraced,
        "blocks": blocks,
        "macs": price.macs,
        "unpooled_macs": price.unpooled_macs,
    }


def seen_part(
    size: tuple[int, int], config: HVTConfig, preprocessing: Mapping[str, Any]
) -> dict[str, float]:
    """What part of an image of `(width, height)` reaches the model after resize and crop."""
    share, wanted = preprocessing["crop_pct"], config.image[::-1]
    # Pixels of the image for each pixel of the input: timm's transform_imagenet_eval.
    scales = [side / math.floor(input_ / share) for side, input_ in zip(size, wanted, strict=True)]
    if preprocessing["crop_mode"] == "border":
        scales = [max(scales)] * 2
    elif preprocessing["crop_mode"] != "squash":
        scales = [min(scales)] * 2
    width, height = (w * scale / side for side, w, scale in zip(size, wanted, scales, strict=True))
    return {"left": (1 - width) / 2, "top": (1 - height) / 2, "width": width, "height": height}


def _traces(
    config: HVTConfig, model: HVT | None, image: Tensor | None
) -> tuple[list[TokenSources | None], str | None]:
    """For each stage what its tokens came from, or why that is unknown."""
    nothing: list[TokenSources | None] = [None] * len(config.tokens)
    if model is None or image is None:
        return nothing, EXPORTED
    patches = math.prod(config.grid)
    first = TokenSources(-1, torch.eye(patches), torch.full(config.grid, 1 / patches), None)
    if len(config.tokens) == 1:
        return [first], None
    try:
        return [first, *token_sources(model, image)], None
    except HVTError as error:
        return nothing, str(error)


def _tokens(stage: TokenSources) -> list[dict[str, list[Any]]]:
    return [
        {"patches": weights.nonzero().flatten().tolist(), "weights": _rounded(weights[weights > 0])}
        for weights in stage.weights
    ]


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _reduction(config: HVTConfig) -> str | None:
    if len(config.tokens) == 1:
        return None
    if config.merge is not None:
        return "merge"
    return config.pool if config.retention is None else "drop"
