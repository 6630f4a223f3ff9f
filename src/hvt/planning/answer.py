"""What a plan answers: choices with their costs, or the budget that cannot be met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import HVTConfig, write_config
from ..costs import cost
from ..errors import HVTError
from .price import memory_mb
from .quality import Quality, flags_of, measures_of

if TYPE_CHECKING:
    from .latency import LatencyTable

BUDGETS = {"gflops": "GFLOPs", "params": "M parameters", "latency_ms": "ms", "memory": "MB"}
"""What can be bounded, and in which unit."""
NARROWEST = 16
"""The narrowest head whose latency can be told."""


@dataclass(frozen=True)
class Choice:
    """A config and what it spends."""

    name: str
    config: HVTConfig
    gflops: float
    params: float
    """In 10⁶."""
    memory: float
    """Of a training step in 10⁶ bytes."""
    latency_ms: float | None
    score: float
    """By the regression: it orders, and predicts no accuracy."""
    outside: tuple[str, ...]
    """What no training of the regression had."""
    spends: dict[str, float]
    """Shares of the multiply-adds: patch embedding, the blocks of each stage, the rest."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "gflops": self.gflops, "params_m": self.params,
            "training_memory_mb": self.memory, "latency_ms": self.latency_ms,
            "tokens": list(self.config.tokens), "score": self.score,
            "outside_of_trainings": list(self.outside), "spends": self.spends,
            "config": self.config.to_dict(),
        }  # fmt: skip


@dataclass(frozen=True)
class Frontier:
    """The best score up to each cost, over the whole space."""

    gflops: list[float]
    scores: list[float]


@dataclass(frozen=True)
class Plan:
    """The answer to a budget."""

    budgets: dict[str, float]
    fixed: dict[str, Any]
    best: list[Choice]
    """The best first, each of another shape."""
    ways: list[Choice]
    """The paper's ways to spend the budget on its own model."""
    deit: Choice | None
    """What the budget buys without pooling."""
    configurations: int
    """Those that were priced."""
    within: int
    """Those within the budget."""
    order: str
    """What the order is worth, in a sentence."""
    frontier: Frontier
    train_batch: int
    source: str | None = None
    """The checkpoint to upcycle, as it was named."""
    source_gflops: float | None = None
    """What it costs itself."""
    machine: dict[str, Any] = field(default_factory=dict)
    """Where the latency was measured."""

    @property
    def choices(self) -> list[Choice]:
        return [*self.best, *self.ways, *([self.deit] if self.deit else [])]

    def save(self, path: str | Path, number: int = 1) -> None:
        """Write a config for `hvt train --model FILE`: the best, or another by its number."""
        if not 1 <= number <= len(self.best):
            raise HVTError(f"there is no choice {number}: the plan has {len(self.best)}")
        if Path(path).suffix.lower() != ".json":
            raise HVTError(f"the config {path} should end in .json, by which it is known again")
        write_config(self.best[number - 1].config, path)

    def draw(self, path: str | Path) -> None:
        """The frontier as PNG or SVG."""
        from .draw import draw

        draw(self, path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "budgets": self.budgets, "fixed": self.fixed, "train_batch": self.train_batch,
            "source": self.source, "source_gflops": self.source_gflops,
            "configurations": self.configurations, "within": self.within,
            "order": self.order, "machine": self.machine,
            "best": [choice.to_dict() for choice in self.best],
            "ways": [choice.to_dict() for choice in self.ways],
            "deit": self.deit.to_dict() if self.deit else None,
            "frontier": {"gflops": self.frontier.gflops, "scores": self.frontier.scores},
        }  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """What a config costs and how it compares, by the means of one plan."""

    quality: Quality
    latency: LatencyTable | None
    train_batch: int

    def choice(self, name: str, config: HVTConfig) -> Choice:
        """A config with everything that is said of it."""
        price, measures = cost(config), measures_of(config)
        parts: dict[str, int] = {}
        for layer in price.layers:
            if layer.name.startswith("blocks."):
                part = f"{layer.tokens_in} tokens"
            else:
                part = "patches" if layer.name == "patch_embed" else "head"
            parts[part] = parts.get(part, 0) + layer.macs
        return Choice(
            name=name,
            config=config,
            gflops=price.gflops,
            params=price.params_m,
            memory=memory_mb(price, config, self.train_batch),
            latency_ms=None if self.latency is None else 1e3 * self.latency.seconds(config),
            score=float(self.quality.score(measures, flags_of(config))),
            outside=tuple(self.quality.outside(measures)),
            spends={part: macs / price.macs for part, macs in parts.items()},
        )

    def costs(self, config: HVTConfig, names: Iterable[str]) -> dict[str, float]:
        """What a config takes of some budgets, each in its unit."""
        price = cost(config)
        costs: dict[str, Callable[[], float]] = {
            "gflops": lambda: price.gflops,
            "params": lambda: price.params_m,
            "memory": lambda: memory_mb(price, config, self.train_batch),
            "latency_ms": lambda: 1e3 * self.latency.seconds(config),  # type: ignore[union-attr]
        }
        return {name: costs[name]() for name in names}

    def fits(self, budgets: Mapping[str, float]) -> Callable[[HVTConfig], bool]:
        """Whether a config is within the budgets."""

        def within(config: HVTConfig) -> bool:
            costs = self.costs(config, budgets)
            return all(costs[name] <= limit(most) for name, most in budgets.items())

        return within


# ── budgets ─────────────────────────────────────────────────────────────────────────────────────


def limit(budget: float) -> float:
    """The most that counts as within a budget: half a unit of the last printed digit above it.

    Budgets are typed as costs are printed: DeiT-Ti's 1.2537 G multiply-adds are the paper's 1.25.
    """
    digits = max(2, 2 - math.floor(math.log10(budget)))
    return budget + 0.5 * 10.0**-digits


def check_timed(head_dim: int) -> None:
    """Refuse heads of which the table of block timings says nothing.

    Its blocks have heads of 32, and of 64 from a width of 192 on, which stand for others too; but
    the softmax of many narrow heads takes much longer.
    """
    if head_dim < NARROWEST:
        raise HVTError(
            f"head_dim={head_dim} has no latency, for the blocks that are timed have heads of 32 "
            f"or 64: fix at least {NARROWEST}, or leave latency_ms out"
        )


@dataclass
class Nearest:
    """The least of each cost, and the config that misses several budgets by least."""

    least: dict[str, float]
    ratio: float = math.inf
    costs: dict[str, float] = field(default_factory=dict)

    def refuse(self, budgets: Mapping[str, float], what: str = "config of the space") -> HVTError:
        """Which budget cannot be met, and what could be."""
        if not self.costs:
            return HVTError(
                f"no {what} has tokens enough for its poolings: use fewer stages, a larger image "
                "or smaller patches"
            )
        for name, most in budgets.items():
            if self.least[name] > limit(most):
                return HVTError(
                    f"{name}={most:g} cannot be met: the least that any {what} takes "
                    f"is {rounded_up(self.least[name])} {BUDGETS[name]}"
                )
        binding = max(budgets, key=lambda name: self.costs[name] / budgets[name])
        wanted = " with ".join(f"{name}={most:g}" for name, most in budgets.items())
        takes = ", ".join(f"{rounded_up(self.costs[n])} {BUDGETS[n]}" for n in budgets)
        return HVTError(f"{wanted} cannot be met: {binding} binds, and the nearest takes {takes}")


def rounded_up(value: float, digits: int = 3) -> str:
    """Three digits, so that what is offered can be met."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits + 3}g}"
