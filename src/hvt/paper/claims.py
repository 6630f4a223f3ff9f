"""What the paper says of its tables, and whether measured figures agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BUDGETS = ("epochs", "compute")
"""Two readings of a table: equal passes over the data, or equal multiply-adds of training."""


@dataclass(frozen=True)
class Comparison:
    """One row's top-1 is above another's by at least a margin, which may be negative."""

    left: str
    right: str
    margin: float = 0.0
    strict: bool = False
    """Equality is not enough."""
    budgets: tuple[str, ...] = BUDGETS
    """The readings it is claimed for."""

    def holds(self, difference: float) -> bool:
        # Printed figures have two digits, which floats do not subtract exactly.
        gap = round(difference - self.margin, 6)
        return gap > 0 if self.strict else gap >= 0


@dataclass(frozen=True)
class Claim:
    """A sentence about one table, as comparisons that must all hold."""

    number: str
    table: str
    words: str
    comparisons: tuple[Comparison, ...]


def _rising(*names: str) -> tuple[Comparison, ...]:
    """Each row above the one before."""
    pairs = zip(names[1:], names, strict=False)
    return tuple(Comparison(after, before, strict=True) for after, before in pairs)


CLAIMS = (
    Claim(
        "1",
        "main",
        "At DeiT's cost, the scaled HVT is at least 3 points better.",
        (Comparison("Scale HVT-Ti-4", "DeiT-Ti", 3.0),),
    ),
    Claim(
        "2",
        "main",
        "HVT-1, at half of DeiT's cost, stays within 3 points of it at equal epochs and is better "
        "at equal compute.",
        (
            Comparison("HVT-Ti-1", "DeiT-Ti", -3.0, budgets=("epochs",)),
            Comparison("HVT-S-1", "DeiT-S", -3.0, budgets=("epochs",)),
            Comparison("HVT-Ti-1", "DeiT-Ti", strict=True, budgets=("compute",)),
            Comparison("HVT-S-1", "DeiT-S", strict=True, budgets=("compute",)),
        ),
    ),
    Claim(
        "8",
        "main",
        "Against PoWER and at less cost, HVT-1 is better in the tiny setting and at most a point "
        "lower in the small one.",
        (
            Comparison("HVT-Ti-1", "DeiT-Ti + PoWER", strict=True),
            Comparison("HVT-S-1", "DeiT-S + PoWER", -1.0),
        ),
    ),
    Claim(
        "3",
        "cls_token",
        "The average of all tokens is at least as good as a class token.",
        (Comparison("DeiT-Ti without CLS", "DeiT-Ti with CLS"),),
    ),
    Claim(
        "4",
        "pool_type",
        "Max pooling is better than average pooling, which is better than convolution.",
        _rising("Conv", "Avg", "Max"),
    ),
    Claim(
        "5",
        "pooling_stages",
        "Pooling stages do not hurt on CIFAR-100: no number of them is below none.",
        tuple(Comparison(f"M={stages}", "M=0") for stages in range(1, 5)),
    ),
    Claim(
        "6a",
        "num_blocks",
        "Deeper does not help: no depth is above 12 blocks.",
        tuple(Comparison("L=12", f"L={depth}") for depth in (16, 20, 24)),
    ),
    Claim(
        "6b",
        "num_heads",
        "Wider helps: each number of heads is above the one before.",
        _rising("heads=3", "heads=6", "heads=12", "heads=16"),
    ),
    Claim(
        "7a",
        "resolution",
        "A higher resolution helps: each is above the one before.",
        _rising("160", "224", "320", "384"),
    ),
    Claim(
        "7b",
        "patch_size",
        "Smaller patches help: each size is above the next larger one.",
        _rising("P=32", "P=16", "P=8"),
    ),
    Claim(
        "9",
        "pooling_2d",
        "At DeiT's cost, HVT with 2D pooling is better.",
        _rising("DeiT-S", "HVT-S-2 (2D)"),
    ),
)


# ── measured ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """One comparison with figures."""

    comparison: Comparison
    difference: float
    """Of the two means, in points."""
    seeds: tuple[int, int]
    error: float | None
    """Standard error of the difference; None where the spread over seeds is not known."""

    @property
    def holds(self) -> bool:
        return self.comparison.holds(self.difference)

    @property
    def clear(self) -> bool:
        """Whether the seeds' spread is too small to have decided it: two standard errors."""
        gap = abs(self.difference - self.comparison.margin)
        return self.error is not None and gap > 2 * self.error


@dataclass(frozen=True)
class Verdict:
    """What figures say of a claim in one reading."""

    outcomes: tuple[Outcome, ...]
    missing: tuple[str, ...]
    """Rows that have not been run."""

    @property
    def word(self) -> str:
        """holds, does not hold, not decided (within the seeds' spread), not run."""
        if any(not one.holds and one.clear for one in self.outcomes):
            return "does not hold"
        if self.missing or not self.outcomes:
            return "not run"
        failed = [one for one in self.outcomes if not one.holds]
        if not failed:
            return "holds" if all(one.clear for one in self.outcomes) else "holds, not clearly"
        known = all(one.error is not None for one in failed)
        return "not decided" if known else "does not hold"


def judge(
    claim: Claim, budget: str, figures: Mapping[str, Sequence[float]], noise: float | None
) -> Verdict | None:
    """A claim against each row's top-1 over seeds; None where it is not made for this reading."""
    made = [one for one in claim.comparisons if budget in one.budgets]
    if not made:
        return None
    outcomes, missing = [], []
    for one in made:
        left, right = figures.get(one.left, ()), figures.get(one.right, ())
        missing += [name for name, seen in ((one.left, left), (one.right, right)) if not seen]
        if left and right:
            difference = statistics.fmean(left) - statistics.fmean(right)
            error = None if noise is None else noise * math.sqrt(1 / len(left) + 1 / len(right))
            outcomes.append(Outcome(one, difference, (len(left), len(right)), error))
    return Verdict(tuple(outcomes), tuple(dict.fromkeys(missing)))


def pooled_spread(groups: Iterable[Sequence[float]]) -> float | None:
    """The standard deviation over seeds, from all rows that have several; None without any.

    One figure for all rows: three seeds alone tell too little of a row's own spread, one nothing.
    """
    squares, degrees = 0.0, 0
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(group) * (len(group) - 1)
            degrees += len(group) - 1
    return math.sqrt(squares / degrees) if degrees else None
