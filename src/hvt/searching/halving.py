"""Successive halving: which trials are promoted to a longer training.

Optuna's pruners support only one objective, so this is our own, asynchronous, for trials of several
processes end at any time. Each rung is a whole training with its own schedule, not the beginning of
a longer one, so that models are compared after their learning rate has decayed. Three rungs cost
1/9 + 1/3 on top of the last. With one rung every trial is trained to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import HVTError

FACTOR = 3
"""A rung is so many times as long as the one before, and one in so many trials is promoted."""
RUNGS = 3
SIMILAR = 1.05
"""The factor of GFLOPs up to which another trial counts as no more expensive."""


def rung_epochs(epochs: float, rungs: int = RUNGS) -> list[float]:
    """Epochs of each rung, the longest last.

    >>> rung_epochs(9)
    [1.0, 3.0, 9]
    """
    shorter = [round(epochs / FACTOR**above, 4) for above in range(rungs - 1, 0, -1)]
    if 0 in shorter:
        raise HVTError(
            f"epochs={epochs:g} is too short for {rungs} rungs, the first of which is "
            f"1/{FACTOR ** (rungs - 1)} of it: use more epochs, or fewer rungs"
        )
    return [*shorter, epochs]


def is_promoted(gflops: float, top1: float, rung: int, others: Sequence[dict[str, Any]]) -> bool:
    """Whether a trial is in the best third of those that cost no more than it, including itself.

    Cheap trials are not compared with expensive ones: the search has two objectives. The first
    trials of a study are promoted if they are the best so far.
    """
    similar = [
        row["rungs"][rung][1]
        for row in others
        if len(row["rungs"]) > rung and row["gflops"] <= SIMILAR * gflops
    ]
    return sum(other > top1 for other in similar) < max(1, (len(similar) + 1) // FACTOR)


def frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Pareto front of trials that were trained to the end, the cheapest first."""
    finished = [row for row in rows if row["finished"]]
    best: list[dict[str, Any]] = []
    for row in sorted(finished, key=lambda row: (row["gflops"], -row["top1"])):
        if not best or row["top1"] > best[-1]["top1"]:
            best.append(row)
    return best
