"""Successive halving: which trials go on to a longer training.

Optuna's pruners know one objective alone, so this is our own: asynchronous, for trials of several
processes end at any time. Each rung is a whole training with its own schedule, not the beginning of
a longer one: what a model learns when the rate has come down is what is compared. Three rungs at
thirds of the length cost 1/9 + 1/3 on top of the last. One rung is no halving: what is best in a
short training need not be best in a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import HVTError

FACTOR = 3
"""A rung is so many times as long as the one before, and one in so many trials goes on to it."""
RUNGS = 3
MOST_RUNGS = 9
CHEAP = 1.05
"""Trials up to so many times as dear count as no dearer."""


@dataclass(frozen=True)
class Score:
    """What a trial reached on a rung."""

    gflops: float
    top1: float


def rung_epochs(epochs: float, rungs: int = RUNGS) -> list[float]:
    """Epochs of each rung, the longest last.

    >>> rung_epochs(9)
    [1.0, 3.0, 9]
    """
    if rungs > MOST_RUNGS:
        raise HVTError(f"rungs={rungs} are too many: use 1 to {MOST_RUNGS}")
    shorter = [round(epochs / FACTOR**above, 4) for above in range(rungs - 1, 0, -1)]
    if 0 in shorter:
        raise HVTError(
            f"epochs={epochs:g} is too short for {rungs} rungs, the first of which is "
            f"1/{FACTOR ** (rungs - 1)} of it: use more epochs, or fewer rungs"
        )
    return [*shorter, epochs]


def goes_on(score: Score, others: Iterable[Score]) -> bool:
    """Whether a trial is in the best third of those that cost no more than it, itself among them.

    A cheap trial is not measured by dear ones: the search has two objectives. The first trials of a
    study go on if they are the best so far.
    """
    alike = [other.top1 for other in others if other.gflops <= CHEAP * score.gflops]
    better = sum(top1 > score.top1 for top1 in alike)
    return better < max(1, (len(alike) + 1) // FACTOR)


def reached(rows: Sequence[dict[str, Any]], rung: int) -> list[Score]:
    """The scores on a rung of trials that got there."""
    return [Score(row["gflops"], row["rungs"][rung][1]) for row in rows if len(row["rungs"]) > rung]


def frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those trained to the end that no other beats in accuracy and cost, the cheapest first."""
    whole = [row for row in rows if row["finished"]]
    best: list[dict[str, Any]] = []
    for row in sorted(whole, key=lambda row: (row["gflops"], -row["top1"])):
        if not best or row["top1"] > best[-1]["top1"]:
            best.append(row)
    return best
