"""What all configs of a space cost: the closed form of `hvt.costs` over arrays, without torch.

The cost of a block is a polynomial of its tokens, so that of a model follows from how many blocks
see each length: matrix products over places to pool and lengths, with widths as one more axis.
Costs are float64: int64 overflows at very large images. `tests/test_plan.py` compares every figure
with `hvt.cost`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig, window
from ..costs import FLOAT32, Cost
from .space import Choices, Space, lengths

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ADAMW = 4 * FLOAT32
"""Bytes of a parameter in training: itself, its gradient and AdamW's two averages."""


def training_bytes(cost: Cost, config: HVTConfig, batch: int) -> int:
    """Memory of a training step: parameters, gradients, AdamW's state, activations and images.

    Temporary buffers of kernels, Python and torch are not included.
    """
    height, width = config.image
    images = FLOAT32 * config.in_chans * height * width
    activations = sum(layer.activation_bytes for layer in cost.layers)
    return ADAMW * cost.params + batch * (activations + images)


class Lengths:
    """Q pairs of an image and a pooling window, each with its tokens at every stage."""

    def __init__(self, space: Space, stages: int) -> None:
        pairs = list(itertools.product(space.images, space.poolings))
        self.images = [image for image, _ in pairs]
        self.poolings = [pooling for _, pooling in pairs]
        self.prefix = space.base.num_prefix_tokens
        self.tokens: Floats = np.zeros((len(pairs), stages + 1))
        """(Q, stages + 1) with prefix tokens; 0 where a pooling would leave too few."""
        for row, (image, pooling) in zip(self.tokens, pairs, strict=True):
            patches = lengths(image.grid, pooling, stages)
            row[: len(patches)] = np.add(patches, self.prefix)
        self.summed = self.tokens.cumsum(axis=1)
        """(Q, stages + 1), tokens of all stages up to each."""
        self.logs = np.log(np.maximum(self.tokens - self.prefix, 1))
        """(Q, stages + 1), the logarithm of the patches; 0 where there are none."""


class Priced:
    """Every config of one depth: arrays over places P, lengths Q and widths W."""

    def __init__(
        self, space: Space, depth: int, places: list[tuple[int, ...]], lengths: Lengths, batch: int
    ) -> None:
        self.space, self.depth, self.places, self.lengths = space, depth, places, lengths
        self.batch = batch
        """Of the training memory."""
        tokens, base = lengths.tokens, space.base
        ends = np.full((len(places), tokens.shape[1]), depth)
        for row, after in zip(ends, places, strict=True):
            row[: len(after)] = np.add(after, 1)  # a block that pools sees the tokens before
        self.counts: Ints = np.diff(ends, prepend=0)
        """(P, stages + 1), how many blocks see each stage's tokens."""
        self.poolings: Ints = np.array([len(after) for after in places], np.int64)
        """(P,), how many there are."""
        enough = self.poolings[:, None] < (tokens > 0).sum(axis=1)
        first = np.arange(len(tokens)) % len(space.poolings) == 0
        self.valid: NDArray[np.bool_] = enough & ((self.poolings[:, None] > 0) | first)
        """(P, Q), whether there are enough tokens. Models without pooling count once."""
        self._widths = np.array([heads * dim for heads, dim in space.widths], float)  # (W,)
        hidden = [int(width * base.mlp_ratio + 1e-6) for width in self._widths.tolist()]
        self._hidden = np.array(hidden, float)  # (W,)
        pixels = np.array([p.size[0] * p.size[1] for p in lengths.images], float)
        self._values = pixels * base.in_chans  # (Q,)
        windows = [window(pooling[0], pooling[1]) for pooling in lengths.poolings]
        self._area = np.array([rows * cols for rows, cols in windows], float)  # (Q,)
        self._summed = self.counts @ tokens.T  # (P, Q), tokens of all blocks
        self._last = tokens[:, self.poolings].T  # (P, Q)
        self._positions = lengths.summed[:, self.poolings].T  # (P, Q), tokens of all stages
        leaving = self._positions - tokens[:, 0]
        # (P, Q), patches after each pooling, summed
        self._outputs = leaving - self.poolings[:, None] * lengths.prefix

    def choices(self, place: int, length: int, width: int) -> Choices:
        """What one entry of the arrays stands for: the arguments of `Space.config`."""
        image, pooling = self.lengths.images[length], self.lengths.poolings[length]
        return self.space.widths[width], self.depth, image, pooling, self.places[place]

    @cached_property
    def macs(self) -> Floats:
        """(P, Q, W), MACs per image."""
        base, d = self.space.base, self._widths
        squares = self.counts @ (self.lengths.tokens**2).T
        macs = (
            self._summed[:, :, None] * (4 * d * d + 2 * d * self._hidden)
            + squares[:, :, None] * (2 * d)
            + (self._values[:, None] * d + d * base.num_classes)
        )
        if base.pool == "conv":
            macs += (self._outputs * self._area)[:, :, None] * (d * d)
        return macs

    @cached_property
    def params(self) -> Floats:
        """(P, Q, W)"""
        base, d, hidden = self.space.base, self._widths, self._hidden
        patch = np.array([p.patch**2 * base.in_chans for p in self.lengths.images], float)
        blocks = self.depth * (4 * d * d + 6 * d + 2 * d * hidden + 3 * d + hidden)
        rest = (patch[:, None] + 1 + self.lengths.prefix) * d
        rest = rest + blocks + 2 * d + (d + 1) * base.num_classes
        params = self._positions[:, :, None] * d + rest
        if base.pool == "conv":
            params += self.poolings[:, None, None] * (self._area[:, None] * (d * d) + d)
        return params

    @cached_property
    def training_bytes(self) -> Floats:
        """(P, Q, W), as `training_bytes` of one config."""
        base, d, last = self.space.base, self._widths, self._last[:, :, None]
        heads = np.array([heads for heads, _ in self.space.widths], float)
        entering = self._positions - self._last
        held = (
            self._summed[:, :, None] * (8 * d + 2 * self._hidden + 4 + heads)
            + entering[:, :, None] * d
            + last * (d + 2)
            + 2 * self._values[:, None]  # the images, and their patches
        )
        if base.num_classes:
            held += d if base.head_pool == "avg" else last * d
        held *= FLOAT32
        if base.pool == "max":
            held += 8 * self._outputs[:, :, None] * d
        return ADAMW * self.params + self.batch * held


def priced(space: Space, batch: int = 1) -> Iterator[Priced]:
    """The costs of a space, one depth after another; `batch` is that of the training memory."""
    places = {depth: after for depth in space.depths if (after := space.places(depth))}
    stages = max((len(after) for options in places.values() for after in options), default=0)
    counts = Lengths(space, stages)
    for depth, options in places.items():
        yield Priced(space, depth, options, counts, batch)
