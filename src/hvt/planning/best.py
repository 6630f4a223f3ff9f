"""The best of the whole space within some budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import HVTConfig
from .answer import Frontier, Judge, Nearest, Plan, limit
from .price import Priced, priced
from .quality import Quality
from .rivals import deit, paper_ways
from .space import WINDOWS, Space, even

NEAR = 0.8
"""The share of some budget that a config spends at least, where there are any such."""
POOL = 400
"""Best configs of a depth that go on to be compared with those of the others."""
STEP = 0.5
"""Points of the regression's score below which two configs are equal; its error is larger."""
BINS = 60
"""Steps of the frontier, which is drawn over a factor of 100 below the budget."""

Bools = NDArray[np.bool_]


def plan_space(space: Space, budgets: dict[str, float], judge: Judge, count: int) -> Plan:
    """Price every config, and keep the best that differ from each other."""
    nearest = Nearest(dict.fromkeys(budgets, math.inf))
    steps = np.full(BINS, -np.inf)
    top = budgets.get("gflops")
    if top is None:
        top = max(float(one.macs.max()) for one in priced(space)) / 1e9
    edges = np.geomspace(top / 100, limit(top), BINS)
    entries: list[Entry] = []
    configurations = within = 0
    for one in priced(space, judge.train_batch):
        costs = _costs(one, space, budgets, judge)
        scores = _scores(one, space, judge.quality)
        valid = np.broadcast_to(one.valid[:, :, None], scores.shape)
        shares = {name: values / limit(budgets[name]) for name, values in costs.items()}
        others = [share <= 1 for name, share in shares.items() if name != "gflops"]
        free = np.logical_and.reduce([valid, *others])
        _widen(steps, edges, one.macs[free] / 1e9, scores[free])
        spent_share = np.maximum.reduce(list(shares.values()))
        _approach(nearest, costs, spent_share, valid)
        fits = valid & (spent_share <= 1)
        configurations, within = configurations + int(valid.sum()), within + int(fits.sum())
        entries += _leaders(one, space, fits, scores, spent_share)
    if not entries:
        raise nearest.refuse(budgets)
    entries.sort(key=lambda entry: entry.order)
    fits_budgets = judge.fits(budgets)
    rival = deit(space, fits_budgets)
    ways = paper_ways(space, fits_budgets)
    return Plan(
        budgets=budgets,
        fixed=space.fixed,
        best=[
            judge.choice(str(number), entry.config(space))
            for number, entry in enumerate(_different(entries, space, count), 1)
        ],
        ways=[judge.choice(name, config) for name, config in ways.items()],
        deit=judge.choice("DeiT", rival) if rival else None,
        configurations=configurations,
        within=within,
        order=judge.quality.summary(),
        frontier=_frontier(steps, edges),
        train_batch=judge.train_batch,
        machine={} if judge.latency is None else judge.latency.machine,
    )


@dataclass(frozen=True)
class Entry:
    """A config by its place in the arrays, for building one takes as long as pricing a thousand."""

    order: tuple[float, ...]
    priced: Priced
    place: int
    length: int
    width: int

    def config(self, space: Space) -> HVTConfig:
        lengths = self.priced.lengths
        return space.config(
            space.widths[self.width], self.priced.depth, lengths.images[self.length],
            lengths.poolings[self.length], self.priced.places[self.place],
        )  # fmt: skip

    def shape(self, space: Space) -> tuple[object, ...]:
        """Width and depth to a factor of √2, patches, stages and dimensions of the pooling."""
        heads, dim = space.widths[self.width]
        lengths = self.priced.lengths
        return (
            round(2 * math.log2(heads * dim)), round(2 * math.log2(self.priced.depth)),
            lengths.images[self.length].grid, len(self.priced.places[self.place]),
            lengths.poolings[self.length][0],
        )  # fmt: skip


def _leaders(one: Priced, space: Space, fits: Bools, scores: Any, spent_share: Any) -> list[Entry]:
    """The best configs of one depth: those that spend the budget first.

    Scores within `STEP` are equal, for the regression does not know better: what is closer to the
    paper's pooling and patches is first then, and what spends more.
    """
    places = np.flatnonzero(fits)
    if not len(places):
        return []
    near = spent_share.flat[places] >= NEAR
    if near.any():
        places = places[near]
    level = np.round(scores.flat[places] / STEP)
    if len(places) > POOL:  # of which only the best levels can be among the leaders
        places = places[level >= np.partition(level, -POOL)[-POOL]]
        level = np.round(scores.flat[places] / STEP)
    p, q, w = np.unravel_index(places, scores.shape)
    evenly = [
        tuple(after) == even(one.depth, max(1, len(after)))[: len(after)] for after in one.places
    ]
    lengths = one.lengths
    usual = [
        (pooling[1:] != WINDOWS[pooling[0]][0]) + (image.patch != 16)
        for image, pooling in zip(lengths.images, lengths.poolings, strict=True)
    ]
    unusual = np.array(usual)[q] + ~np.array(evenly)[p]
    poor = 0.0 if near.any() else 1.0
    order = np.lexsort((-spent_share.flat[places], unusual, -level))[:POOL]
    return [
        Entry(
            (poor, -float(level[at]), float(unusual[at]), -float(spent_share.flat[places[at]])),
            one, int(p[at]), int(q[at]), int(w[at]),
        )
        for at in order
    ]  # fmt: skip


def _costs(
    one: Priced, space: Space, budgets: Mapping[str, float], judge: Judge
) -> dict[str, NDArray[np.float64]]:
    """Each bounded cost, (P, Q, W), in the budget's unit."""
    values: dict[str, Any] = {
        "gflops": lambda: one.macs / 1e9,
        "params": lambda: one.params / 1e6,
        "memory": lambda: one.training_bytes / 1e6,
        "latency_ms": lambda: 1e3 * judge.latency.of_space(one, space),  # type: ignore[union-attr]
    }
    return {name: values[name]() for name in budgets}


def _scores(one: Priced, space: Space, quality: Quality) -> NDArray[np.float64]:
    """(P, Q, W) by the regression."""
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


def _approach(
    nearest: Nearest, costs: dict[str, NDArray[np.float64]], shares: Any, valid: Bools
) -> None:
    """Remember the least of each cost, and what misses the budgets by least."""
    for name, values in costs.items():
        nearest.least[name] = min(
            nearest.least[name], float(values.min(where=valid, initial=math.inf))
        )
    worst = np.where(valid, shares, np.inf)
    at = int(worst.argmin())
    if worst.flat[at] < nearest.ratio:
        nearest.ratio = float(worst.flat[at])
        nearest.costs = {name: float(values.flat[at]) for name, values in costs.items()}


def _different(entries: list[Entry], space: Space, count: int) -> list[Entry]:
    """The first ones that differ from each before them in two respects."""
    chosen: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        shape = entry.shape(space)
        differs = [sum(a != b for a, b in zip(one, shape, strict=True)) for one in chosen]
        if all(number >= 2 for number in differs):
            chosen[shape] = entry
        if len(chosen) == count:
            break
    return list(chosen.values())


# ── the frontier ────────────────────────────────────────────────────────────────────────────────


def _widen(steps: Any, edges: Any, gflops: Any, scores: Any) -> None:
    """Raise each step of the frontier to the best score that costs no more than it."""
    bins = np.searchsorted(edges, gflops)
    inside = bins < BINS
    np.maximum.at(steps, bins[inside], scores[inside])


def _frontier(steps: Any, edges: Any) -> Frontier:
    best = np.maximum.accumulate(steps)
    seen = np.isfinite(best)
    return Frontier(edges[seen].tolist(), best[seen].tolist())
