"""The ranking as a table, and cost and agreement before and after as rows."""

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
    """One model of the report."""

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
    table = Table("candidate, untrained", box=None, header_style="bold")
    for heading in ("GFLOPs", "agreement", "KL", "photos"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(ranked):
        if place < SHOWN or not row.config.pool_blocks:
            table.add_row(
                describe(row.config), f"{row.gflops:.3f}", f"{row.agreement:.1f} %",
                f"{row.kl:.4f}", str(row.photos),
            )  # fmt: skip
    return table
