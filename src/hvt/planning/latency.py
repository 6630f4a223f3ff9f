"""How long a config takes: a table of block timings, taken once on a machine, and its sum.

A few small models are timed in turns, as `hvt bench` times them and in the same modes: blocks at
several lengths and widths, and what patches and poolings add. A first fit takes a block's time as
its multiply-adds and elements have it; the table has how much longer each point took than that,
which is interpolated between them. The time of a model is the sum over its layers.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..bench.contenders import contender_of
from ..bench.measure import describe, interleaved
from ..config import HVTConfig
from ..costs import cost
from ..model import HVT
from .price import Priced
from .space import Space, head_dim_of

WIDTHS = (32, 64, 192, 384, 768)
ROWS = (2, 4, 7, 14, 20, 28)
"""Rows of patches: 4, 16, 49, 196, 400 and 784 tokens."""
DEPTH, DEEP = 3, 12
FEW, FEW_DEPTH = 49, 6
"""Blocks of few tokens wait for their weights, which a short model would keep in the cache."""
ROUNDS, LEAST = 9, 0.08  # turns of each model, and seconds of a turn
SLOW = 0.6
"""Seconds of a call above which no larger model is timed; the table ends there."""
VERSION = 6
"""Of what is timed and how; a table of another version is taken anew."""

Floats = NDArray[np.float64]
Case = tuple[Any, ...]
"""What a model of the table is for, and its size."""


@dataclass(frozen=True)
class Latency:
    """The timings of one machine, mode, number of threads and batch size, in seconds of a batch."""

    machine: dict[str, Any]
    points: list[tuple[int, int, float]]
    """Tokens, width and the time of a block."""
    start: float
    """Of a call, whatever the model."""
    patches: tuple[float, float]
    """Of a multiply-add of the patch embedding, and of a value of the image."""
    pools: dict[str, tuple[float, float]]
    """By dimensions: of a pooling, and of a value that is pooled."""

    @cached_property
    def _base(self) -> Floats:
        """What a block's time is made of, fitted with no negative part: see `_parts`."""
        parts = np.array([_parts(n, d) for n, d, _ in self.points])
        seconds = np.array([time for *_, time in self.points])
        return _nonnegative(parts / seconds[:, None], np.ones(len(seconds)))

    @cached_property
    def _table(self) -> tuple[Floats, Floats, Floats]:
        """The logarithms of tokens and widths, and of how much longer each point took than fitted.

        A point that was too slow to be timed has the ratio of the next shorter one.
        """
        tokens = sorted({n for n, _, _ in self.points})
        widths = sorted({d for _, d, _ in self.points})
        ratios = np.full((len(tokens), len(widths)), np.nan)
        for n, d, seconds in self.points:
            fitted = float(_parts(n, d) @ self._base)
            ratios[tokens.index(n), widths.index(d)] = math.log(seconds / fitted)
        for column in range(len(widths)):
            for row in range(1, len(tokens)):
                if np.isnan(ratios[row, column]):
                    ratios[row, column] = ratios[row - 1, column]
        for column in range(1, len(widths)):
            missing = np.isnan(ratios[:, column])
            ratios[missing, column] = ratios[missing, column - 1]
        return np.log(tokens), np.log(widths), ratios

    @cached_property
    def _per_weight(self) -> float:
        """Of a weight of the classifier, which sees one token: as of the blocks' linear layers.

        The ten classes of the table's models are in `start`, and too few to be taken out of it.
        """
        return float(self._base[1] * 1e-6 / 12 + self._base[2] * 1e-9)

    def block(self, tokens: Any, width: Any, mlp_ratio: float = 4.0) -> Any:
        """Seconds of a block, by numbers or arrays that broadcast.

        The table has blocks of a ratio of 4: how much longer they took than fitted is taken for
        that of other ratios too.
        """
        n, d = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(width, float))
        fitted = np.moveaxis(_parts(n, d, mlp_ratio), 0, -1) @ self._base
        return fitted * np.exp(_interpolate(*self._table, np.log(n), np.log(d)))

    def seconds(self, config: HVTConfig) -> float:
        """The time that a batch takes, by the sum over the layers."""
        total, width = self.start, config.width
        for layer in cost(config).layers:
            if layer.name == "patch_embed":
                height, columns = config.image
                total += self.patches[0] * layer.macs
                total += self.patches[1] * config.in_chans * height * columns
            elif layer.name.endswith(".attn"):
                total += float(self.block(layer.tokens_in, width, config.mlp_ratio))
            elif layer.name.endswith(".pool"):
                once, each = self.pools[str(config.pool_dims)]
                total += once + each * layer.tokens_in * width
            elif layer.name == "head":
                total += self._per_weight * layer.macs
        return total

    def of_space(self, one: Priced, space: Space) -> Floats:
        """The same for all configs of a depth, (P, Q, W)."""
        widths = np.array([heads * dim for heads, dim in space.widths])
        lengths = one.lengths
        tokens = np.maximum(lengths.tokens, 1)[:, :, None]
        blocks = self.block(tokens, widths, space.base.mlp_ratio)  # (Q, stages, W)
        total = np.einsum("ps,qsw->pqw", one.counts, blocks)
        pixels = np.array([p.size[0] * p.size[1] for p in lengths.images]) * space.base.in_chans
        total += self.start + pixels[:, None] * (self.patches[0] * widths + self.patches[1])
        total += self._per_weight * widths * space.base.num_classes
        pools = np.array([self.pools[str(pooling[0])] for pooling in lengths.poolings])  # (Q, 2)
        entering = (lengths.summed - lengths.tokens)[:, one.poolings].T  # (P, Q)
        total += one.poolings[:, None, None] * pools[:, 0, None]
        return total + (entering * pools[:, 1])[:, :, None] * widths


