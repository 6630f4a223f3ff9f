"""The best configs of the whole space within some budgets."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig
from .baselines import deit, scaled_up
from .budget import Budgets
from .price import Priced, priced
from .quality import Quality, load_quality
from .result import Estimator, Plan
from .space import WINDOWS, Choices, Space, even

MIN_USAGE = 0.8
"""The share of some budget that the best configs spend at least, if any config does."""
POOL = 400
"""Best configs of a depth that are compared with those of the other depths."""
RESOLUTION = 0.5
"""Points of the regression's score within which configs are ties; its error is larger."""
PRICES = {"gflops": ("macs", 1e9), "params": ("params", 1e6), "memory": ("training_bytes", 1e6)}
"""What a budget bounds, in its unit."""

Floats = NDArray[np.float64]
Ranked = tuple[tuple[float, ...], Choices]
"""The keys by which the best is first, and a config that is not built yet: that is slow."""


def plan_space(space: Space, budgets: Budgets, estimator: Estimator, count: int) -> Plan:
    """Price every config, and keep the best that differ from each other."""
    quality = load_quality()
    ranked: list[Ranked] = []
    num_configs = num_within = 0
    for one in priced(space, estimator.train_batch):
        valid = one.valid[:, :, None]
        costs: dict[str, Floats] = {
            name: getattr(one, attribute) / unit
            for name, (attribute, unit) in PRICES.items()
            if name in budgets.limits
        }
        if estimator.latency is not None:
            costs["latency_ms"] = 1e3 * estimator.latency.of_space(one, space)
        usage = budgets.usage(costs, valid)
        num_configs += int(valid.sum()) * len(space.widths)
        num_within += int((usage <= 1).sum())
        ranked += _leaders(one, usage, scores_of(one, space, quality))
    if not ranked:
        raise budgets.error()
    best = _distinct(sorted(ranked, key=lambda one: one[0]), count)

    def fits(config: HVTConfig) -> bool:
        return budgets.fits(estimator.costs(config))

    baseline = deit(space, fits)
    choices = [estimator.choice(str(n), space.config(*one)) for n, one in enumerate(best, 1)]
    return Plan(
        budgets=budgets.limits,
        fixed=space.fixed,
        best=choices,
        scaled=[estimator.choice(name, one) for name, one in scaled_up(space, fits).items()],
        baseline=estimator.choice("DeiT", baseline) if baseline else None,
        num_configs=num_configs,
        num_within=num_within,
        order=quality.summary(),
        extrapolated=any(choice.gflops > quality.max_gflops for choice in choices),
        train_batch=estimator.train_batch,
        machine={} if estimator.latency is None else estimator.latency.machine,
    )


def _leaders(one: Priced, usage: Floats, scores: Floats) -> list[Ranked]:
    """The best configs of one depth: those that spend the budget first, then by score.

    Among ties, configs closer to the paper's pooling and patches come first, and then those that
    spend more.
    """
    spends = (usage >= MIN_USAGE) & (usage <= 1)
    wasteful = 0.0 if spends.any() else 1.0
    found = np.flatnonzero(usage <= 1 if wasteful else spends)
    level = np.round(scores.flat[found] / RESOLUTION)
    if len(found) > POOL:  # sort only the levels that can be among the leaders
        high = level >= np.partition(level, -POOL)[-POOL]
        found, level = found[high], level[high]
    p, q, w = np.unravel_index(found, scores.shape)
    lengths = one.lengths
    uneven = [after != even(one.depth, max(1, len(after)))[: len(after)] for after in one.places]
    unlike_paper = [
        (pooling[1:] != WINDOWS[pooling[0]][0]) + (image.patch != 16)
        for image, pooling in zip(lengths.images, lengths.poolings, strict=True)
    ]
    unusual = np.array(unlike_paper, int)[q] + np.array(uneven, int)[p]
    keys = np.stack([np.full(len(found), wasteful), -level, unusual, -usage.flat[found]], axis=1)
    return [
        (tuple(keys[at].tolist()), one.choices(p[at], q[at], w[at]))
        for at in np.lexsort(keys.T[::-1])[:POOL]
    ]


def scores_of(one: Priced, space: Space, quality: Quality) -> Floats:
    """The score of all configs of a depth, (P, Q, W)."""
    logs, base = one.lengths.logs, space.base
    mean = one.counts @ logs.T / one.depth  # (P, Q), of the blocks' log patches
    pools = one.poolings[:, None, None] > 0
    grid = np.array([pooling[0] == 2 for pooling in one.lengths.poolings])
    measures = {
        "width": np.log([heads * dim for heads, dim in space.widths]),
        "depth": np.array(math.log(one.depth)),
        "patches": logs[None, :, :1],
        "pooled": (logs[:, 0] - mean)[:, :, None],
    }
    flags = {
        "grid": pools & grid[None, :, None],
        "class_token": float(base.class_token),
        "average": pools * float(base.pool == "avg"),
        "convolution": pools * float(base.pool == "conv"),
    }
    return np.asarray(quality.score(measures, flags), dtype=np.float64)


def _distinct(ranked: list[Ranked], count: int) -> list[Choices]:
    """The first ones that differ from each before them in two respects.

    These are width and depth to a factor of √2, patches, stages and dimensions of the pooling.
    """
    chosen: dict[tuple[object, ...], Choices] = {}
    for _, choices in ranked:
        (heads, dim), depth, image, pooling, after = choices
        width, blocks = round(2 * math.log2(heads * dim)), round(2 * math.log2(depth))
        shape = (width, blocks, image.grid, len(after), pooling[0])
        differing = [sum(a != b for a, b in zip(one, shape, strict=True)) for one in chosen]
        if all(number >= 2 for number in differing):
            chosen[shape] = choices
        if len(chosen) == count:
            break
    return list(chosen.values())
