"""The predictions of `docs/reproduction/predictions.md` as checks of what was measured.

The page was written before the first long training, and these sentences are its own. Where it says
"about" or "some points", the number that is meant stands in the sentence here. A figure that two
standard errors could carry over the limit decides nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .claims import standard_error
from .long_results import FLAT, LENGTHS, Gap, LongResults

WORDS = {True: "came true", False: "did not", None: "not decided"}
SEEN = {True: "seen", False: "not seen", None: "not decided"}
"""Of what would speak against the explanation."""
NOT_RUN = "not run"

Outcome = tuple[str, bool | None] | None
"""What was measured, in words, and whether it was predicted, of which None is that nothing can be
told; without any where a row has not been run."""
Check = Callable[[LongResults], Outcome]


@dataclass(frozen=True)
class Prediction:
    """One sentence, and how to tell."""

    part: str
    words: str
    check: Check

    def outcome(
        self, results: LongResults, words: Mapping[bool | None, str] = WORDS
    ) -> tuple[str, str]:
        """What was measured, and whether the prediction came true."""
        checked = self.check(results)
        if checked is None:
            return "", NOT_RUN
        return checked[0], words[checked[1]]


def _within(gap: Gap, least: float = -math.inf, most: float = math.inf) -> bool | None:
    """Whether a difference is within limits; None where two standard errors could change that."""
    if gap.error is None:
        return None
    reach = 2 * gap.error
    if least + reach < gap.points < most - reach:
        return True
    return False if not least - reach <= gap.points <= most + reach else None


def _all(outcomes: Iterable[bool | None]) -> bool | None:
    """One that failed is enough; otherwise one that cannot be told is."""
    every = list(outcomes)
    if False in every:
        return False
    return None if None in every else True


def _change(before: Gap, after: Gap) -> Gap:
    """By how much a difference has grown."""
    error = standard_error((before.error, 1), (after.error, 1))
    return Gap(after.points - before.points, error, after.seeds)


def _told(gap: Gap) -> str:
    error = "" if gap.error is None else f" ± {gap.error:.2f}"
    return f"{gap.points:+.2f}{error} (n = {gap.seeds[0]} and {gap.seeds[1]})"


def _gap(group: str, left: str, right: str, least: float, most: float) -> Check:
    """A difference within limits."""

    def check(results: LongResults) -> Outcome:
        gap = results.gap(group, left, right)
        if gap is None:
            return None
        return f"{left} − {right}: {_told(gap)}", _within(gap, least, most)

    return check


def _not(other: Check) -> Check:
    """The opposite of another."""

    def check(results: LongResults) -> Outcome:
        checked = other(results)
        if checked is None or checked[1] is None:
            return checked
        return checked[0], not checked[1]

    return check


def _gaps(results: LongResults, *wanted: tuple[str, str, str]) -> list[Gap] | None:
    """Differences by group and the two rows' names; None where one of the rows has not been run."""
    gaps = [results.gap(*one) for one in wanted]
    known = [gap for gap in gaps if gap is not None]
    return known if len(known) == len(gaps) else None


def _falls(left: str, least: float = -math.inf) -> Check:
    """A gap to DeiT-Ti that falls from 1 to 10 to 40 epochs and stays above some points."""

    def check(results: LongResults) -> Outcome:
        gaps = _gaps(results, *((group, left, "DeiT-Ti") for group in ("1", "A10", "A")))
        if gaps is None:
            return None
        steps = [_change(*pair) for pair in itertools.pairwise(gaps)]
        falls = _all(_within(step, most=0) for step in steps)
        stays = _all(_within(gap, least) for gap in gaps)
        measured = " → ".join(_told(gap) for gap in gaps)
        return f"{left} − DeiT-Ti: {measured}", _all([falls, stays])

    return check


def _not_below(results: LongResults) -> Outcome:
    """Stages against none."""
    gaps = _gaps(results, ("C", "M=2", "M=0"), ("C", "M=4", "M=0"))
    if gaps is None:
        return None
    measured = f"M=2 − M=0: {_told(gaps[0])}, M=4 − M=0: {_told(gaps[1])}"
    return measured, _all(_within(gap, least=0) for gap in gaps)


_NEAR = 0.2
"""Of the least loss, for images that were learned nearly perfectly."""


def _fitted(results: LongResults) -> Outcome:
    """By the first seed."""
    if (fits := _fits(results)) is None:
        return None
    losses, least = fits
    measured = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    near = all(loss <= least + _NEAR for loss in losses.values())
    return f"training loss {measured} (n = 1); least possible {least:.3f}", near


