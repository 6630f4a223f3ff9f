"""The result of a plan: choices with their costs and scores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..zoo import write_config
from .latency import LatencyTable
from .price import training_bytes
from .quality import flags_of, load_quality, measures_of


@dataclass(frozen=True)
class Choice:
    """A config, its costs and its score."""

    name: str
    config: HVTConfig
    gflops: float
    params_m: float
    training_memory_mb: float
    latency_ms: float | None
    score: float
    """Of the regression: it ranks, and is not an accuracy."""
    macs_share: dict[str, float]
    """Of the patch embedding, of the blocks of each stage and of the head."""
    tokens: tuple[int, ...]
    """Of the config, at every stage."""


@dataclass(frozen=True)
class Plan:
    """The models within some budgets."""

    budgets: dict[str, float]
    fixed: dict[str, Any]
    best: list[Choice]
    """The best first, each of another shape."""
    scaled: list[Choice]
    """The paper's own ways to scale up its model, within the same budget."""
    baseline: Choice | None
    """The model without pooling within the same budget."""
    num_configs: int
    """How many were priced."""
    num_within: int
    """How many of these are within the budget."""
    order: str
    """How the order was found and how good it is."""
    extrapolated: bool
    """Whether the budget is above the models that the regression was fitted to."""
    train_batch: int
    machine: dict[str, Any]
    """Where and when the latency was measured, and the spread of the calls."""

    @property
    def choices(self) -> list[Choice]:
        return [*self.best, *self.scaled, *([self.baseline] if self.baseline else [])]

    def save(self, path: str | Path, number: int = 1) -> None:
        """Write a config for `hvt train --model FILE`: the best, or another by its number."""
        if not 1 <= number <= len(self.best):
            raise HVTError(f"there is no choice {number}: the plan has {len(self.best)}")
        if Path(path).suffix.lower() != ".json":
            raise HVTError(f"the config {path} must end in .json")
        write_config(self.best[number - 1].config, path)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Estimator:
    """The costs and the score of single configs."""

    latency: LatencyTable | None
    train_batch: int

    def choice(self, name: str, config: HVTConfig) -> Choice:
        price, costs = cost(config), self.costs(config)
        macs: dict[str, int] = {}
        for layer in price.layers:
            if layer.name.startswith("blocks."):
                part = f"{layer.tokens_in} tokens"
            else:
                part = "patches" if layer.name == "patch_embed" else "head"
            macs[part] = macs.get(part, 0) + layer.macs
        return Choice(
            name=name,
            config=config,
            gflops=costs["gflops"],
            params_m=costs["params"],
            training_memory_mb=costs["memory"],
            latency_ms=costs.get("latency_ms"),
            score=float(load_quality().score(measures_of(config), flags_of(config))),
            macs_share={part: count / price.macs for part, count in macs.items()},
            tokens=config.tokens,
        )

    def costs(self, config: HVTConfig) -> dict[str, float]:
        """The costs of a config, each in the unit of its budget."""
        price = cost(config)
        memory = training_bytes(price, config, self.train_batch) / 1e6
        costs = {"gflops": price.gflops, "params": price.params_m, "memory": memory}
        if self.latency is not None:
            costs["latency_ms"] = 1e3 * self.latency.seconds(config)
        return costs
