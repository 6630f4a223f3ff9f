"""The paper's tables as it prints them, and its costs beside ours.

`tables.csv` has a line per row: the model and the overrides that give it, then the figures printed.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..costs import cost
from ..errors import HVTError, did_you_mean
from ..zoo import MODELS

FILE = Path(__file__).parent / "tables.csv"
DATA = ("imagenet", "cifar100")
"""The data sets of the paper; a row has figures for one or both."""

FOOTNOTE = (
    "GFLOPs are multiply-adds with ImageNet's 1000-class head, also in the CIFAR-100 tables: only "
    "then does every row come out. One row can tell: the resolution of 160 prints 0.69 and is "
    "0.6849 with its 100 classes. Parameters are those of the row's own classes."
)


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    table: str
    name: str
    model: str
    overrides: dict[str, Any]
    gflops: float
    params_m: float | None
    top1: dict[str, float]
    """The printed top-1 by data set; empty where the paper gives a cost alone."""
    top5: dict[str, float]

    @property
    def title(self) -> str:
        return f"{self.table}: {self.name}"

    @property
    def power(self) -> bool:
        """Whether it is DeiT with PoWER, which is trained in three steps."""
        return self.model.endswith("_power")


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    name: str
    place: str
    """Where it stands in the paper."""
    about: str
    rows: tuple[Row, ...]

    @property
    def trained(self) -> bool:
        """Whether the paper gives accuracies and not costs alone."""
        return any(row.top1 for row in self.rows)


# In the order of the paper.
_PLACES = {
    "main": ("Table 1", "DeiT, DeiT with PoWER, HVT-1, and HVT-4 scaled to DeiT's cost"),
    "cls_token": ("Table 2", "class token against the average of all tokens"),
    "pool_type": ("Table 3", "pooling by convolution, average and maximum"),
    "pooling_stages": ("Table 4", "number of pooling stages"),
    "num_blocks": ("Table 5", "number of blocks"),
    "num_heads": ("Table 6", "number of heads, and with it the width"),
    "resolution": ("Table 7", "image size"),
    "patch_size": ("Table 8", "patch size"),
    "pooling_2d": ("Table 9", "2D pooling at DeiT's cost"),
    "scalability": ("Section 4.2", "what the saved cost of HVT-S-4 buys; costs alone"),
}


TINY = (
    ("main", "DeiT-Ti"),
    ("cls_token", "DeiT-Ti without CLS"),
    ("main", "HVT-Ti-1"),
    ("main", "Scale HVT-Ti-4"),
)
"""Table and row: from DeiT-Ti to its scaled rival, what is trained at several lengths."""

FIGURE4, CURVES = "figure4", ("DeiT-Ti", "Scale HVT-Ti-4")
"""Two of them, of nearly equal cost, whose curves the paper shows."""


_BESIDE = {
    "main": (
        ("DeiT-Ti", "cls_token", "DeiT-Ti without CLS", "HVT-Ti-0"),
        ("DeiT-S", "pooling_stages", "M=0", "HVT-S-0"),
    )
}
"""Rows of other tables to show in one: after which row, from which table, which row, and its name
there. In the main table, what dropping the class token alone gives."""


@functools.cache
def tables() -> dict[str, Table]:
    """Every table by name."""
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = [_row(line) for line in csv.DictReader(file)]
    return {
        name: Table(name, place, about, tuple(row for row in rows if row.table == name))
        for name, (place, about) in _PLACES.items()
    }


def trainable() -> dict[str, Table]:
    """What can be trained, by name: the tables with accuracies, and Figure 4 as one."""
    curves = tuple(replace(get_row(tables()[name], row), table=FIGURE4) for name, row in TINY)
    about = "loss and top-1 while training, of DeiT, the scaled HVT and those in between"
    return {name: table for name, table in tables().items() if table.trained} | {
        FIGURE4: Table(FIGURE4, "Figure 4", about, curves)
    }


def shown_rows(table: Table) -> list[Row]:
    """The rows of a table, and those of other tables that are shown among them."""
    rows = list(table.rows)
    for after, source, name, title in _BESIDE.get(table.name, ()):
        place = [row.name for row in rows].index(after) + 1
        rows.insert(place, replace(get_row(tables()[source], name), name=title))
    return rows


def get_table(name: str) -> Table:
    """A table by name."""
    known = tables() | trainable()
    if name not in known:
        raise HVTError(f"the paper has no table {name!r}: {did_you_mean(name, known)}")
    return known[name]


def get_row(table: Table, name: str) -> Row:
    """A row of a table by name."""
    for row in table.rows:
        if row.name == name:
            return row
    names = [row.name for row in table.rows]
    raise HVTError(f"the table {table.name} has no row {name!r}: {did_you_mean(name, names)}")


def _row(line: dict[str, str]) -> Row:
    def printed(what: str) -> dict[str, float]:
        return {data: float(line[f"{data}_{what}"]) for data in DATA if line[f"{data}_{what}"]}

    return Row(
        table=line["table"],
        name=line["row"],
        model=line["model"],
        overrides=json.loads(line["overrides"]),
        gflops=float(line["gflops"]),
        params_m=float(line["params_m"]) if line["params_m"] else None,
        top1=printed("top1"),
        top5=printed("top5"),
    )


# ── costs ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Entry:
    """One printed cost and what it is by our count."""

    row: Row
    what: str
    """GFLOPs or params."""
    printed: float
    computed: float | None
    """None where no model has the row's name."""

    @property
    def equal(self) -> bool:
        """Whether ours is the printed one, to the last of its two digits."""
        return self.computed is not None and round(self.computed, 2) == self.printed


def entries(chosen: Iterable[Table] | None = None) -> list[Entry]:
    """Every FLOPs and every parameter count that the paper prints, beside ours."""
    compared = []
    for table in tables().values() if chosen is None else chosen:
        for row in table.rows:
            known = row.model in MODELS
            # FOOTNOTE says why the classes differ between the two.
            with_head = row.overrides | {"num_classes": 1000}
            gflops = cost(row.model, **with_head).gflops if known else None
            compared.append(Entry(row, "GFLOPs", row.gflops, gflops))
            if row.params_m is not None:
                params = cost(row.model, **row.overrides).params_m if known else None
                compared.append(Entry(row, "params", row.params_m, params))
    return compared