def _fits_best(results: LongResults) -> Outcome:
    """Not decided, unless nothing has a spread: that of losses is not known."""
    if (fits := _fits(results)) is None:
        return None
    losses, _ = fits
    differences = [f"{name} {losses['M=0'] - losses[name]:+.3f}" for name in ("M=2", "M=4")]
    bare = all(losses["M=0"] < losses[name] for name in ("M=2", "M=4"))
    decided = bare if results.noise[False] == 0 else None
    return f"training loss of M=0 less that of {', of '.join(differences)} (n = 1)", decided


def _fits(results: LongResults) -> tuple[dict[str, float], float] | None:
    """The last training losses, and the least that there can be."""
    losses = {}
    for name in ("M=0", "M=2", "M=4"):
        trained = results.groups["C"][name]
        if not trained:
            return None
        losses[name] = trained[0].curve[-1]["train_loss"]
        smoothing = trained[0].recipe.get("smoothing", 0.1)
        least = _least_loss(smoothing, trained[0].config["num_classes"])
    return losses, least


def _least_loss(smoothing: float, classes: int) -> float:
    """Cross-entropy of smoothed labels with themselves."""
    other = smoothing / classes
    true = 1 - smoothing + other
    rest = (classes - 1) * other * math.log(other) if smoothing else 0.0
    return -(true * math.log(true) + rest)


def _slowly(results: LongResults) -> Outcome:
    gaps = _gaps(results, *(("B", f"M={m}", f"M={m - 1}") for m in range(1, 5)))
    if gaps is None:
        return None
    measured = ", ".join(_told(gap) for gap in gaps)
    return f"each against the one before: {measured}", _all(_within(gap, least=-2) for gap in gaps)


def _smaller(results: LongResults) -> Outcome:
    words, outcomes = [], []
    for stages in range(5):
        pair = _gaps(results, *((group, f"M={stages}", "DeiT-S") for group in ("1", "B")))
        if pair is None:
            return None
        words.append(f"M={stages} {_told(pair[0])} → {_told(pair[1])}")
        outcomes.append(_within(_change(*pair), most=0))
    return "to DeiT-S: " + ", ".join(words), _all(outcomes)


_TINY = ("DeiT-Ti", "HVT-Ti-0", "HVT-Ti-1", "Scale HVT-Ti-4")


def _not_flat(results: LongResults) -> Outcome:
    """Both points are of one curve, so the spread over seeds says nothing of their difference."""
    gains = {one.name: one.gain for one in results.rows if one.part.name == "A"}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if len(known) < len(gains):
        return None
    seeds = {one.name: len(one.results) for one in results.rows if one.part.name == "A"}
    measured = ", ".join(f"{name} {gain:+.2f} (n = {seeds[name]})" for name, gain in known.items())
    return f"from epoch 20 to 40: {measured}", all(gain >= FLAT for gain in known.values())


def _longer(results: LongResults) -> Outcome:
    words, outcomes = [], []
    for name in _TINY:
        short, longer = (results.top1(group)[name] for group in ("A10", "A"))
        if not (short and longer):
            return None
        spread, seeds = results.noise[False], (len(longer), len(short))
        error = standard_error((spread, seeds[0]), (spread, seeds[1]))
        gain = Gap(statistics.fmean(longer) - statistics.fmean(short), error, seeds)
        words.append(f"{name} {_told(gain)}")
        outcomes.append(_within(gain, 2, 5))
    return ", ".join(words), _all(outcomes)


_LONG = LENGTHS["A"]

PREDICTIONS = (
    Prediction(
        "A",
        f"HVT-Ti-1 is below DeiT-Ti after {_LONG} epochs.",
        _gap("A", "HVT-Ti-1", "DeiT-Ti", -math.inf, 0),
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
        "All three fit their training images nearly perfectly (loss within "
        f"{_NEAR:g} of the least that label smoothing allows).",
        _fitted,
    ),
    Prediction("C", "M=0 fits them best.", _fits_best),
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

AGAINST = (
    Prediction(
        "A",
        f"HVT-Ti-1 is at or above DeiT-Ti after {_LONG} epochs.",
        _gap("A", "HVT-Ti-1", "DeiT-Ti", 0, math.inf),
    ),
    Prediction("A10", "The gap does not fall from 1 to 10 to 40 epochs.", _not(_falls("HVT-Ti-1"))),
    Prediction(
        "C",
        "M=4 is below M=0 by more than the seeds' spread.",
        _gap("C", "M=4", "M=0", -math.inf, 0),
    ),
    Prediction(
        "B",
        "M=4 is above M=0 by as much as after one epoch (4.8).",
        _gap("B", "M=4", "M=0", 4.8, math.inf),
    ),
    Prediction(
        "P",
        "HVT-Ti-1 and DeiT-Ti with PoWER differ by two points or more.",
        _not(_gap("A", "HVT-Ti-1", "DeiT-Ti + PoWER", -2, 2)),
    ),
)
"""What the page says would speak against the explanation."""
