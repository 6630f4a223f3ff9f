"""A table of the paper with its figures: what was measured of each row, as cells of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..config import HVTConfig
from ..costs import arrow, cost
from ..training.watch import clock
from .claims import BUDGETS, LEAST_EPOCHS, Spread, pooled_spread
from .protocol import Plan, Protocol, macs_of, plan
from .results import Finished
from .tables import Row, Table, get_table, shown_rows

Known = Mapping[str, Sequence[Finished]]
"""Results by training."""

NOT_RUN = "not run"
SHORT, SLOW = "†", "‡"
"""Marks of a row with too few epochs, and of a time that says little of the model."""
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "digits", "imagenet": "ImageNet"}
READINGS = {"epochs": "equal epochs", "compute": "equal compute"}


@dataclass(frozen=True)
class Line:
    """A row with what was measured of it in each reading."""

    row: Row
    plans: dict[str, Plan]
    results: dict[str, list[Finished]]

    @property
    def config(self) -> HVTConfig:
        """As it was trained; with PoWER the retention is known afterwards."""
        for results in self.results.values():
            if results:
                return HVTConfig.from_dict(results[0].config)
        return self.plans["epochs"].training.config

    @property
    def macs(self) -> float:
        measured = any(self.results.values())
        return macs_of(self.config) if measured else self.plans["epochs"].training.macs


@dataclass(frozen=True)
class Filled:
    """A table with its figures."""

    table: Table
    protocol: str
    data: str
    lines: list[Line]

    @property
    def readings(self) -> tuple[str, ...]:
        """Both, or one where they train every row alike."""
        alike = all(
            line.plans["epochs"].training.key == line.plans["compute"].training.key
            for line in self.lines
        )
        return ("epochs",) if alike else BUDGETS

    @property
    def results(self) -> list[Finished]:
        """Every result once."""
        every = [one for line in self.lines for budget in BUDGETS for one in line.results[budget]]
        return list({one.name: one for one in every}.values())

    def figures(self, budget: str) -> dict[str, list[float]]:
        """Top-1 over seeds by row."""
        return {line.row.name: [one.top1 for one in line.results[budget]] for line in self.lines}

    def spread(self, noise: Noise) -> Spread:
        """The standard deviation over seeds that each row has."""
        return {line.row.name: noise[line.row.power] for line in self.lines}

    def short(self, budget: str) -> set[str]:
        """Rows that were trained for too little to decide anything."""
        return {line.row.name for line in self.lines if is_short(line.plans[budget])}


Noise = Mapping[bool, float | None]
"""The spread over seeds of rows with PoWER (True), which search as well as train, and without."""


def is_short(planned: Plan) -> bool:
    """Whether a row at equal compute has too few epochs to decide anything."""
    return planned.budget == "compute" and planned.training.epochs < LEAST_EPOCHS


def fill(protocol: Protocol, table: Table, known: Known, data: str | None = None) -> Filled:
    """A table with the results that there are."""
    source = protocol.data_of(table, data)
    lines = []
    for row in shown_rows(table):
        if row.table != table.name and protocol.data_of(get_table(row.table), data) != source:
            continue  # shown beside, and trained on other data
        plans = {budget: plan(protocol, row, budget, source) for budget in BUDGETS}
        results = {b: list(known.get(one.training.key, ())) for b, one in plans.items()}
        lines.append(Line(row, plans, results))
    return Filled(table, protocol.name, source, lines)


def cells(filled: Filled, usual: float | None = None) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, as text; `usual` is the speed that times are measured against."""
    printed = [data for data in NAMES if any(data in row.top1 for row in filled.table.rows)]
    headings = ["row", "paper's GFLOPs"]
    headings += [f"paper's {NAMES[data]} top-1" for data in printed]
    headings += ["here", "tokens", "M multiply-adds", "params (M)"]
    for budget in filled.readings:
        headings += [f"top-1, {READINGS[budget]}", "epochs", "time"]
    rows = []
    for line in filled.lines:
        cell = [line.row.name, f"{line.row.gflops:.2f}"]
        cell += [f"{line.row.top1[d]:.2f}" if d in line.row.top1 else "" for d in printed]
        cell += [_size(line.config), arrow(list(line.config.tokens))]
        cell += [f"{line.macs / 1e6:.1f}", f"{cost(line.config).params_m:.3f}"]
        for budget in filled.readings:
            results, planned = line.results[budget], line.plans[budget]
            mark = f" {SHORT}" if results and is_short(planned) else ""
            cell += [_top1(results) + mark, _epochs(planned), _time(results, usual)]
        rows.append(cell)
    return headings, rows


def _size(config: HVTConfig) -> str:
    side, patch = config.image[0], config.patch_size
    return f"{side} px, patch {patch}, width {config.width}, {config.depth} blocks"


def _top1(results: Sequence[Finished]) -> str:
    """Mean ± standard deviation over seeds, and their number."""
    if not results:
        return NOT_RUN
    figures = [one.top1 for one in results]
    mean = f"{statistics.fmean(figures):.2f}"
    if len(figures) > 1:
        mean += f" ± {statistics.stdev(figures):.2f}"
    return f"{mean} (n = {len(figures)})"


def _epochs(planned: Plan) -> str:
    training = planned.training
    steps = training.power
    text = f"{training.epochs:g}"
    if steps is not None:
        text = f"{training.recipe.epochs:g} + {steps.search:g} + {steps.retrain:g}"
    if planned.budget == "compute":
        text += f" ({planned.ratio:.2f} × budget)"
    return text


def _time(results: Sequence[Finished], usual: float | None) -> str:
    times = [one.seconds for one in results if one.seconds]
    mark = f" {SLOW}" if any(is_slow(one, usual) for one in results) else ""
    return clock(statistics.fmean(times)) + mark if times else ""


def is_slow(one: Finished, usual: float | None) -> bool:
    """Whether it ran at less than half of a speed: paused, or with other work beside it."""
    return bool(usual and one.seconds and one.training_macs / one.seconds < usual / 2)


def usual_speed(results: Iterable[Finished]) -> float | None:
    """The median of multiply-adds a second."""
    speeds = [one.training_macs / one.seconds for one in results if one.seconds]
    return statistics.median(speeds) if speeds else None


def noise_of(filled: Iterable[Filled]) -> Noise:
    """The spread over seeds of the trainings with PoWER together, and of the others."""
    return {power: pooled_spread(seeds) for power, seeds in several_seeds(filled).items()}


def several_seeds(filled: Iterable[Filled]) -> dict[bool, list[list[float]]]:
    """Top-1 by seed of each training that has several, by whether it is one with PoWER."""
    groups: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for line in (line for one in filled for line in one.lines):
        for budget, results in line.results.items():
            if len(results) > 1:
                key = line.plans[budget].training.key
                groups[line.row.power][key] = [one.top1 for one in results]
    return {power: list(by_key.values()) for power, by_key in groups.items()}


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 99) -> str:
    """A table; the columns from `left` on are aligned to the right."""
    rule = ["---" if index < left else "--:" for index in range(len(headings))]
    every = [headings, rule, *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in every)
