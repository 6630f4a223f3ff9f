"""What was measured by the `long` protocol, part by part, beside the short trainings.

A group is a length of training and its images: `1` and `3` epochs are the CPU protocol's, the
others are parts of `long`. PoWER's row, which starts from part A's DeiT, is counted among part A.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .claims import Spread, pooled_spread, standard_error
from .filled import Known, Noise
from .long import PARTS, SMALL, Part, rows_of, training
from .protocol import Protocol, Training, plan
from .results import Finished
from .tables import FIGURE4, TINY, Row, get_row, get_table, trainable

NAMES = {"DeiT-Ti without CLS": "HVT-Ti-0"}
"""Of rows whose table has another name for them than the page."""
_ALSO = {
    "DeiT-Ti": ("DeiT-Ti with CLS",),
    "DeiT-Ti without CLS": ("HVT-Ti-0",),
    "M=0": ("HVT-S-0",),
    "M=1": ("HVT-S-1",),
}
"""Other names of the same training, by which claims call it."""
LENGTHS = {"1": 1, "3": 3, "A10": 10, "A": 40}
"""Groups of the tiny rows on all images, and their epochs."""


@dataclass(frozen=True)
class Measured:
    """A row of a part with its results, one for each seed."""

    part: Part
    row: Row
    training: Training
    results: Sequence[Finished]

    @property
    def name(self) -> str:
        return NAMES.get(self.row.name, self.row.name)

    @property
    def gain(self) -> float | None:
        """Points gained in the second half of the training, on average over seeds."""
        gains = []
        for one in self.results:
            points = {p["epoch"]: p["val_top1"] for p in one.curve if p["val_top1"] is not None}
            half = points.get(self.part.epochs / 2)
            if half is None or self.row.power:  # whose curve is that of retraining alone
                return None
            gains.append(one.top1 - half)
        return statistics.fmean(gains) if gains else None


FLAT = 1.5
"""Points that a flat curve gains at most, exclusive, in its second half."""


@dataclass(frozen=True)
class Gap:
    """A difference of two rows' means, in points."""

    points: float
    error: float | None
    """Its standard error by the spread of all rows; None where that is not known."""
    seeds: tuple[int, int]


@dataclass(frozen=True)
class LongResults:
    """Everything that the page says of the long protocol follows from this."""

    rows: tuple[Measured, ...]
    groups: Mapping[str, Mapping[str, Sequence[Finished]]]
    noise: Noise
    """Of the trainings of both protocols that have several seeds."""
    several: Mapping[bool, tuple[int, int]]
    """How many those are, with PoWER and without: of the short protocol and of `long`."""
    short: Protocol
    """Whose trainings are groups `1` and `3`."""

    def top1(self, group: str) -> dict[str, list[float]]:
        """Top-1 over seeds by row."""
        return {name: [one.top1 for one in each] for name, each in self.groups[group].items()}

    def gap(self, group: str, left: str, right: str) -> Gap | None:
        """None where a row has not been run."""
        ours, theirs = (self.top1(group).get(name, []) for name in (left, right))
        if not (ours and theirs):
            return None
        spread, seeds = self.spread(group), (len(ours), len(theirs))
        error = standard_error((spread[left], seeds[0]), (spread[right], seeds[1]))
        return Gap(statistics.fmean(ours) - statistics.fmean(theirs), error, seeds)

    def spread(self, group: str) -> Spread:
        """The standard deviation over seeds that each row has."""
        return {name: self.noise["PoWER" in name] for name in self.groups[group]}


def collect(
    protocol: Protocol,
    known: Known,
    short: Protocol,
    known_short: Known,
    seeds: Mapping[bool, Sequence[Sequence[float]]],
) -> LongResults:
    """Results of both protocols; `seeds` has the short one's trainings with several of them."""
    rows = tuple(
        Measured(part, row, one, tuple(known.get(one.key, ())))
        for part in PARTS.values()
        for row in rows_of(part)
        for one in [training(protocol, part, row)]
    )
    groups: dict[str, dict[str, Sequence[Finished]]] = {"1": {}, "3": {}}
    for table, name in (*TINY, *SMALL):
        _add(groups["1"], name, _short(short, known_short, get_row(get_table(table), name)))
    for row in trainable()[FIGURE4].rows:
        _add(groups["3"], row.name, _short(short, known_short, row))
    for one in rows:
        group = "A" if one.part.name == "P" else one.part.name
        _add(groups.setdefault(group, {}), one.row.name, one.results)
    noise, several = {}, {}
    for power in (True, False):
        own = [
            [result.top1 for result in one.results]
            for one in rows
            if one.row.power == power and len(one.results) > 1
        ]
        # Together: two seeds of one row alone may lie side by side by chance.
        noise[power] = pooled_spread([*seeds[power], *own])
        several[power] = (len(seeds[power]), len(own))
    return LongResults(rows, groups, noise, several, short)


def _short(protocol: Protocol, known: Known, row: Row) -> Sequence[Finished]:
    data = next(iter(protocol.recipes))
    return tuple(known.get(plan(protocol, row, "epochs", data).training.key, ()))


def _add(group: dict[str, Sequence[Finished]], name: str, results: Sequence[Finished]) -> None:
    for alias in (name, *_ALSO.get(name, ())):
        group[alias] = results
