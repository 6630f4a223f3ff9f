"""The predictions of `docs/reproduction/predictions.md` as checks of what was measured.

The page was written before the first long training, and these sentences are its own. Where it says
"about" or "some points", the number that is meant stands in the sentence here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .long_results import FLAT, LENGTHS, LongResults

TRUE, FALSE, NOT_RUN = "came true", "did not", "not run"

Check = Callable[[LongResults], tuple[str, bool] | None]
"""What was measured, in words, and whether it was predicted; None where a row has not been run."""


@dataclass(frozen=True)
class Prediction:
    """One sentence, and how to tell."""

    part: str
    words: str
    check: Check

    def outcome(self, results: LongResults) -> tuple[str, str]:
        """What was measured, and whether the prediction came true."""
        checked = self.check(results)
        if checked is None:
            return "", NOT_RUN
        return checked[0], TRUE if checked[1] else FALSE


def _gap(group: str, left: str, right: str, least: float, most: float) -> Check:
    """A difference within limits, both included."""

    def check(results: LongResults) -> tuple[str, bool] | None:
        gap = results.gap(group, left, right)
        if gap is None:
            return None
        return f"{left} − {right}: {gap.points:+.2f}", least <= gap.points <= most

    return check


def _series(results: LongResults, groups: Sequence[str], left: str) -> list[float] | None:
    """Gaps to DeiT-Ti in several lengths."""
    gaps = [results.gap(group, left, "DeiT-Ti") for group in groups]
    points = [gap.points for gap in gaps if gap is not None]
    return points if len(points) == len(gaps) else None


def _falls(left: str, least: float = -math.inf) -> Check:
    """A gap to DeiT-Ti that falls from 1 to 10 to 40 epochs and stays above some points."""

    def check(results: LongResults) -> tuple[str, bool] | None:
        points = _series(results, ("1", "A10", "A"), left)
        if points is None:
            return None
        measured = " → ".join(f"{point:+.2f}" for point in points)
        falls = points[0] > points[1] > points[2] and min(points) > least
        return f"{left} − DeiT-Ti: {measured}", falls

    return check


def _below(group: str, left: str, right: str) -> Check:
    """A row is below another one; equal is not below."""

    def check(results: LongResults) -> tuple[str, bool] | None:
        gap = results.gap(group, left, right)
        if gap is None:
            return None
        return f"{left} − {right}: {gap.points:+.2f}", gap.points < 0

    return check


def _not_below(results: LongResults) -> tuple[str, bool] | None:
    """Stages against none; a loss within the seeds' spread is none."""
    gaps = [results.gap("C", name, "M=0") for name in ("M=2", "M=4")]
    points = [gap.points for gap in gaps if gap is not None]
    if len(points) < len(gaps):
        return None
    least = -(results.noise[False] or 0.0)
    measured = f"M=2 − M=0: {points[0]:+.2f}, M=4 − M=0: {points[1]:+.2f}"
    return measured, all(point >= least for point in points)


_NEAR = 0.2
"""Of the least loss, for pictures that were learned nearly perfectly."""


def _fitted(results: LongResults) -> tuple[str, bool] | None:
    losses = {}
    for name in ("M=0", "M=2", "M=4"):
        trained = results.groups["C"][name]
        if not trained:
            return None
        losses[name] = trained[0].curve[-1]["train_loss"]
        smoothing = trained[0].recipe.get("smoothing", 0.1)
        least = _least_loss(smoothing, trained[0].config["num_classes"])
    measured = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    near = all(loss <= least + _NEAR for loss in losses.values())
    return f"training loss {measured}; least possible {least:.3f}", near and min(
        losses, key=lambda name: losses[name]
    ) == "M=0"


def _least_loss(smoothing: float, classes: int) -> float:
    """Cross-entropy of smoothed labels with themselves."""
    other = smoothing / classes
    true = 1 - smoothing + other
    rest = (classes - 1) * other * math.log(other) if smoothing else 0.0
    return -(true * math.log(true) + rest)


