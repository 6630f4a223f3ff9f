"""What the paper says of its tables, and whether measured figures agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
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


LEAST_EPOCHS = 0.5
"""At equal compute a row with fewer is shown and decides nothing: it has hardly begun to learn."""


@dataclass(frozen=True)
class Claim:
    """A sentence about one table, as comparisons that must all hold."""

    number: str
    table: str
    words: str
    comparisons: tuple[Comparison, ...]
    data: str | None = None
    """The data set that it is about, where the table has several."""
    protocols: tuple[str, ...] = ()
    """Those that test it on other data, by name."""
    alike: tuple[str, str] | None = None
    """Two rows whose costs are to be equal."""

    def tested(self, protocol: str, data: str) -> bool:
        """Whether figures of this protocol and data set say anything of it."""
        return self.data in (None, data) or protocol in self.protocols


def _rising(*names: str) -> tuple[Comparison, ...]:
    """Each row above the one before."""
    pairs = zip(names[1:], names, strict=False)
    return tuple(Comparison(after, before, strict=True) for after, before in pairs)


def _half(pooled: str, deit: str) -> tuple[Comparison, ...]:
    """What half of the cost may lose, and what it must gain where the other half is spent too."""
    return (
        Comparison(pooled, deit, -3.0, budgets=("epochs",)),
        Comparison(pooled, deit, strict=True, budgets=("compute",)),
    )


CLAIMS = (
    Claim(
        "1",
        "main",
        "At DeiT's cost, the scaled HVT is at least 3 points better.",
        (Comparison("Scale HVT-Ti-4", "DeiT-Ti", 3.0),),
        alike=("Scale HVT-Ti-4", "DeiT-Ti"),
    ),
    Claim(
        "2a",
        "main",
        "In the tiny setting HVT-1, at half of DeiT's cost, stays within 3 points of it at equal "
        "epochs and is better at equal compute.",
        _half("HVT-Ti-1", "DeiT-Ti"),
    ),
    Claim(
        "2b",
        "main",
        "In the small setting HVT-1, at half of DeiT's cost, stays within 3 points of it at equal "
        "epochs and is better at equal compute.",
        _half("HVT-S-1", "DeiT-S"),
    ),
    Claim(
        "8a",
        "main",
        "Against PoWER and at less cost, HVT-1 is better in the tiny setting.",
        (Comparison("HVT-Ti-1", "DeiT-Ti + PoWER", strict=True),),
    ),
    Claim(
        "8b",
        "main",
        "Against PoWER and at less cost, HVT-1 is at most a point lower in the small setting.",
        (Comparison("HVT-S-1", "DeiT-S + PoWER", -1.0),),
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
        "5a",
        "pooling_stages",
        "Pooling stages do not hurt on CIFAR-100: no number of them is below none.",
        tuple(Comparison(f"M={stages}", "M=0") for stages in range(1, 5)),
        data="cifar100",
        protocols=("cpu", "long"),  # on whatever small data
    ),
    Claim(
        "5b",
        "pooling_stages",
        "Pooling stages hurt on ImageNet: each number of them is below the one before.",
        tuple(
            Comparison(f"M={stages}", f"M={stages + 1}", strict=True, budgets=("epochs",))
            for stages in range(4)
        ),
        data="imagenet",
        protocols=("long",),  # as there, capacity is to be what limits
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
        alike=("HVT-S-2 (2D)", "DeiT-S"),
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
    paper: float | None = None
    """The paper's difference, where it prints one for this reading."""
    short: tuple[str, ...] = ()
    """Those of the two rows that were trained for too little to decide anything."""

    @property
    def holds(self) -> bool:
        return self.comparison.holds(self.difference)

    @property
    def clear(self) -> bool:
        """Whether the seeds' spread is too small to have decided it: two standard errors."""
        gap = abs(self.difference - self.comparison.margin)
        return self.error is not None and gap > 2 * self.error

    @property
    def opposite(self) -> bool:
        """Whether the sign is not the paper's."""
        return self.paper is not None and self.difference * self.paper < 0

    @property
    def signed(self) -> bool:
        """Whether the sign is clear: two standard errors."""
        return self.error is not None and abs(self.difference) > 2 * self.error


