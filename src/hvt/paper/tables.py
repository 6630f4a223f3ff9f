"""The paper's tables as it prints them, and its costs beside ours.

`tables.csv` has a line per row: the model and the overrides that give it, then the printed figures.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..costs import cost
from ..errors import HVTError, did_you_mean

FILE = Path(__file__).parent / "tables.csv"
DATASETS = ("imagenet", "cifar100")
"""The datasets of the paper; a row has figures for one, both or none."""

FOOTNOTE = (
    "GFLOPs are MACs with ImageNet's 1,000-class head, even in the CIFAR-100 tables: only then do "
    "all rows match. The row that shows it is resolution 160, printed as 0.69; with 100 classes it "
    "would be 0.6849. Parameters are counted with each row's own classes."
)

# In the order of the paper.
_TITLES = {
    "main": ("Table 1", "DeiT, DeiT with PoWER, HVT-1, and HVT-4 scaled to DeiT's cost"),
    "cls_token": ("Table 2", "class token against the average of all tokens"),
    "pool_type": ("Table 3", "pooling by convolution, average and maximum"),
    "pooling_stages": ("Table 4", "number of pooling stages"),
    "num_blocks": ("Table 5", "number of blocks"),
    "num_heads": ("Table 6", "number of heads, and with it the width"),
    "resolution": ("Table 7", "image size"),
    "patch_size": ("Table 8", "patch size"),
    "pooling_2d": ("Table 9", "2D pooling at DeiT's cost"),
    "scalability": ("Section 4.2", "what the saved cost of HVT-S-4 buys; costs only"),
}


@dataclass(frozen=True)
class PaperRow:
    """One line of a table."""

    table: str
    name: str
    model: str
    overrides: dict[str, Any]
    gflops: float
    params_m: float | None
    top1: dict[str, float]
    """The printed top-1 by dataset; empty where the paper gives only a cost."""

    @property
    def power(self) -> bool:
        """Whether it is DeiT with PoWER, which is trained in three steps."""
        return self.model.endswith("_power")


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    name: str
    place: str
    """Where it stands in the paper."""
    about: str
    rows: tuple[PaperRow, ...]

    def row(self, name: str) -> PaperRow:
        """A row by name."""
        return next(row for row in self.rows if row.name == name)


@functools.cache
def tables() -> dict[str, PaperTable]:
    """Every table by name."""
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = [_row(line) for line in csv.DictReader(file)]
    return {
        name: PaperTable(name, place, about, tuple(row for row in rows if row.table == name))
        for name, (place, about) in _TITLES.items()
    }


def get_table(name: str) -> PaperTable:
    """A table by name."""
    if name not in tables():
        raise HVTError(f"the paper has no table {name!r}: {did_you_mean(name, tables())}")
    return tables()[name]


def _row(line: dict[str, str]) -> PaperRow:
    return PaperRow(
        table=line["table"],
        name=line["row"],
        model=line["model"],
        overrides=json.loads(line["overrides"]),
        gflops=float(line["gflops"]),
        params_m=float(line["params_m"]) if line["params_m"] else None,
        top1={d: float(line[f"{d}_top1"]) for d in DATASETS if line[f"{d}_top1"]},
    )


def printed_costs(chosen: Iterable[PaperTable]) -> list[dict[str, Any]]:
    """Every GFLOPs and every parameter count that some tables print, beside ours."""
    compared: list[dict[str, Any]] = []
    for row in (row for table in chosen for row in table.rows):
        # FOOTNOTE says why the classes differ between the two.
        gflops = cost(row.model, **row.overrides | {"num_classes": 1000}).gflops
        params = cost(row.model, **row.overrides).params_m
        for what, printed, ours in (
            ("GFLOPs", row.gflops, gflops),
            ("params", row.params_m, params),
        ):
            if printed is not None:
                values = {"what": what, "printed": printed, "computed": ours}
                equal = round(ours, 2) == printed  # to the last of its two digits
                compared.append({"table": row.table, "row": row.name, **values, "equal": equal})
    return compared
