"""A plan for upcycling: what a budget allows where a trained model keeps its width and depth."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.save_load import read
from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..upcycling.placement import describe, drop_unread_patches, placements
from ..upcycling.settings import PLACEMENT, from_dict
from ..upcycling.source import check_plain
from .budget import Budgets
from .latency import check_timed
from .result import Estimator, Plan

ORDER = (
    "Order: by the number of tokens that a block sees on average. Which placement agrees most with "
    "the source is measured by hvt upcycle on photos."
)


def plan_source(
    source: str, budgets: Budgets, fixed: dict[str, Any], estimator: Estimator, count: int
) -> Plan:
    """The placements of `hvt upcycle` within some budgets, and the source on smaller images."""
    for name in fixed:
        if name not in PLACEMENT:
            raise HVTError(
                f"{name} is the source's own where {source} is upcycled: fix one of "
                f"{', '.join(PLACEMENT)}, or leave --from out"
            )
    fixed = from_dict(fixed).fixed
    config = read(source, {}).config
    check_plain(config, source)
    if estimator.latency is not None:
        check_timed(config.head_dim)
    base = config.replace(drop_path_rate=0.0)
    whole = cost(base).gflops
    known = [
        one for one in map(drop_unread_patches, placements(base, fixed)) if cost(one).gflops < whole
    ]
    if not known:
        raise HVTError(
            f"no placement with the fixed fields costs less than the {whole:.3g} GFLOPs of "
            f"{Path(source).name} itself: use smaller images, or pool earlier"
        )
    costs = [estimator.costs(config) for config in known]
    usage = budgets.usage({n: np.array([one[n] for one in costs]) for n in budgets.limits})
    within = [config for config, used in zip(known, usage, strict=True) if used <= 1]
    if not within:
        raise budgets.error(f"placement of {Path(source).name}")
    within.sort(key=_mean_log_tokens, reverse=True)
    sizes = sorted({base.image} | {one.image for one in known if one.image <= base.image})
    smaller = [base.replace(img_size=size) for size in sizes]
    unpooled = [config for config in smaller if budgets.fits(estimator.costs(config))]
    return Plan(
        budgets=budgets.limits,
        fixed=fixed,
        best=[estimator.choice(describe(config), config) for config in _spread(within, count)],
        baseline=estimator.choice("unpooled", unpooled[-1]) if unpooled else None,
        num_configs=len(known),
        num_within=len(within),
        order=ORDER,
        train_batch=estimator.train_batch,
        source=source,
        source_gflops=whole,
        machine={} if estimator.latency is None else estimator.latency.machine,
    )


def _mean_log_tokens(config: HVTConfig) -> float:
    """The logarithm of the tokens that a block sees, on average over the blocks."""
    return statistics.fmean(math.log(seen) for seen, _ in cost(config).blocks())


def _spread(configs: list[HVTConfig], count: int) -> list[HVTConfig]:
    """The first of each image size and pooling, so that few of them are alike."""
    chosen: dict[tuple[Any, ...], HVTConfig] = {}
    for config in configs:
        chosen.setdefault((config.image, config.pool_dims, config.pool_stride), config)
    return list(chosen.values())[:count]
