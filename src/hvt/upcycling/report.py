"""Tables of an upcycling: the ranking, and cost and agreement before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..costs import cost
from ..model import HVT
from .distil import Agreement
from .placement import Ranked, describe

SHOWN = 12
"""Rows of the printed ranking."""


@dataclass(frozen=True)
class Row:
    """One model of the table."""

    name: str
    gflops: float
    params_m: float
    agreement: float
    kl: float


def rows_of(source: HVT, models: dict[str, HVT], scores: dict[str, Agreement]) -> list[Row]:
    """A row for the source, which is like itself, and for each model."""
    scores = {"source": Agreement(100.0, 0.0, 0), **scores}
    rows = []
    for name, model in {"source": source, **models}.items():
        price, score = cost(model), scores[name]
        rows.append(Row(name, price.gflops, price.params_m, score.agreement, score.kl))
    return rows


def ranking_table(ranked: Sequence[Ranked]) -> Table:
    """The best candidates, and the unpooled ones wherever they stand."""
    table = _table("candidate, untrained", "GFLOPs", "agreement", "KL", "photos")
    for place, row in enumerate(ranked):
        if place < SHOWN or not row.config.pool_blocks:
            table.add_row(
                describe(row.config), f"{row.gflops:.3f}", f"{row.agreement:.1f} %",
                f"{row.kl:.4f}", str(row.photos),
            )  # fmt: skip
    return table


def result_table(rows: Sequence[Row], head: bool) -> Table:
    """Cost of each model, and how close it is to the source."""
    closeness = ("agreement", "KL") if head else ("cosine similarity", "1 - cosine")
    table = _table("model", "GFLOPs", "parameters (M)", *closeness)
    for row in rows:
        table.add_row(
            row.name, f"{row.gflops:.3f}", f"{row.params_m:.2f}", f"{row.agreement:.1f} %",
            f"{row.kl:.4f}",
        )  # fmt: skip
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(first, box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
