"""A trial's config: shape by shape as Optuna suggests it, and as wide as its share of the budget.

The width is what is left to choose when everything else is: the largest within the trial's share of
the budget. So every trial is within it, and spends what it was told to.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..planning.budget import rounded_up, tolerance
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
    with_mlp,
)

LEAST_SPENT = 0.5
"""The smallest share of the budget that a trial is given."""
AROUND = (0.75, 1.0, 1.25, 1.5)
"""ImageSpec sizes to choose from, over the recipe's."""
MOST_DEPTH = 16
DRAWS = 500
"""Random configs of which the regression's favourites are the first trials."""


class Trial(Protocol):
    """What is used of `optuna.Trial`."""

    def suggest_int(self, name: str, low: int, high: int) -> int: ...
    def suggest_float(self, name: str, low: float, high: float) -> float: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


class Drawn:
    """A trial drawn at random that spends the whole budget."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.params = random, dict[str, Any]()

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return self._keep(name, int(self.random.integers(low, high + 1)))

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return self._keep(name, high if name == "spent" else float(self.random.uniform(low, high)))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._keep(name, choices[self.random.integers(len(choices))])

    def _keep(self, name: str, value: Any) -> Any:
        self.params[name] = value
        return value


class Given:
    """A trial whose parameters are known."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return int(self.params[name])

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return float(self.params[name])

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.params[name]


