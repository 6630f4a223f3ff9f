"""The rows that can be trained: the paper's tables with accuracies, and Figure 4 as a table."""

from __future__ import annotations

import functools
from dataclasses import replace

from hvt.errors import HVTError, did_you_mean
from hvt.paper.tables import PaperRow, PaperTable, tables

TINY = (
    ("main", "DeiT-Ti"),
    ("cls_token", "DeiT-Ti without CLS"),
    ("main", "HVT-Ti-1"),
    ("main", "Scale HVT-Ti-4"),
)
"""Table and row: from DeiT-Ti to the HVT scaled to its cost, trained at several lengths."""

FIGURE4, CURVES = "figure4", ("DeiT-Ti", "Scale HVT-Ti-4")
"""Two of them, of nearly equal cost, whose curves the paper shows."""

# After which row of the main table which row of another table is shown, and its name there: what
# dropping only the class token gives.
_GUESTS = (
    ("DeiT-Ti", "cls_token", "DeiT-Ti without CLS", "HVT-Ti-0"),
    ("DeiT-S", "pooling_stages", "M=0", "HVT-S-0"),
)


@functools.cache
def trainable() -> dict[str, PaperTable]:
    """The tables with accuracies by name, and Figure 4."""
    trained = {name: table for name, table in tables().items() if any(r.top1 for r in table.rows)}
    curves = tuple(replace(trained[table].row(row), table=FIGURE4) for table, row in TINY)
    about = "loss and top-1 while training, of DeiT, the scaled HVT and those in between"
    return trained | {FIGURE4: PaperTable(FIGURE4, "Figure 4", about, curves)}


def get_table(name: str) -> PaperTable:
    """A table that can be trained, by name."""
    if name in trainable():
        return trainable()[name]
    if name in tables():
        raise HVTError(f"{name} has only costs, nothing to train: use hvt paper costs")
    raise HVTError(f"the paper has no table {name!r}: {did_you_mean(name, trainable())}")


def shown_rows(table: PaperTable) -> list[PaperRow]:
    """The rows of a table, and those of other tables that are shown among them."""
    rows = list(table.rows)
    for after, source, name, title in _GUESTS if table.name == "main" else ():
        place = [row.name for row in rows].index(after) + 1
        rows.insert(place, replace(get_table(source).row(name), name=title))
    return rows
