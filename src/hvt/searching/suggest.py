"""A trial's config: its shape as Optuna suggests it, and as wide as its share of the budget allows.

The width is chosen last: the largest within the trial's share of the budget. So every trial is
within the budget, and spends what was suggested.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..planning.budget import Budgets, tolerance
from ..planning.price import priced
from ..planning.quality import flags_of, load_quality, measures_of
from ..planning.space import (
    DEPTHS,
    KEPT,
    MAX_STAGES,
    ImageSpec,
    Pooling,
    Space,
    lengths,
    space_of,
)
from .study import import_optuna

MIN_SPENT = 0.5
"""The smallest share of the budget that a trial is given."""
SCALES = (0.75, 1.0, 1.25, 1.5)
"""Image sizes to choose from, over the recipe's."""
MAX_DEPTH = 16
DRAWS = 500
"""Random configs, of which those with the best scores are the first trials."""


@dataclass(frozen=True)
class SearchSpace:
    """The space of a search, by the names of Optuna's parameters."""

    space: Space
    gflops: float

    @property
    def images(self) -> dict[str, ImageSpec]:
        return {f"{p.size[0]}x{p.size[1]}/{p.patch}": p for p in self.space.images}

    @property
    def windows(self) -> dict[str, Pooling]:
        return {f"{p[0]}D {p[1]}/{p[2]}": p for p in self.space.poolings}

    def suggest(self, trial: Any, spent: float | None = None) -> HVTConfig | None:
        """The config of an `optuna.Trial`; None if even the narrowest is above the budget.

        `spent` is the share of the budget, which is suggested too unless it is given.
        """
        depths = self.space.depths
        depth = depths[trial.suggest_int("depth", 0, len(depths) - 1)]
        image = self.images[trial.suggest_categorical("image", list(self.images))]
        window = self.windows[trial.suggest_categorical("window", list(self.windows))]
        if {"pool_after", "stages"} & set(self.space.fixed):
            places = self.space.places(depth)
            after = places[0] if places else None
        else:
            stages = trial.suggest_int("stages", 0, MAX_STAGES)
            first = trial.suggest_float("first", 0.0, 1.0)
            gap = trial.suggest_float("gap", 0.0, 1.0)
            after = place(depth, stages, first, gap)
            after = after[: len(lengths(image.grid, window, len(after))) - 1]
        if spent is None:
            spent = trial.suggest_float("spent", MIN_SPENT, 1.0)
        if after is None:
            return None
        best = None
        for heads in sorted(self.space.widths, key=lambda pair: pair[0] * pair[1]):
            try:
                config = self.space.config(heads, depth, image, window, after)
            except HVTError:  # fixed poolings that leave no token
                return None
            # The narrowest may be above the trial's share, but not above the budget.
            share = 1.0 if best is None else spent
            if cost(config).gflops > tolerance(share * self.gflops):
                break
            best = config
        return best

    def promising(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Parameters of random trials with the best scores by `hvt plan`'s regression, best first.

        They spend the whole budget, and each differs from those before it in width or depth, and in
        its tokens or their pooling.
        """
        optuna, quality = import_optuna(), load_quality()
        draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed % 2**32))
        scored: list[tuple[float, HVTConfig, dict[str, Any]]] = []
        for _ in range(DRAWS):
            trial = draws.ask()
            config = self.suggest(trial, spent=1.0)
            if config is not None:
                score = float(quality.score(measures_of(config), flags_of(config)))
                scored.append((score, config, trial.params | {"spent": 1.0}))
        scored.sort(key=lambda one: -one[0])
        chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
        for _, config, params in scored:
            size, tokens = (config.width, config.depth), (config.tokens, config.pool_dims)
            if all(size != one[0] and tokens != one[1] for one in chosen):
                chosen[size, tokens] = params
        return list(chosen.values())[:count]

    def check_budget(self) -> None:
        """Raise an error for a budget that no config of the space meets."""
        budgets = Budgets(gflops=self.gflops)
        usage = [
            budgets.usage({"gflops": one.macs / 1e9}, one.valid[:, :, None]).min()
            for one in priced(self.space)
        ]
        if min(usage, default=math.inf) > 1:
            raise budgets.error("config of the search")


def place(depth: int, stages: int, first: float, gap: float) -> tuple[int, ...]:
    """Where to pool: the first block as a share of the first half, steps as a share of the rest.

    A gap of 1 spreads the poolings over the remaining blocks; 0 puts them one after another.
    """
    last = depth - 2  # nothing is saved after the last block
    stages = min(stages, last + 1)
    if stages < 1:
        return ()
    begin = min(round(first * (depth // 2)), last - (stages - 1))
    longest = (last - begin) // max(1, stages - 1)
    step = max(1, min(longest, round(1 + gap * (longest - 1))))
    return tuple(begin + m * step for m in range(stages))


def search_space(config: HVTConfig, gflops: float, fixed: dict[str, Any]) -> SearchSpace:
    """The space around a recipe's model: heads of its width, images near its size, any shape.

    There is no class token, as in the paper's HVT; other fields that are neither searched nor
    fixed are the recipe's.
    """
    for name in ("retention", "merge"):
        if getattr(config, name) is not None:
            raise HVTError(f"a search varies pooling and cannot keep the recipe's {name}: omit it")
    around: dict[str, Any] = {}
    if fixed.get("embed_dim") is None:
        around["head_dim"] = config.head_dim
    if config.image[0] != config.image[1]:
        around["img_size"] = config.img_size
    unit = config.patch_size
    sizes = sorted({max(unit, round(config.image[0] * s / unit) * unit) for s in SCALES})
    space = space_of(around | fixed, sizes)
    if "depth" not in fixed:
        depths = tuple(depth for depth in DEPTHS if depth <= max(MAX_DEPTH, config.depth))
        space = dataclasses.replace(space, depths=depths)
    kept = {name: value for name, value in space.fixed.items() if name in KEPT}
    without = {"class_token": False, "dist_token": False}
    base = config.replace(stages=0, embed_dim=None, **without | kept)
    return SearchSpace(dataclasses.replace(space, base=base), gflops)