def _parts(tokens: Any, width: Any, mlp_ratio: float = 4.0) -> Any:
    """What a block's time follows: nothing, weights, linear layers, attention, activations.

    Weights and linear layers are 4 d² of the attention and 2 d² times the ratio of the MLP.
    """
    n, d = np.asarray(tokens, float), np.asarray(width, float)
    linear = d * d * (4 + 2 * mlp_ratio) / 12
    macs, attention = 12e-9 * n * linear, 2e-9 * n * n * d
    return np.stack([np.ones_like(n), 1e-6 * linear, macs, attention, 1e-6 * n * d])


def _nonnegative(x: Floats, y: Floats) -> Floats:
    """Least squares without negative weights: the best over all subsets, of which there are few."""
    best, error = np.zeros(x.shape[1]), math.inf
    for count in range(1, x.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(x.shape[1]), count)):
            weights = np.linalg.lstsq(x[:, subset], y, rcond=None)[0]
            missed = float(np.square(x[:, subset] @ weights - y).sum())
            if (weights >= 0).all() and missed < error:
                best = np.zeros(x.shape[1])
                best[subset], error = weights, missed
    return best


def _interpolate(rows: Floats, columns: Floats, table: Floats, r: Floats, c: Floats) -> Floats:
    """Bilinear between the table's points, the nearest edge outside of them."""
    i, u = _cell(rows, r)
    j, v = _cell(columns, c)
    upper = table[i, j] * (1 - v) + table[i, np.minimum(j + 1, len(columns) - 1)] * v
    below = np.minimum(i + 1, len(rows) - 1)
    lower = table[below, j] * (1 - v) + table[below, np.minimum(j + 1, len(columns) - 1)] * v
    return upper * (1 - u) + lower * u


def _cell(edges: Floats, values: Floats) -> tuple[Any, Floats]:
    """The edge before each value, and how far it is to the next."""
    if len(edges) == 1:
        return np.zeros(values.shape, int), np.zeros(values.shape)
    at = np.clip(np.searchsorted(edges, values) - 1, 0, len(edges) - 2)
    return at, np.clip((values - edges[at]) / (edges[at + 1] - edges[at]), 0, 1)


# ── taking the table ────────────────────────────────────────────────────────────────────────────


