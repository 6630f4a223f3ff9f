"""What all configs of a space cost: the closed form of `hvt.costs` over arrays, without torch.

A block's cost is a polynomial of its tokens, so that of a model follows from sums over its blocks:
how many see each length. These are matrix products over the places to pool and the lengths, and
the widths are one axis more. `tests/test_plan.py` holds every figure to `hvt.cost`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig
from ..costs import FLOAT32, Cost
from ..lengths import window
from .space import MOST_STAGES, Picture, Pooling, Space, lengths

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ADAMW = 4 * FLOAT32
"""Bytes of a parameter in training: itself, its gradient and AdamW's two averages."""


def training_bytes(params: int, activation_bytes: int, config: HVTConfig, batch: int) -> int:
    """Memory of a training step: parameters, gradients, AdamW's state, what autograd keeps, images.

    What kernels take for a moment, Python and torch come on top.
    """
    height, width = config.image
    images = FLOAT32 * config.in_chans * height * width
    return ADAMW * params + batch * (activation_bytes + images)


def memory_mb(cost: Cost, config: HVTConfig, batch: int) -> float:
    """The same for one config, in 10⁶ bytes."""
    held = sum(layer.activation_bytes for layer in cost.layers)
    return training_bytes(cost.params, held, config, batch) / 1e6


@dataclass(frozen=True)
class Lengths:
    """Pictures and how they are pooled: Q pairs, each with its tokens at every stage."""

    pictures: list[Picture]
    poolings: list[Pooling]
    tokens: Ints
    """(Q, stages + 1) with prefix tokens; 0 where a stage would leave too few."""
    prefix: int

    @cached_property
    def stages(self) -> Ints:
        """(Q,), how many poolings each sequence stands."""
        return (self.tokens > 0).sum(axis=1) - 1

    @cached_property
    def summed(self) -> Ints:
        """(Q, stages + 1), tokens of all stages up to each."""
        return self.tokens.cumsum(axis=1)

    @cached_property
    def logs(self) -> Floats:
        """(Q, stages + 1), the logarithm of the patches; 0 where there are none."""
        return np.log(np.maximum(self.tokens - self.prefix, 1))


@dataclass(frozen=True)
class Priced:
    """Every config of one depth: arrays over places P, lengths Q and widths W."""

    depth: int
    places: list[tuple[int, ...]]
    lengths: Lengths
    valid: NDArray[np.bool_]
    """(P, Q); False where a sequence is too short for a place's poolings, or pooled by none."""
    counts: Ints
    """(P, stages + 1), how many blocks see each stage's tokens."""
    poolings: Ints
    """(P,), how many there are."""
    macs: Ints
    """(P, Q, W)"""
    params: Ints
    training_bytes: Ints
    """(P, Q, W), of a step at the batch that was asked for."""


def sequences(space: Space) -> Lengths:
    """All pairs of a picture and a pooling."""
    prefix = space.base.num_prefix_tokens
    stages = MOST_STAGES
    if space.fixed.get("pool_after") is not None:
        stages = len(space.fixed["pool_after"])
    elif space.fixed.get("stages") is not None:
        stages = space.fixed["stages"]
    pictures, poolings, rows = [], [], []
    for picture in space.pictures:
        for pooling in space.poolings:
            counts = [n + prefix for n in lengths(picture.grid, pooling, stages)]
            pictures.append(picture)
            poolings.append(pooling)
            rows.append(counts + [0] * (stages + 1 - len(counts)))
    return Lengths(pictures, poolings, np.array(rows, np.int64), prefix)


def priced(space: Space, batch: int = 1) -> Iterator[Priced]:
    """The costs of a space, one depth after another; `batch` is that of the training memory."""
    found = sequences(space)
    for depth in space.depths:
        places = [after for after in space.places(depth) if len(after) < found.tokens.shape[1]]
        if places:
            yield _priced(space, found, depth, places, batch)


def _priced(
    space: Space, found: Lengths, depth: int, places: list[tuple[int, ...]], batch: int
) -> Priced:
    base, stages = space.base, found.tokens.shape[1]
    counts = np.array([_counts(after, depth, stages) for after in places], np.int64)
    poolings = np.array([len(after) for after in places], np.int64)
    # A model that is never pooled is the same with any pooling: the first stands for it.
    first = np.arange(len(found.pictures)) % len(space.poolings) == 0
    valid = (poolings[:, None] <= found.stages) & ((poolings[:, None] > 0) | first)

    tokens = found.tokens
    ones = counts @ tokens.T  # (P, Q), Σ n over blocks
    squares = counts @ (tokens**2).T
    last = tokens[:, poolings].T
    positions = found.summed[:, poolings].T  # Σ of the stages' lengths
    entering, leaving = positions - last, positions - tokens[:, 0]  # Σ of lengths around poolings
    outputs = leaving - poolings[:, None] * found.prefix

    heads = np.array([heads for heads, _ in space.widths], np.int64)
    d = np.array([heads * dim for heads, dim in space.widths], np.int64)
    hidden = np.array([int(int(width) * base.mlp_ratio) for width in d], np.int64)
    patch = np.array([p.patch**2 * base.in_chans for p in found.pictures], np.int64)
    pixels = np.array([p.size[0] * p.size[1] * base.in_chans for p in found.pictures], np.int64)
    area = np.array([np.prod(window(p[0], p[1])) for p in found.poolings], np.int64)
    by_conv = base.pool == "conv"

    macs = (
        ones[:, :, None] * (4 * d * d + 2 * d * hidden)
        + squares[:, :, None] * (2 * d)
        + (pixels[:, None] * d + d * base.num_classes)
    )
    blocks = depth * (4 * d * d + 6 * d + 2 * d * hidden + 3 * d + hidden)
    head = (d + 1) * base.num_classes
    params = (
        (patch[:, None] + 1 + found.prefix) * d
        + positions[:, :, None] * d
        + (blocks + 2 * d + head)
    )
    if by_conv:
        macs = macs + (outputs * area)[:, :, None] * (d * d)
        params = params + poolings[:, None, None] * (area[:, None] * (d * d) + d)
    held = FLOAT32 * (
        ones[:, :, None] * (8 * d + 2 * hidden + 4 + heads)
        + entering[:, :, None] * d
        + last[:, :, None] * (d + 2)
        + pixels[:, None]
    )
    if base.pool == "max":
        held = held + 8 * outputs[:, :, None] * d
    if base.num_classes:
        held = held + FLOAT32 * (d if base.head_pool == "avg" else last[:, :, None] * d)
    memory = ADAMW * params + batch * (held + FLOAT32 * pixels[:, None])
    return Priced(depth, places, found, valid, counts, poolings, macs, params, memory)


def _counts(after: tuple[int, ...], depth: int, stages: int) -> list[int]:
    """How many blocks see the tokens of each stage; the block that pools sees those before."""
    ends = [block + 1 for block in after] + [depth]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return counts + [0] * (stages - len(counts))
