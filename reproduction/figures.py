"""The paper's Figures 1 and 4, with its points and ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvt.costs import cost
from hvt.files import atomic_write
from hvt.plot import new_figure
from hvt.training.watch import draw_curves

from .protocol import BUDGETS, Protocol
from .report import NAMES, fill
from .results import Known
from .rows import CURVES, FIGURE4, get_table

# The first that a row's name has in it.
_COLOURS = {"HVT": "C3", "PoWER": "C2", "DeiT": "C0"}


def draw(folder: Path, protocol: Protocol, known: Known, data: str | None) -> list[Path]:
    """Write `figure1.png`, and `figure4.png` where its rows have been run."""
    written = [folder / "figure1.png"]
    _figure1(written[0], protocol, known, data)
    curves = figure4_curves(protocol, known, data)
    if curves:
        written.append(folder / "figure4.png")
        draw_curves(written[-1], curves)
    return written


def _figure1(path: Path, protocol: Protocol, known: Known, data: str | None) -> None:
    """Cost against top-1: the paper's on the left, ours on the right under both budgets."""
    table = get_table("main")
    figure = new_figure(figsize=(10, 4.2))
    left, right = figure.subplots(1, 2)
    left.set_title("the paper: ImageNet, 224 pixels", fontsize=10)
    left.set_xlabel("GFLOPs (multiply-adds)")
    for row in table.rows:
        _point(left, row.gflops, [row.top1["imagenet"]], row.name, "o")
    right.set_title(f"here: {NAMES[protocol.data_of(table, data)]}", fontsize=10)
    right.set_xlabel("M MACs per image")
    lines = fill(protocol, table, known, data)
    for budget, marker in zip(BUDGETS, ("o", "^"), strict=True):
        for line in lines:
            if line.results[budget]:
                figures = [one.top1 for one in line.results[budget]]
                _point(right, cost(line.config).macs / 1e6, figures, line.row.name, marker)
        right.plot([], [], marker, color="grey", label=f"equal {budget}")
    right.legend(fontsize=8, loc="upper right")
    for axes in (left, right):
        axes.set_ylabel("top-1, %")
        axes.grid(alpha=0.25)
        axes.margins(x=0.2, y=0.12)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def figure4_curves(protocol: Protocol, known: Known, data: str | None = None) -> dict[str, Any]:
    """Figure 4's two curves, of the first seed that both have; empty without."""
    pair = {
        line.row.name: {one.seed: one.curve for one in line.results["epochs"]}
        for line in fill(protocol, get_table(FIGURE4), known, data)
        if line.row.name in CURVES
    }
    shared = sorted(set.intersection(*(set(seeds) for seeds in pair.values())))
    return {name: seeds[shared[0]] for name, seeds in pair.items()} if shared else {}


def _point(axes: Any, x: float, figures: Sequence[float], name: str, marker: str) -> None:
    """The mean over seeds, with a bar from the lowest to the highest."""
    mean = statistics.fmean(figures)
    reach = [[mean - min(figures)], [max(figures) - mean]]
    colour = next(colour for part, colour in _COLOURS.items() if part in name)
    axes.errorbar(x, mean, reach, fmt=marker, color=colour, markersize=6, capsize=2, linewidth=0.8)
    # PoWER's points lie beside those of HVT-1: its names go below.
    shift = (5, -10) if "PoWER" in name else (5, 4)
    axes.annotate(name, (x, mean), xytext=shift, textcoords="offset points", fontsize=7)
