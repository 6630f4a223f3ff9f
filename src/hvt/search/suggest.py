"""A trial's config: shape by shape as Optuna suggests it, and as wide as its share of the budget.

The width is what is left to choose when everything else is: the largest within the trial's share of
the budget. So every trial is within it, and spends what it was told to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..plan.answer import limit
from ..plan.space import DEPTHS, MOST_STAGES, Picture, Pooling, Space, lengths, space_of

LEAST_SPENT = 0.5
"""The smallest share of the budget that a trial is given."""
AROUND = (0.75, 1.0, 1.25, 1.5)
"""Picture sizes to choose from, over the recipe's."""
MOST_DEPTH = 16


class Trial(Protocol):
    """What is used of `optuna.Trial`."""

    def suggest_int(self, name: str, low: int, high: int) -> int: ...
    def suggest_float(self, name: str, low: float, high: float) -> float: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Choices:
    """The space of a search, by the names that Optuna knows its parameters by."""

    space: Space
    gflops: float

    @property
    def pictures(self) -> dict[str, Picture]:
        return {f"{p.size[0]}x{p.size[1]}/{p.patch}": p for p in self.space.pictures}

    @property
    def windows(self) -> dict[str, Pooling]:
        return {f"{p[0]}D {p[1]}/{p[2]}": p for p in self.space.poolings}

    def suggest(self, trial: Trial) -> HVTConfig | None:
        """The config of a trial; None where not even the narrowest is within the budget."""
        depths, fixed = self.space.depths, self.space.fixed
        depth = depths[trial.suggest_int("depth", 0, len(depths) - 1)]
        picture = self.pictures[trial.suggest_categorical("picture", list(self.pictures))]
        window = self.windows[trial.suggest_categorical("window", list(self.windows))]
        if fixed.get("pool_after") is not None or fixed.get("stages") is not None:
            places = self.space.places(depth)
            after = places[0] if places else None
        else:
            stages = trial.suggest_int("stages", 0, MOST_STAGES)
            first = trial.suggest_float("first", 0.0, 1.0)
            gap = trial.suggest_float("gap", 0.0, 1.0)
            after = place(depth, stages, first, gap)
            after = after[: len(lengths(picture.grid, window, len(after))) - 1]
        spent = trial.suggest_float("spent", LEAST_SPENT, 1.0)
        if after is None:
            return None
        best = None
        for heads in sorted(self.space.widths, key=lambda pair: pair[0] * pair[1]):
            try:
                config = self.space.config(heads, depth, picture, window, after)
            except HVTError:  # poolings that are fixed and leave no token
                return None
            # The narrowest may be above the trial's share, but not above the budget.
            share = 1.0 if best is None else spent
            if cost(config).gflops > limit(share * self.gflops):
                break
            best = config
        return best


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


def choices_of(config: HVTConfig, gflops: float, fixed: dict[str, Any]) -> Choices:
    """The space around a recipe's model: its kind of heads, pictures near its size, any shape.

    Widths are multiples of the recipe's head, and there is no class token, as in the paper.
    `fixed` fields are as they are.
    """
    around = {
        "head_dim": config.head_dim, "num_classes": config.num_classes,
        "in_chans": config.in_chans, "pool": config.pool, "mlp_ratio": config.mlp_ratio,
        "drop_path_rate": config.drop_path_rate,
    }  # fmt: skip
    if "embed_dim" in fixed or "num_heads" in fixed:
        around.pop("head_dim")
    if "img_size" not in fixed and config.image[0] != config.image[1]:
        around["img_size"] = config.img_size
    unit = max(1, config.patch_size)
    sizes = sorted({max(unit, round(config.image[0] * a / unit) * unit) for a in AROUND})
    space = space_of(around | fixed, sizes)
    if "depth" not in fixed:
        depths = tuple(depth for depth in DEPTHS if depth <= max(MOST_DEPTH, config.depth))
        space = Space(space.fixed, space.widths, depths, space.pictures, space.poolings)
    return Choices(space, gflops)
