"""The latency of a config: the sum over its layers, by a table of block timings of one machine.

A least-squares fit explains the time of a block by its MACs, weights and activations. How much
longer each timed block took than fitted is interpolated between them. `timings.py` measures.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig
from ..costs import cost
from .price import Priced
from .space import Space

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LatencyTable:
    """The timings of one machine, mode, number of threads and batch size, in seconds per batch."""

    machine: dict[str, Any]
    """What was timed where and when, with the `spread` of the calls."""
    points: list[tuple[int, int, float]]
    """Tokens, width and the time of a block."""
    overhead: float
    """Of a call, whatever the model."""
    patches: tuple[float, float]
    """Per MAC of the patch embedding, and per value of the image."""
    pools: dict[str, tuple[float, float]]
    """By dimensions: per pooling, and per value that is pooled."""
    anchor: float
    """The time of one model, which is timed again before the table is used again."""

    @cached_property
    def _base(self) -> Floats:
        """The weight of each of the `_parts` of a block's time."""
        parts = np.array([_parts(n, d) for n, d, _ in self.points])
        seconds = np.array([time for *_, time in self.points])
        return nonnegative_lstsq(parts / seconds[:, None], np.ones(len(seconds)))

    @cached_property
    def _residuals(self) -> tuple[Floats, Floats, Floats]:
        """Logarithms of tokens (N,), of widths (W,) and of measured over fitted times (N, W).

        A point that was not timed takes as long as fitted.
        """
        tokens = sorted({n for n, _, _ in self.points})
        widths = sorted({d for _, d, _ in self.points})
        ratios = np.zeros((len(tokens), len(widths)))
        for n, d, seconds in self.points:
            fitted = float(_parts(n, d) @ self._base)
            ratios[tokens.index(n), widths.index(d)] = math.log(seconds / fitted)
        return np.log(tokens), np.log(widths), ratios

    @cached_property
    def _per_weight(self) -> float:
        """Of a weight of the classifier, which sees one token: as in the blocks' linear layers."""
        return float(self._base[1] * 1e-6 / 12 + self._base[2] * 1e-9)

    def block(self, tokens: Any, width: Any, mlp_ratio: float = 4.0) -> Any:
        """Seconds of a block, by numbers or arrays that broadcast.

        Blocks are timed at an MLP ratio of 4; the residuals are taken to hold for other ratios too.
        """
        n, d = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(width, float))
        fitted = np.moveaxis(_parts(n, d, mlp_ratio), 0, -1) @ self._base
        tokens, widths, ratios = self._residuals
        rows, columns = _nearness(tokens, np.log(n)), _nearness(widths, np.log(d))
        return fitted * np.exp(np.einsum("...i,ij,...j", rows, ratios, columns))

    def seconds(self, config: HVTConfig) -> float:
        """The time of a batch."""
        total, width = self.overhead + self.patch_embedding(config), config.width
        for layer in cost(config).layers:
            if layer.name.endswith(".attn"):
                total += float(self.block(layer.tokens_in, width, config.mlp_ratio))
            elif layer.name.endswith(".pool"):
                once, each = self.pools[str(config.pool_dims)]
                total += once + each * layer.tokens_in * width
            elif layer.name == "head":
                total += self._per_weight * layer.macs
        return total

    def patch_embedding(self, config: HVTConfig) -> float:
        return float(np.dot(self.patches, patch_terms(config)))

    def of_space(self, one: Priced, space: Space) -> Floats:
        """`seconds` of all configs of a depth, (P, Q, W)."""
        widths = np.array([heads * dim for heads, dim in space.widths])
        lengths = one.lengths
        tokens = np.maximum(lengths.tokens, 1)[:, :, None]
        blocks = self.block(tokens, widths, space.base.mlp_ratio)  # (Q, stages, W)
        total = np.einsum("ps,qsw->pqw", one.counts, blocks)
        pixels = np.array([p.size[0] * p.size[1] for p in lengths.images]) * space.base.in_chans
        total += self.overhead + pixels[:, None] * (self.patches[0] * widths + self.patches[1])
        total += self._per_weight * widths * space.base.num_classes
        pools = np.array([self.pools[str(pooling[0])] for pooling in lengths.poolings])  # (Q, 2)
        entering = (lengths.summed - lengths.tokens)[:, one.poolings].T  # (P, Q)
        total += one.poolings[:, None, None] * pools[:, 0, None]
        return total + (entering * pools[:, 1])[:, :, None] * widths


def provenance(machine: dict[str, Any]) -> str:
    """Which timings a latency comes from, and how much their calls vary."""
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    return (
        f"timings of {machine['date']} on {where}, threads {machine['threads']}, "
        f"{machine['mode']} at batch {machine['batch']}, spread {machine['spread']:.0%}"
    )


def patch_terms(config: HVTConfig) -> tuple[float, float]:
    """MACs of the patch embedding, and values of the image."""
    height, width = config.image
    return float(cost(config).layers[0].macs), float(config.in_chans * height * width)


def _parts(tokens: Any, width: Any, mlp_ratio: float = 4.0) -> Any:
    """What a block's time is made of: a constant, weights, linear layers, attention, activations.

    Weights and linear layers are 4 d² of the attention and 2 d² times the ratio of the MLP.
    """
    n, d = np.asarray(tokens, float), np.asarray(width, float)
    linear = d * d * (4 + 2 * mlp_ratio) / 12
    macs, attention = 12e-9 * n * linear, 2e-9 * n * n * d
    return np.stack([np.ones_like(n), 1e-6 * linear, macs, attention, 1e-6 * n * d])


def nonnegative_lstsq(x: Floats, y: Floats) -> Floats:
    """Least squares without negative weights: the best subset of columns, of which there are few.

    scipy's `nnls` does this too, but the package does not depend on scipy.
    """
    scale = x.max(axis=0)
    best, error = np.zeros(x.shape[1]), math.inf
    for chosen in itertools.product((False, True), repeat=x.shape[1]):
        mask = np.array(chosen)
        weights = np.linalg.lstsq(x[:, mask] / scale[mask], y, rcond=None)[0]
        squares = float(np.square(x[:, mask] / scale[mask] @ weights - y).sum())
        if (weights >= 0).all() and squares < error:
            best = np.zeros(x.shape[1])
            best[mask], error = weights / scale[mask], squares
    return best


def _nearness(edges: Floats, values: Floats) -> Floats:
    """Linear interpolation, constant outside: the weight of each edge for each value."""
    return np.stack([np.interp(values, edges, one) for one in np.eye(len(edges))], axis=-1)