def points_of(mode: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths and rows of a table; fewer where each model must be exported, which takes seconds."""
    return WIDTHS, ROWS if mode == "eager" else (ROWS[0], *ROWS[2:])


def by_cost(widths: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens and width of every block of a table, the cheapest first."""
    points = [(n * n, width) for n, width in itertools.product(rows, widths)]
    return sorted(points, key=lambda point: point[0] * point[1] ** 2)


def needed(widths: Sequence[int], rows: Sequence[int]) -> set[tuple[int, int]]:
    """Those that are timed at two depths, and so however slow they are."""
    least, middle = min(rows) ** 2, rows[len(rows) // 2] ** 2
    first, wide = min(widths), sorted(widths)[len(widths) // 2]
    return {(least, first), (least, wide), (middle, first)}


def measure(
    mode: str,
    device: torch.device,
    batch: int,
    *,
    widths: Sequence[int] = WIDTHS,
    rows: Sequence[int] = ROWS,
    rounds: int | None = None,
    beside: Mapping[str, HVTConfig] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[Latency, dict[str, float]]:
    """Time the models of the table in turns, and with them some configs `beside` it, in seconds."""
    cases, always = _cases(widths, rows), needed(widths, rows)
    cases |= {("beside", name): config for name, config in (beside or {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[Case, Callable[[], object]] = {}
        slow = False
        for number, (case, config) in enumerate(cases.items(), 1):
            if slow and case[0] == "block" and case[1:] not in always:
                continue
            note(f"preparing model {number} of {len(cases)}")
            model = HVT(config).eval()
            run = contender_of(str(number), model, mode, device, Path(folder)).call(batch, device)
            run()
            times: dict[int, list[float]] = {}
            interleaved({0: run}, device, 0, 0.0, times)
            slow = slow or times[0][0] > SLOW
            runs[case] = run
        taken: dict[Case, list[float]] = {}
        rounds = ROUNDS if rounds is None else rounds
        for turn in range(rounds):
            note(f"round {turn + 1} of {rounds}")
            interleaved(runs, device, turn, LEAST, taken)
    medians = {case: statistics.median(seconds) for case, seconds in taken.items()}
    others = {str(case[1]): t for case, t in medians.items() if case[0] == "beside"}
    return _solve(medians, cases, machine_of(device, mode, batch)), others


def _cases(widths: Sequence[int], rows: Sequence[int]) -> dict[Case, HVTConfig]:
    """The models of a table."""
    cases: dict[Case, HVTConfig] = {
        ("block", tokens, width): _config(
            math.isqrt(tokens), width, depth=FEW_DEPTH if tokens <= FEW else DEPTH
        )
        for tokens, width in by_cost(widths, rows)
    }
    for tokens, width in needed(widths, rows):
        cases["deep", tokens, width] = _config(math.isqrt(tokens), width, depth=DEEP)
    middle = rows[len(rows) // 2]
    for width in (min(widths), sorted(widths)[len(widths) // 2]):
        cases["patches", width] = _config(middle, width, patch=32, depth=1)
        for dims in (1, 2):
            cases["pool", dims, width] = _config(middle, width, dims=dims)
    return cases


def _config(
    rows: int, width: int, *, patch: int = 4, depth: int = DEPTH, dims: int | None = None
) -> HVTConfig:
    """A model of the table; with `dims` it pools after every block, in steps of one token."""
    dim = head_dim_of(width)
    values: dict[str, Any] = {
        "img_size": rows * patch, "patch_size": patch, "num_heads": width // dim, "head_dim": dim,
        "depth": depth, "num_classes": 10, "drop_path_rate": 0.0,
    }  # fmt: skip
    if dims is None:
        return HVTConfig(**values, stages=0)
    kernel = min(3, rows)
    return HVTConfig(
        **values, pool_after=tuple(range(depth)), pool_dims=dims, pool_kernel=kernel, pool_stride=1
    )


def _solve(
    times: dict[Case, float],
    cases: dict[Case, HVTConfig],
    machine: dict[str, Any],
) -> Latency:
    """From the models' times to those of their layers."""
    blocks: dict[Case, float] = {case[1:]: t for case, t in times.items() if case[0] == "block"}
    depths = {case[1:]: config.depth for case, config in cases.items() if case[0] == "block"}
    lefts = []
    for case, t in times.items():
        if case[0] == "deep":  # what is left without the blocks that both have is no block's
            depth, short = depths[case[1:]], blocks[case[1:]]
            lefts.append(short - depth * (t - short) / (DEEP - depth))
    start = max(0.0, statistics.median(lefts))
    widths = sorted({case[1] for case in cases if case[0] == "patches"})
    patches = (0.0, 0.0)
    for _ in range(3):  # the blocks' times need the patches', and these the blocks'
        points = [
            (n, d, max(t - start - _embedding(patches, cases["block", n, d]), t / 4) / depths[n, d])
            for (n, d), t in sorted(blocks.items())
        ]
        table = Latency(machine, points, start, patches, {})
        # Two widths have the same image and other multiply-adds.
        rows, values = [], []
        for width in widths:
            config = cases["patches", width]
            rest = times["patches", width] - start - float(table.block(config.tokens[0], width))
            rows.append([float(cost(config).layers[0].macs), _values(config)])
            values.append(max(rest, 0.0))
        scale = np.array(rows).max(axis=0)
        patches = tuple((_nonnegative(np.array(rows) / scale, np.array(values)) / scale).tolist())
    pools = {}
    for dims in (1, 2):
        rows, values = [], []
        for width in widths:
            config = cases["pool", dims, width]
            tokens = config.tokens[:DEPTH]
            alone = start + _embedding(patches, config)
            alone += sum(float(table.block(n, width)) for n in tokens)
            rows.append([float(DEPTH), float(sum(tokens) * width)])
            values.append(max(times["pool", dims, width] - alone, 0.0))
        scale = np.array(rows).max(axis=0)
        solved = _nonnegative(np.array(rows) / scale, np.array(values)) / scale
        pools[str(dims)] = (float(solved[0]), float(solved[1]))
    return Latency(machine, points, start, (float(patches[0]), float(patches[1])), pools)


def _embedding(patches: tuple[float, ...], config: HVTConfig) -> float:
    return patches[0] * cost(config).layers[0].macs + patches[1] * _values(config)


def _values(config: HVTConfig) -> float:
    height, width = config.image
    return float(config.in_chans * height * width)


def machine_of(device: torch.device, mode: str, batch: int) -> dict[str, Any]:
    """What the timings depend on, and the day."""
    return describe(device) | {"mode": mode, "batch": batch, "table": VERSION}