def describe(outcome: Outcome) -> str:
    """One comparison in a sentence."""
    one = outcome.comparison
    left, right = outcome.seeds
    remarks = [f"n = {left} and {right}"]
    if outcome.paper is not None:
        remarks.insert(0, f"paper {outcome.paper:+.2f}")
    if outcome.error is not None:
        remarks.append(f"standard error {outcome.error:.2f}")
        if not outcome.clear:
            remarks.append("within the seeds' spread")
    if outcome.short:
        remarks.append(f"decides nothing: {' and '.join(outcome.short)} had under half an epoch")
    sign = ">" if one.strict else "≥"
    wanted = f"wanted {sign} {one.margin:g}"
    points = f"{one.left} − {one.right} = {outcome.difference:+.2f} points"
    return f"{points} ({wanted}; {', '.join(remarks)})."


@dataclass(frozen=True)
class Verdict:
    """What figures say of a claim in one reading."""

    outcomes: tuple[Outcome, ...]
    missing: tuple[str, ...] = ()
    """Rows that have not been run."""
    tested: bool = True
    """False where this protocol cannot test the claim."""
    ratio: float = 1.0
    """Of two costs that the claim wants to be equal."""

    @property
    def word(self) -> str:
        """holds, does not hold, not decided, not run, not tested.

        What holds may do so the other way round, with a sign that is not clear where the paper has
        the other, not clearly, or at another cost. Not decided is what lies within the seeds'
        spread, fails where that is not known, or hangs on a row with too few epochs.
        """
        if not self.tested:
            return "not tested"
        used = [one for one in self.outcomes if not one.short]
        if any(not one.holds and one.clear for one in used):
            return "does not hold"
        if self.missing or not self.outcomes:
            return "not run"
        failed = [one for one in used if not one.holds]
        if failed or len(used) < len(self.outcomes):
            return "not decided"
        words = ["holds"]
        opposite = [one for one in used if one.opposite]
        if any(one.signed for one in opposite):
            words.append("the other way round")
        elif any(one.error is not None for one in opposite):
            words.append("sign not clear")
        if self.ratio > MOST_COST:
            words.append(f"at {self.ratio:.1f} × the cost")
        if not all(one.clear for one in used):
            words.append("not clearly")
        return ", ".join(words)


MOST_COST = 1.25
"""Times another cost, of what can still be called equal to it."""

Spread = Mapping[str, float | None]
"""The standard deviation over seeds by row; None where it is not known."""


def judge(
    claim: Claim,
    budget: str,
    figures: Mapping[str, Sequence[float]],
    spread: Spread,
    printed: Mapping[str, float] | None = None,
    short: Collection[str] = (),
    macs: Mapping[str, float] | None = None,
) -> Verdict | None:
    """A claim against each row's top-1 over seeds; None where it is not made for this reading.

    `printed` has the paper's figures for this reading, `short` the rows that decide nothing, `macs`
    each row's cost.
    """
    made = [one for one in claim.comparisons if budget in one.budgets]
    if not made:
        return None
    paper = printed or {}
    outcomes, missing = [], []
    for one in made:
        pair = (one.left, one.right)
        left, right = (figures.get(name, ()) for name in pair)
        missing += [name for name, seen in zip(pair, (left, right), strict=True) if not seen]
        if left and right:
            outcomes.append(
                Outcome(
                    one,
                    statistics.fmean(left) - statistics.fmean(right),
                    (len(left), len(right)),
                    standard_error(
                        (spread.get(one.left), len(left)), (spread.get(one.right), len(right))
                    ),
                    paper[one.left] - paper[one.right] if set(pair) <= paper.keys() else None,
                    tuple(name for name in pair if name in short),
                )
            )
    ratio = 1.0
    if claim.alike is not None and macs:
        dear, cheap = (macs[name] for name in claim.alike)
        ratio = dear / cheap
    return Verdict(tuple(outcomes), tuple(dict.fromkeys(missing)), ratio=ratio)


def standard_error(*means: tuple[float | None, int]) -> float | None:
    """The standard error of a difference, from each mean's spread and number of seeds."""
    squares = [spread**2 / seeds for spread, seeds in means if spread is not None]
    return math.sqrt(sum(squares)) if len(squares) == len(means) else None


def pooled_spread(groups: Iterable[Sequence[float]]) -> float | None:
    """The standard deviation over seeds, from all rows that have several; None without any.

    One figure for rows alike: three seeds alone tell too little of a row's own spread, one nothing.
    """
    squares, degrees = 0.0, 0
    for group in groups:
        if len(group) > 1:
            squares += statistics.variance(group) * (len(group) - 1)
            degrees += len(group) - 1
    return math.sqrt(squares / degrees) if degrees else None