@dataclass(frozen=True)
class Choices:
    """The space of a search, by the names that Optuna knows its parameters by."""

    space: Space
    gflops: float

    @property
    def images(self) -> dict[str, ImageSpec]:
        return {f"{p.size[0]}x{p.size[1]}/{p.patch}": p for p in self.space.images}

    @property
    def windows(self) -> dict[str, Pooling]:
        return {f"{p[0]}D {p[1]}/{p[2]}": p for p in self.space.poolings}

    @property
    def placed(self) -> bool:
        """Whether it is fixed where to pool."""
        return not {"pool_after", "stages"}.isdisjoint(self.space.fixed)

    def suggest(self, trial: Trial) -> HVTConfig | None:
        """The config of a trial; None where not even the narrowest is within the budget."""
        depths = self.space.depths
        depth = depths[trial.suggest_int("depth", 0, len(depths) - 1)]
        image = self.images[trial.suggest_categorical("image", list(self.images))]
        window = self.windows[trial.suggest_categorical("window", list(self.windows))]
        if self.placed:
            places = self.space.places(depth)
            after = places[0] if places else None
        else:
            stages = trial.suggest_int("stages", 0, MAX_STAGES)
            first = trial.suggest_float("first", 0.0, 1.0)
            gap = trial.suggest_float("gap", 0.0, 1.0)
            after = _as_far(place(depth, stages, first, gap), image, window)
        spent = trial.suggest_float("spent", LEAST_SPENT, 1.0)
        if after is None:
            return None
        best = None
        for heads in sorted(self.space.widths, key=lambda pair: pair[0] * pair[1]):
            try:
                config = self.space.config(heads, depth, image, window, after)
            except HVTError:  # poolings that are fixed and leave no token
                return None
            # The narrowest may be above the trial's share, but not above the budget.
            share = 1.0 if best is None else spent
            if cost(config).gflops > tolerance(share * self.gflops):
                break
            best = config
        return best

    def promising(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Parameters of trials that spend the budget well by `hvt plan`'s regression, best first.

        Each differs from those before it in width or depth, and in its tokens or their pooling.
        """
        quality, random = load_quality(), np.random.default_rng(seed)
        scored: list[tuple[float, HVTConfig, dict[str, Any]]] = []
        for _ in range(DRAWS):
            drawn = Drawn(random)
            config = self.suggest(drawn)
            if config is not None:
                score = float(quality.score(measures_of(config), flags_of(config)))
                scored.append((score, config, drawn.params))
        scored.sort(key=lambda one: -one[0])
        chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
        for _, config, params in scored:
            size, tokens = (config.width, config.depth), (config.tokens, config.pool_dims)
            if all(size != one[0] and tokens != one[1] for one in chosen):
                chosen[size, tokens] = params
            if len(chosen) == count:
                break
        return list(chosen.values())

    def params_of(self, config: HVTConfig, name: str) -> dict[str, Any]:
        """The parameters that suggest a config; what the search cannot suggest is refused."""
        price, depths = cost(config).gflops, self.space.depths
        image = ImageSpec(config.image, config.patch_size)
        images = [key for key, one in self.images.items() if one == image]
        pooling = config.pool_dims, config.pool_kernel, config.pool_stride
        windows = [k for k, one in self.windows.items() if one == pooling or not config.pool_blocks]
        for what, known in (
            (f"depth={config.depth}", config.depth in depths),
            (f"img_size={config.img_size} with patch_size={config.patch_size}", images),
            (f"pooling in {pooling[0]}D by {pooling[1]}/{pooling[2]}", windows),
        ):
            if not known:
                raise HVTError(f"{name} has {what}, which is not in this search")
        if price > tolerance(self.gflops):
            raise HVTError(f"{name} takes {rounded_up(price)} GFLOPs, above {self.gflops:g}")
        params = {
            "depth": depths.index(config.depth), "image": images[0], "window": windows[0],
            "spent": max(LEAST_SPENT, min(1.0, price / self.gflops)),
        }  # fmt: skip
        if not self.placed:
            params |= _placed(config, name)
        found = self.suggest(Given(params))
        ours, theirs = ({} if one is None else _compared(one) for one in (found, config))
        if differing := [field for field in theirs if ours.get(field) != theirs[field]]:
            if price < LEAST_SPENT * self.gflops:
                raise HVTError(
                    f"{name} takes {price:.3g} GFLOPs, and a trial of this search at least "
                    f"{LEAST_SPENT:.0%} of {self.gflops:g}: leave it out, or lower the budget"
                )
            values = ", ".join(f"{field}={theirs[field]}" for field in differing)
            raise HVTError(f"{name} has {values}, which this search would not suggest")
        return params

    def cheapest(self) -> float | None:
        """GFLOPs of the cheapest config; None where no config can have the poolings."""
        space, prices = self.space, []
        heads = min(space.widths, key=lambda pair: pair[0] * pair[1])
        depth = min((depth for depth in space.depths if space.places(depth)), default=0)
        places = space.places(depth) if depth else []
        if not self.placed:
            places = [place(depth, stages, 0.0, 0.0) for stages in range(MAX_STAGES + 1)]
        for image, window, after in itertools.product(space.images, space.poolings, places):
            kept = after if self.placed else _as_far(after, image, window)
            try:
                config = space.config(heads, depth, image, window, kept)
            except HVTError:
                continue
            prices.append(cost(config).gflops)
        return min(prices, default=None)


def place(depth: int, stages: int, first: float, gap: float) -> tuple[int, ...]:
    """Where to pool: the first block as a share of the first half, steps as a share of the rest.

    A gap of 1 spreads the poolings over what is left; 0 puts them one after another.
    """
    last = depth - 2  # nothing is saved after the last block
    stages = min(stages, last + 1)
    if stages < 1:
        return ()
    begin = min(round(first * (depth // 2)), last - (stages - 1))
    if stages == 1:
        return (begin,)
    most = (last - begin) // (stages - 1)
    step = max(1, min(most, round(1 + gap * (most - 1))))
    return tuple(begin + m * step for m in range(stages))


def _placed(config: HVTConfig, name: str) -> dict[str, Any]:
    """The parameters of where a config pools, found among all that `place` tells apart."""
    half, after = max(1, config.depth // 2), config.pool_blocks
    for first, gap in itertools.product(range(half + 1), range(config.depth + 1)):
        params: dict[str, Any] = {
            "stages": len(after),
            "first": first / half,
            "gap": gap / config.depth,
        }
        if place(config.depth, **params) == after:
            return params
    blocks = ", ".join(map(str, after))
    raise HVTError(
        f"{name} pools after blocks {blocks}, which this search would not suggest: its poolings "
        "begin in the first half and are equally far apart"
    )


def _compared(config: HVTConfig) -> dict[str, Any]:
    """What tells two configs apart: even stages can be said in two ways, and so can a width."""
    said = ("num_classes", "stages", "pool_after", "embed_dim", "img_size")
    values = {k: v for k, v in config.to_dict().items() if k not in said}
    return values | {"img_size": config.image, "pool_after": config.pool_blocks}


def _as_far(after: tuple[int, ...], image: ImageSpec, window: Pooling) -> tuple[int, ...]:
    """The poolings that an image has tokens enough for."""
    return after[: len(lengths(image.grid, window, len(after))) - 1]


def choices_of(config: HVTConfig, gflops: float, fixed: dict[str, Any]) -> Choices:
    """The space around a recipe's model: its kind of heads, images near its size, any shape.

    Widths are multiples of the recipe's head, and there is no class token, as in the paper's HVT.
    `fixed` fields are as they are, and others that are not searched are the recipe's.
    """
    for name in ("retention", "merge"):
        if getattr(config, name) is not None:
            raise HVTError(f"a search pools, and cannot keep the recipe's {name}: leave it out")
    around: dict[str, Any] = {}
    if fixed.get("embed_dim") is None:
        around["head_dim"] = config.head_dim
    if config.image[0] != config.image[1]:
        around["img_size"] = config.img_size
    unit = max(1, config.patch_size)
    sizes = sorted({max(unit, round(config.image[0] * a / unit) * unit) for a in AROUND})
    space = space_of(around | fixed, sizes)
    if "depth" not in fixed:
        depths = tuple(depth for depth in DEPTHS if depth <= max(MOST_DEPTH, config.depth))
        space = dataclasses.replace(space, depths=depths)
    kept = {name: value for name, value in space.fixed.items() if name in KEPT}
    without = {"class_token": False, "dist_token": False}
    base = config.replace(stages=0, embed_dim=None, **without | kept)
    widths = with_mlp(space.widths, base.mlp_ratio)
    return Choices(dataclasses.replace(space, around=base, widths=widths), gflops)