def _slowly(results: LongResults) -> tuple[str, bool] | None:
    gaps = [results.gap("B", f"M={m}", f"M={m - 1}") for m in range(1, 5)]
    points = [gap.points for gap in gaps if gap is not None]
    if len(points) < len(gaps):
        return None
    measured = ", ".join(f"{point:+.2f}" for point in points)
    return f"each against the one before: {measured}", min(points) >= -2


def _smaller(results: LongResults) -> tuple[str, bool] | None:
    words, good = [], True
    for stages in range(5):
        pair = [results.gap(group, f"M={stages}", "DeiT-S") for group in ("1", "B")]
        if pair[0] is None or pair[1] is None:
            return None
        short, longer = pair[0].points, pair[1].points
        words.append(f"M={stages} {short:+.2f} → {longer:+.2f}")
        good = good and longer < short
    return "to DeiT-S: " + ", ".join(words), good


_TINY = ("DeiT-Ti", "HVT-Ti-0", "HVT-Ti-1", "Scale HVT-Ti-4")


def _not_flat(results: LongResults) -> tuple[str, bool] | None:
    gains = {one.name: one.gain for one in results.rows if one.part.name == "A"}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if len(known) < len(gains):
        return None
    measured = ", ".join(f"{name} {gain:+.2f}" for name, gain in known.items())
    return f"from epoch 20 to 40: {measured}", all(gain >= FLAT for gain in known.values())


def _longer(results: LongResults) -> tuple[str, bool] | None:
    words, good = [], True
    for name in _TINY:
        means = [results.top1(group)[name] for group in ("A10", "A")]
        if not all(means):
            return None
        gain = sum(means[1]) / len(means[1]) - sum(means[0]) / len(means[0])
        words.append(f"{name} {gain:+.2f}")
        good = good and 2 <= gain <= 5
    return ", ".join(words), good


_LONG = LENGTHS["A"]

PREDICTIONS = (
    Prediction(
        "A",
        f"HVT-Ti-1 is below DeiT-Ti after {_LONG} epochs.",
        _below("A", "HVT-Ti-1", "DeiT-Ti"),
    ),
    Prediction("A", "It is so by 1 to 3 points.", _gap("A", "HVT-Ti-1", "DeiT-Ti", -3, -1)),
    Prediction(
        "A",
        "The scaled HVT-Ti-4 is at least 3 points above DeiT-Ti.",
        _gap("A", "Scale HVT-Ti-4", "DeiT-Ti", 3, math.inf),
    ),
    Prediction(
        "A",
        "The average of all tokens is at least as good as the class token.",
        _gap("A", "HVT-Ti-0", "DeiT-Ti", 0, math.inf),
    ),
    Prediction(
        "A10",
        "HVT-Ti-1's gap to DeiT-Ti falls from 1 to 10 to 40 epochs.",
        _falls("HVT-Ti-1"),
    ),
    Prediction(
        "A10",
        "It is about 0 after 10 epochs (within a point).",
        _gap("A10", "HVT-Ti-1", "DeiT-Ti", -1, 1),
    ),
    Prediction(
        "A10",
        "The scaled HVT's lead shrinks too, and stays above 3 points.",
        _falls("Scale HVT-Ti-4", 3),
    ),
    Prediction("C", "Two and four stages are not below none.", _not_below),
    Prediction(
        "C",
        "Four stages are above none by some points (2 or more).",
        _gap("C", "M=4", "M=0", 2, math.inf),
    ),
    Prediction(
        "C",
        "All three fit their training pictures nearly perfectly (loss within "
        f"{_NEAR:g} of the least that label smoothing allows), M=0 best.",
        _fitted,
    ),
    Prediction("B", "M=1 is within a point of M=0.", _gap("B", "M=1", "M=0", -1, 1)),
    Prediction(
        "B", "The stages fall off slowly, each at most two points below the one before.", _slowly
    ),
    Prediction("B", "Every gap to DeiT-S is smaller than after one epoch.", _smaller),
    Prediction(
        "P",
        "HVT-Ti-1 and DeiT-Ti with PoWER are within a point.",
        _gap("A", "HVT-Ti-1", "DeiT-Ti + PoWER", -1, 1),
    ),
    Prediction("A", "No curve is flat.", _not_flat),
    Prediction(
        "A", "A training of 40 epochs ends 2 to 5 points above one of 10, in every row.", _longer
    ),
)
