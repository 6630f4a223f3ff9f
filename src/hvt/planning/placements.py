"""A plan for upcycling: what a budget allows where a trained model keeps its width and depth."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from ..checkpoint.save_load import read
from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..upcycling.placement import describe, drop_unread_patches, placements
from ..upcycling.settings import from_dict
from ..upcycling.source import check_plain
from .answer import Frontier, Judge, Nearest, Plan, check_timed, limit

FIXED = (
    "img_size", "pool_after", "pool", "pool_dims", "pool_kernel", "pool_stride",
    "proportional_attention",
)  # fmt: skip
"""What `hvt upcycle` can be told."""
ORDER = (
    "Order: the tokens that a block sees on average, most first; which placement answers most like "
    "the source is measured by hvt upcycle on photos, and not known here."
)


def plan_source(
    source: str, budgets: dict[str, float], fixed: dict[str, Any], judge: Judge, count: int
) -> Plan:
    """The placements of `hvt upcycle` within some budgets, and the source on small images."""
    for name in fixed:
        if name not in FIXED:
            raise HVTError(
                f"{name} is the source's own where {source} is upcycled: fix one of "
                f"{', '.join(FIXED)}, or leave --from out"
            )
    fixed = from_dict(fixed).fixed  # refuses what upcycling does
    config = read(source, {}).config
    check_plain(config, source)
    if judge.latency is not None:
        check_timed(config.head_dim)
    base = config.replace(drop_path_rate=0.0)
    whole = cost(base).gflops
    known = [
        one for one in map(drop_unread_patches, placements(base, fixed)) if cost(one).gflops < whole
    ]
    if not known:
        raise HVTError(
            f"no placement with what is fixed costs less than the {whole:.3g} GFLOPs of "
            f"{Path(source).name} itself: use smaller images, or pool earlier"
        )
    nearest = Nearest(dict.fromkeys(budgets, math.inf))
    within = []
    for config in known:
        costs = judge.costs(config, budgets)
        share = max(costs[name] / limit(budgets[name]) for name in budgets)
        nearest.least = {name: min(nearest.least[name], costs[name]) for name in budgets}
        if share < nearest.ratio:
            nearest.ratio, nearest.costs = share, costs
        if share <= 1:
            within.append(config)
    if not within:
        raise nearest.refuse(budgets, f"placement of {Path(source).name}")
    within.sort(key=_kept, reverse=True)
    rival = max(filter(judge.fits(budgets), _whole(base, known)), key=_size, default=None)
    return Plan(
        budgets=budgets,
        fixed=fixed,
        best=[judge.choice(describe(config), config) for config in _spread(within, count)],
        ways=[],
        deit=None if rival is None else judge.choice("whole", rival),
        configurations=len(known),
        within=len(within),
        order=ORDER,
        frontier=Frontier([], []),
        train_batch=judge.train_batch,
        source=source,
        source_gflops=whole,
        machine={} if judge.latency is None else judge.latency.machine,
    )


def _kept(config: HVTConfig) -> float:
    """Log of the tokens that a block sees, on average over the blocks."""
    return statistics.fmean(math.log(seen) for seen, _ in cost(config).blocks())


def _whole(base: HVTConfig, known: list[HVTConfig]) -> list[HVTConfig]:
    """The source itself at its own image size and at each smaller one."""
    sizes = {base.image} | {one.image for one in known if one.image <= base.image}
    return [base.replace(img_size=size) for size in sorted(sizes)]


def _size(config: HVTConfig) -> tuple[int, int]:
    return config.image


def _spread(configs: list[HVTConfig], count: int) -> list[HVTConfig]:
    """The first of each image size and pooling, so that few of them are alike."""
    chosen: dict[tuple[Any, ...], HVTConfig] = {}
    for config in configs:
        chosen.setdefault((config.image, config.pool_dims, config.pool_stride), config)
        if len(chosen) == count:
            break
    return list(chosen.values())
