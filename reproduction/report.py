"""The paper's tables with its figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvt.config import HVTConfig
from hvt.costs import arrow, cost
from hvt.paper.tables import PaperRow, PaperTable
from hvt.training.watch import clock

from . import long
from .protocol import BUDGETS, Protocol, Training, load_protocol, plan
from .results import Finished, Known
from .rows import get_table, shown_rows, trainable

NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "digits", "imagenet": "ImageNet"}


@dataclass(frozen=True)
class Line:
    """A row with what was measured of it under each budget."""

    row: PaperRow
    trainings: dict[str, Training]
    results: dict[str, list[Finished]]

    @property
    def config(self) -> HVTConfig:
        """Of the trained model; with PoWER the retention is known only then."""
        for results in self.results.values():
            if results:
                return HVTConfig.from_dict(results[0].config)
        return self.trainings["epochs"].config


def fill(
    protocol: Protocol, table: PaperTable, known: Known, data: str | None = None
) -> list[Line]:
    """The rows of a table with the results that there are."""
    source = protocol.data_of(table, data)
    lines = []
    for row in shown_rows(table):
        if row.table != table.name and protocol.data_of(get_table(row.table), data) != source:
            continue  # from another table, and trained on other data
        trainings = {budget: plan(protocol, row, budget, source) for budget in BUDGETS}
        results = {budget: known.get(one.key, []) for budget, one in trainings.items()}
        lines.append(Line(row, trainings, results))
    return lines


def cells(table: PaperTable, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, as text."""
    printed = [data for data in NAMES if any(data in row.top1 for row in table.rows)]
    headings = ["row", "paper's GFLOPs"]
    headings += [f"paper's {NAMES[data]} top-1" for data in printed]
    headings += ["here", "tokens", "M MACs", "params (M)"]
    for budget in BUDGETS:
        headings += [f"top-1, equal {budget}", "epochs", "time"]
    rows = []
    for line in lines:
        config, price = line.config, cost(line.config)
        size = f"{config.image[0]} px, patch {config.patch_size}, width {config.width}"
        cell = [line.row.name, f"{line.row.gflops:.2f}"]
        cell += [f"{line.row.top1[d]:.2f}" if d in line.row.top1 else "" for d in printed]
        cell += [f"{size}, {config.depth} blocks", arrow(list(config.tokens))]
        cell += [f"{price.macs / 1e6:.1f}", f"{price.params_m:.3f}"]
        for budget in BUDGETS:
            results = line.results[budget]
            cell += [_top1(results), _epochs(line.trainings[budget]), _time(results)]
        rows.append(cell)
    return headings, rows


def _top1(results: Sequence[Finished]) -> str:
    """Mean ± standard deviation over seeds, and their number."""
    if not results:
        return "not run"
    figures = [one.top1 for one in results]
    spread = f" ± {statistics.stdev(figures):.2f}" if len(figures) > 1 else ""
    return f"{statistics.fmean(figures):.2f}{spread} (n = {len(figures)})"


def _epochs(training: Training) -> str:
    steps = training.power
    more = f" + {steps.search:g} + {steps.retrain:g}" if steps else ""
    return f"{training.recipe.epochs:g}{more}"


def _time(results: Sequence[Finished]) -> str:
    times = [one.seconds for one in results if one.seconds]
    return clock(statistics.fmean(times)) if times else ""


# ── the page ────────────────────────────────────────────────────────────────────────────────────


def render(
    protocol: Protocol, known: Known, data: str | None = None, known_long: Known | None = None
) -> str:
    """Every table as Markdown, and the rows of the long protocol where there are results of it."""
    parts = [f"# The paper's tables, by the protocol `{protocol.name}`; top-1 of the last weights"]
    parts += [table_part(protocol, table, known, data) for table in trainable().values()]
    if known_long:
        parts += ["## long", long_table(known_long, load_protocol("long"))]
    return "\n\n".join(parts) + "\n"


def table_part(protocol: Protocol, table: PaperTable, known: Known, data: str | None = None) -> str:
    """One table under its heading."""
    text = markdown(*cells(table, fill(protocol, table, known, data)))
    return f"## {table.name}\n\n{table.place}: {table.about}.\n\n{text}"


def long_table(known: Known, protocol: Protocol) -> str:
    """The rows of every part of the long protocol."""
    rows = []
    for part in long.PARTS.values():
        for row in part.rows:
            results = known.get(long.training(protocol, part, row).key, [])
            rows.append([part.name, row.name, str(part.epochs), _top1(results), _time(results)])
    return markdown(["part", "row", "epochs", "top-1", "time"], rows)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    rule = ["---", *["--:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rule, *rows])
